"""Decides what the commands of a workspace may see and change: `Policy.confinement`.

A command can read everything except what is in masked directories, such as HOME and /tmp, which look empty. Inside
these it sees what its work needs: the workspace, toolchains (`toolchains.py`), the repository around the workspace
(`repositories.py`), and what the settings name. Secrets are hidden wherever they are. It can write into its own
temporary directory and caches (`variables.py` tells its tools where these are), and into the workspace if its access
is `write`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from crow.domain.protected_names import DEFAULT_NAMES, ProtectedNames
from crow.programs import SYSTEM_PROGRAMS, Programs, own_trees
from crow.tools.layers import Overlay
from crow.tools.network.credentials import NO_CREDENTIALS, Credentials
from crow.tools.protection import secret_places
from crow.tools.sandbox import ConfinedAccess, Confinement
from crow.tools.sandbox.paths import existing, folders_above, is_inside_any, prefixes_of
from crow.tools.sandbox.protected import Snapshot
from crow.tools.sandbox.repositories import OuterRepository, find_outer
from crow.tools.sandbox.sockets import listening_sockets
from crow.tools.sandbox.toolchains import is_general, own_programs, toolchains
from crow.tools.sandbox.variables import ToolPlaces

_MASKED = ("/home", "/root", "/run", "/tmp", "/var/tmp")  # noqa: S108 - hidden from commands, not used
"""Directories of other users and programs, which commands may not see. /run holds the sockets of Docker and of the
user's D-Bus: through these, a confined command could run programs outside the sandbox."""

_TEMPORARY = ("/run", "/tmp", "/var/tmp")  # noqa: S108
"""The directories in `_MASKED` that stay masked even if a workspace contains them."""

_SYSTEM = frozenset(
    Path(path)
    for path in ("/", "/bin", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var")
)
"""Directories that cannot be masked, even if HOME is one of them."""

_MOUNT_ESCAPE = re.compile(rb"\\([0-7]{3})")
_RESOLVER = "/run/systemd/resolve"

_FOLDERS = (
    *(".local", ".local/share", ".config", ".config/git", ".cache", ".cache/node", ".cargo", ".gem", ".gradle", ".m2"),
    *(".claude", ".nuget"),
)
"""Folders below HOME that contain toolchains or secrets."""

MAX_READ_ONLY = 32
"""At most this many paths are made read-only, because each of them delays a command by about 0.3 ms. Changes to further
protected paths are undone after the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The user's settings for the sandbox, and crow's own places."""

    enabled: Literal["auto", "off", "required"] = "auto"
    """`auto`: confine commands if a sandbox works. `required`: a command that cannot be confined is not run."""
    network: bool = False
    """Commands with the access `write` may use the network directly."""
    readable: tuple[str, ...] = ()
    """Further files and directories that commands can read. `~` stands for HOME."""
    writable: tuple[str, ...] = ()
    """Further directories that commands with the access `write` can change. `~` stands for HOME."""
    own: tuple[Path, ...] = ()
    """Crow's files and directories, which no confined command can see."""
    masked: tuple[Path, ...] = ()
    """Further directories to mask, in addition to those in `_MASKED`."""
    layers: Path | None = None
    """The directory for layers, and for change sets, which undo the changes of layers. If None, there are no layers."""
    caches: Path | None = None
    """Each workspace gets a directory in this one, for the caches of its commands. If None, these caches last only as
    long as the session."""
    names: ProtectedNames = DEFAULT_NAMES
    """The names of protected files."""
    sockets: tuple[str, ...] = ()
    """Unix sockets that commands can use, or directories that contain them, from the user's settings."""
    programs: Programs = SYSTEM_PROGRAMS
    """Finds the programs that start confined commands."""
    credentials: Credentials = NO_CREDENTIALS
    """The credentials that may be added to requests of commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateDirectories:
    """The private directories of the commands of one session."""

    temporary: Path
    """For temporary files."""
    caches: Path
    """For the caches of package managers."""
    blank: Path
    """An empty file that nobody can read."""
    trust: Path
    """For the certificates that commands trust. They can read it, but not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundPlaces:
    """The toolchains and secret places that exist."""

    stamp: tuple[int, ...]
    """The times when the searched folders last changed."""
    toolchains: tuple[Path, ...]
    """Trees that commands can read, because programs are installed there."""
    hidden: tuple[Path, ...]
    """Secrets of the user, and crow's own files."""


@dataclass(frozen=True, eq=False)
class Policy:
    """The rules that say which paths the commands of one workspace may see and change."""

    roots: tuple[Path, ...]
    """The workspace's directories with links resolved."""
    options: SandboxOptions
    env: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """The environment that crow adapts for commands."""
    _places: list[_FoundPlaces] = field(default_factory=list, repr=False)
    """The newest result of `_found_places`, or nothing yet."""
    _repositories: dict[Path, OuterRepository | None] = field(default_factory=dict, repr=False)
    """The repository around each root, as it was at the first call of `_outer_repositories`."""
    _fixed: dict[tuple[Path, ...], tuple[Path, ...]] = field(default_factory=dict, repr=False)
    """The results of `_own_trees`."""

    def confinement(
        self,
        access: ConfinedAccess,
        private: PrivateDirectories,
        snapshot: Snapshot | None = None,
        denied: Sequence[Path] = (),
        overlays: Sequence[Overlay] = (),
    ) -> Confinement:
        """Return the confinement of a command with this access. `denied` are additional paths to hide.

        What the command writes into the workspace goes one of three ways. With `overlays`, it goes into a layer.
        Without them but with the access `write`, it goes into the workspace itself, except for the protected paths,
        which are in `snapshot`. With the access `read`, it is thrown away at the end of the command.
        """
        home = self.home
        masked, found, roots = self._masked(home), self._found_places(home), self.writable_roots()
        sockets = tuple(dict.fromkeys(self._named(self.options.sockets)))
        # a masked directory that `sandbox.sockets` names stays empty, except for sockets that commands make there
        shown = [path for path in sockets if path not in masked]
        hidden = tuple(dict.fromkeys([*found.hidden, *denied, *(listening_sockets(shown) if sockets else ())]))
        fixed = self._own_trees(roots)
        has_network = access == "write" and self.options.network
        readable = [*(path for path in found.toolchains if is_inside_any(path, masked)), *shown]
        readable += self._readable(private, has_network=has_network)
        writable = [private.caches]
        read_only: Sequence[Path] = ()
        throwaway: tuple[Path, ...] = ()
        if overlays:
            throwaway = tuple(overlay.root for overlay in overlays)
        elif access == "write":
            read_only, folders = _protected_parts(snapshot)
            writable += [*roots, *folders, *folders_above((*read_only, *fixed, *folders, *hidden), roots)]
        else:
            throwaway = _outermost(self.roots)
            readable += [path for path in roots if path not in self.roots]
        visible, hiding = prefixes_of((*readable, *writable, *throwaway)), prefixes_of(masked)
        return Confinement(
            access=access,
            masked=masked,
            readable=tuple(dict.fromkeys(readable)),
            writable=tuple(dict.fromkeys(writable)),
            read_only=tuple(read_only),
            fixed=fixed if access == "write" else (),
            hidden=tuple(path for path in hidden if _is_visible(path, hiding, visible)),
            throwaway=throwaway,
            overlays=tuple(overlays),
            temporary=private.temporary,
            blank=private.blank,
            has_network=has_network,
            sockets=sockets,
        )

    def environment(
        self, access: ConfinedAccess, private: PrivateDirectories, *, has_overlay: bool = False
    ) -> dict[str, str]:
        """Return additional variables for a confined command: private places for temporary files and caches.

        A cache that the command can write to anyway stays where it is. `has_overlay` means that a `read` command can
        write into the workspace, but everything that it writes there is discarded.
        """
        places = self._tool_places(private, self.writable_roots() if access == "write" else ())
        variables = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(private.temporary))
        variables |= places.variables(has_network=access == "write" and self.options.network)
        if self._outer_repositories():  # git must look outside of the workspace, which is a mount of its own
            variables["GIT_DISCOVERY_ACROSS_FILESYSTEM"] = "1"
        if access == "read" and not has_overlay:
            variables |= places.workspace_variables()
        return variables

    def download_variables(self, private: PrivateDirectories) -> dict[str, str]:
        """Return more variables for a confined command that can reach hosts: see `ToolPlaces.download_variables`."""
        return self._tool_places(private, self.writable_roots()).download_variables()

    def writable_roots(self) -> tuple[Path, ...]:
        """Return the directories that commands with the access `write` can change: the workspace, the writable
        directories of the settings, and the git directories of repositories around the workspace."""
        common = [repository.common for repository in self._outer_repositories()]
        return tuple(dict.fromkeys([*self.roots, *self._named(self.options.writable, is_writable=True), *common]))

    def layered_trees(self) -> tuple[Path, ...]:
        """Return the trees that a layer covers: those that commands with the access `write` can change. The result is
        empty if no layer can cover them, because a tree does not exist, commands cannot write to it (`_is_foreign`), or
        another file system is mounted in it."""
        trees = _outermost(self.writable_roots())
        if any(_is_foreign(root) or not os.path.isdir(root) for root in trees):
            return ()
        return () if any(is_inside_any(Path(place).parent, trees) for place in _mount_points()) else trees

    def searched_trees(self) -> tuple[Path, ...]:
        """Return the user's trees that commands can see. They are searched for files that the deny rules hide."""
        named = [*self._named(self.options.readable), *self._named(self.options.writable, is_writable=True)]
        return (*self.roots, *(repository.tree for repository in self._outer_repositories()), *named)

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each directory that commands should be able to use, but cannot."""
        return (
            *(
                f"{root} belongs to another user, so confined commands cannot write there even as root"
                for root in self.roots
                if _is_foreign(root)
            ),
            *(
                f"sandbox.{key}: {entry} {problem}"
                for key, entries in (
                    ("readable", self.options.readable),
                    ("writable", self.options.writable),
                    ("sockets", self.options.sockets),
                )
                for entry in entries
                if (problem := self._problem_of(entry, is_writable=key == "writable"))
            ),
        )

    def create_own(self) -> None:
        """Create those of crow's own directories that are in trees where commands can write. Otherwise a command could
        create them first. Record that programs in these trees cannot be trusted.

        :raises OSError: the directories or the record cannot be written.
        """
        roots = self.writable_roots()
        self.options.programs.distrust(roots)
        for path in self.options.own:
            is_directory = not path.suffix  # in `own`, only files have a suffix
            if is_directory and is_inside_any(Path(os.path.realpath(path)), roots):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def home(self) -> Path | None:
        """The user's home directory with links resolved; None if there is none."""
        home = os.path.realpath(os.path.expanduser("~"))
        return Path(home) if os.path.isabs(home) and os.path.isdir(home) else None

    def _masked(self, home: Path | None) -> tuple[Path, ...]:
        """Return the directories that commands see as empty, apart from visible trees in them. Directories below a root
        of the workspace are left out, except those for temporary files."""
        temporary = {Path(os.path.realpath(path)) for path in _TEMPORARY}
        candidates = (*map(Path, _MASKED), *self.options.masked)
        places = [Path(os.path.realpath(path)) for path in candidates if os.path.isdir(path)]
        if home is not None and home not in _SYSTEM:
            places.append(home)
        kept = (
            place
            for place in places
            if place not in _SYSTEM
            and (place in temporary or not is_inside_any(place, self.roots) or place in self.roots)
        )
        return tuple(dict.fromkeys(kept))

    def _found_places(self, home: Path | None) -> _FoundPlaces:
        """Return the toolchains and secret places. The search is repeated only if something was created or removed in
        one of the searched folders."""
        folders = [Path("/etc"), *(() if home is None else (home, *(home / name for name in _FOLDERS)))]
        stamp = tuple(_modified_ns(folder) for folder in (*folders, *self.options.own))
        if not self._places or self._places[0].stamp != stamp:
            writable = self.writable_roots()
            found = [] if home is None else [*toolchains(home, self.env, writable)]
            found += own_programs(home, writable)
            self._places[:] = [_FoundPlaces(stamp=stamp, toolchains=tuple(found), hidden=tuple(self._hidden()))]
        return self._places[0]

    def _hidden(self) -> Iterator[Path]:
        """Yield the secret places of the user that exist and that the settings do not name, and crow's own files."""
        named = {*self._named(self.options.readable), *self._named(self.options.writable, is_writable=True)}
        for path in (Path(os.path.realpath(place)) for place in secret_places()):
            if path not in named and os.access(path, os.R_OK):
                yield path
        yield from (Path(os.path.realpath(path)) for path in self.options.own if os.path.exists(path))

    def _own_trees(self, writable: tuple[Path, ...]) -> tuple[Path, ...]:
        """Return crow's own trees in `writable`. They are searched only once, because they do not move while crow
        runs."""
        if writable not in self._fixed:
            self._fixed[writable] = own_trees(writable)
        return self._fixed[writable]

    def _readable(self, private: PrivateDirectories, *, has_network: bool) -> Iterator[Path]:
        """Yield what every command can read besides the system, toolchains and sockets."""
        yield from self._named(self.options.readable)
        if self.options.credentials:
            yield private.trust
        trees = (repository.tree for repository in self._outer_repositories())
        yield from (tree for tree in trees if not is_inside_any(tree, self.roots))
        if has_network:
            yield from existing([_RESOLVER])

    def _tool_places(self, private: PrivateDirectories, writable: tuple[Path, ...]) -> ToolPlaces:
        return ToolPlaces(env=self.env, home=self.home or Path(os.sep), caches=private.caches, writable=writable)

    def _named(self, entries: Iterable[str], *, is_writable: bool = False) -> Iterator[Path]:
        """Yield the paths of those entries of the settings that can be used, with links resolved."""
        for entry in entries:
            if not self._problem_of(entry, is_writable=is_writable):
                yield Path(os.path.realpath(os.path.expanduser(entry)))

    def _problem_of(self, entry: str, *, is_writable: bool) -> str:
        """Return why an entry of the settings cannot be used, or an empty string if it can."""
        path = os.path.expanduser(entry)
        if "\0" in entry or not os.path.isabs(path):
            return "is not an absolute path; expected a path such as ~/datasets"
        place = Path(os.path.realpath(path))
        if not os.path.exists(place):
            return "does not exist"
        if is_writable and place in _SYSTEM:
            return "is a directory of the system; expected a directory below it"
        if is_writable and any(Path(os.path.realpath(own)).is_relative_to(place) for own in self.options.own):
            return "contains crow's own files"
        return ""

    def _outer_repositories(self) -> tuple[OuterRepository, ...]:
        """Return the repositories around the roots that existed at the first call. Commands get no access to a
        repository that is created later, because its hooks would not be protected."""
        found = []
        for root in self.roots:
            repository = find_outer(root, self.roots, self._may_show)
            if repository is not None and repository == self._repositories.setdefault(root, repository):
                found.append(repository)
            else:
                self._repositories.setdefault(root, None)
        return tuple(dict.fromkeys(found))

    def _may_show(self, tree: Path) -> bool:
        """Return whether commands may see the whole of a tree. They may not see all of HOME, of a collection such as
        ~/.config, or of a directory of the system."""
        if tree in _SYSTEM or (self.home is not None and is_general(tree, self.home)):
            return False
        masked = (*map(Path, _MASKED), *self.options.masked)
        return not any(Path(os.path.realpath(path)).is_relative_to(tree) for path in masked)


def _mount_points() -> Iterator[str]:
    """Yield where file systems are mounted."""
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            yield os.fsdecode(_MOUNT_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), line.split(b" ")[4]))


def _is_foreign(root: Path) -> bool:
    """Return whether crow runs as root in a directory of another user. Confined commands cannot write there, because
    they have none of root's powers."""
    try:
        return os.geteuid() == 0 and root.stat().st_uid != 0
    except (OSError, AttributeError):
        return False


def _modified_ns(path: Path) -> int:
    """Return the time when something in a directory was last created or removed; 0 if the directory does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _outermost(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return those of the directories that are not inside another one."""
    return tuple(root for root in roots if not is_inside_any(root, set(roots) - {root}))


def _is_visible(path: Path, masked: tuple[str, ...], visible: tuple[str, ...]) -> bool:
    """Return whether a command would see the path: nothing masks it, or it is in a visible tree. `masked` and `visible`
    are the prefixes of the paths in such trees."""
    place = f"{path}{os.sep}"
    return place.startswith(visible) or not place.startswith(masked)


def _protected_parts(snapshot: Snapshot | None) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the protected paths that must be read-only, and the git directories that stay writable but must not be
    moved. There are at most `MAX_READ_ONLY` read-only paths. Paths in repositories come first.

    Links are left out, because nothing can be mounted on a link. `ProtectedFiles` puts links back.
    """
    states = {} if snapshot is None else snapshot.states
    repositories = {path for path, state in states.items() if state.is_repository and state.kind == "directory"}
    folders = set(repositories)
    for path in repositories:
        while (path := os.path.dirname(path)) in states:  # such as a repository's modules and worktrees
            folders.add(path)
    read_only = [
        path
        for path, state in states.items()
        if path not in folders and state.kind != "link" and not state.is_mutable and state.commands is None
    ]
    whole = set(read_only)
    tops = [Path(path) for path in read_only if os.path.dirname(path) not in whole]
    # a repository that was scanned as an ordinary folder, such as a root, is known only by its mutable parts
    repositories |= {os.path.dirname(path) for path, state in states.items() if state.is_mutable}
    tops.sort(key=lambda path: (not is_inside_any(path, map(Path, repositories)), len(path.parts)))
    return tuple(tops[:MAX_READ_ONLY]), tuple(map(Path, sorted(folders)))

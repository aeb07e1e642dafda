"""Decides what the commands of a workspace may see and change."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from crow.domain.protected_names import DEFAULT_NAMES, ProtectedNames
from crow.programs import SYSTEM_PROGRAMS, Programs, needed_trees, own_trees
from crow.tools.layers import Overlay
from crow.tools.network.credentials import NO_CREDENTIALS, Credentials
from crow.tools.network.registries import DEFAULT_REGISTRIES
from crow.tools.protection import secret_places
from crow.tools.sandbox import ConfinedAccess, Confinement
from crow.tools.sandbox.protected import Snapshot
from crow.tools.sandbox.sockets import listening_sockets

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

_TOOLCHAINS = (
    *(".cargo", ".rustup", ".pyenv", ".rbenv", ".nvm", ".asdf", ".volta", ".sdkman", ".bun", ".deno", ".ghcup"),
    *("go", ".jdks", ".m2/repository", ".m2/wrapper", ".nuget/packages", ".gradle/caches", ".gradle/wrapper"),
    *(".opam", ".julia", ".juliaup"),
    *(".local/bin", ".local/lib", ".local/go", ".nix-profile", ".nix-defexpr", ".npm-global", ".yarn", ".pnpm"),
    *(f".local/share/{name}" for name in ("uv", "pipx", "mise", "pnpm", "fnm", "rtx", "virtualenv", "virtualenvs")),
    *(".config/git", ".config/mise", ".config/go"),
    *(".cache/node/corepack", ".cache/pre-commit", ".cache/ms-playwright"),
)
"""Paths below HOME without which some programs cannot run. Commands can read these paths."""

_TOOL_VARIABLES = (
    *("CARGO_HOME", "RUSTUP_HOME", "PYENV_ROOT", "NVM_DIR", "VOLTA_HOME", "ASDF_DIR", "ASDF_DATA_DIR", "SDKMAN_DIR"),
    *("GOPATH", "GOROOT", "JAVA_HOME", "MISE_DATA_DIR", "PNPM_HOME", "BUN_INSTALL", "DENO_INSTALL", "VIRTUAL_ENV"),
    *("CONDA_PREFIX", "RBENV_ROOT", "COREPACK_HOME", "PRE_COMMIT_HOME", "PLAYWRIGHT_BROWSERS_PATH"),
)
"""Environment variables that may name another place for one of the directories in `_TOOLCHAINS`."""

_FOLDERS = (
    *(".local", ".local/share", ".config", ".config/git", ".cache", ".cache/node", ".cargo", ".gem", ".gradle", ".m2"),
    *(".claude", ".nuget"),
)
"""Folders below HOME that contain toolchains or secrets."""

_GENERAL = frozenset((".local", ".config", ".cache", "Desktop", "Documents", "Downloads", "Library", "snap"))
"""Directories in HOME that hold files of many programs, or the user's own files. No single program needs everything in
them."""

_PREFIX_PARTS = ("lib", "lib64", "libexec", "share", "versions", "conda-meta", "pyvenv.cfg", "jre")
"""A directory that contains `bin` counts as an installed program if it also contains at least one of these names."""

MAX_READ_ONLY = 32
"""At most this many paths are made read-only, because each of them delays a command by about 0.3 ms. Changes to further
protected paths are undone after the command."""

_CACHES = {
    "XDG_CACHE_HOME": ("xdg", ".cache"),
    "PIP_CACHE_DIR": ("pip", ".cache/pip"),
    "UV_CACHE_DIR": ("uv", ".cache/uv"),
    "npm_config_cache": ("npm", ".npm"),
    "YARN_CACHE_FOLDER": ("yarn", ".cache/yarn"),
    "BUN_INSTALL_CACHE_DIR": ("bun", ".bun/install/cache"),
    "DENO_DIR": ("deno", ".cache/deno"),
    "GOCACHE": ("go-build", ".cache/go-build"),
    "GOMODCACHE": ("go-mod", "go/pkg/mod"),
    "GRADLE_USER_HOME": ("gradle", ".gradle"),
    "CCACHE_DIR": ("ccache", ".cache/ccache"),
    "SCCACHE_DIR": ("sccache", ".cache/sccache"),
    "COMPOSER_CACHE_DIR": ("composer", ".cache/composer"),
    "CARGO_HOME": ("cargo", ".cargo"),
}
"""The keys are variables that say where a cache is. Each value has the cache's name in the commands' own directory, and
the cache's usual place below HOME."""

_GO_PROXY = f"https://{DEFAULT_REGISTRIES['go'][0]},direct"
"""What go uses if GOPROXY is not set."""

_WORKSPACE_CACHES = {"MYPY_CACHE_DIR": "mypy", "RUFF_CACHE_DIR": "ruff", "CARGO_TARGET_DIR": "cargo-target"}
"""The keys are variables that move a tool's files out of the workspace. The values are the names of the directories
that receive the files. Only commands that cannot write into the workspace at all get these variables."""

PYTEST_CACHE = "pytest"
"""The name of the directory for pytest's cache, which an option of pytest sets. The directory must exist before pytest
runs. Otherwise pytest would create it and change its mode, which not every sandbox allows."""

_KEPT_PLACES = {
    "COREPACK_HOME": ".cache/node/corepack",
    "PRE_COMMIT_HOME": ".cache/pre-commit",
    "PLAYWRIGHT_BROWSERS_PATH": ".cache/ms-playwright",
    "GRADLE_RO_DEP_CACHE": ".gradle/caches",
}
"""The keys are variables that say where programs or dependencies are installed. The values are the usual places of
these installations below HOME. Without these variables, tools would look below the new XDG_CACHE_HOME or
GRADLE_USER_HOME."""

REMOVED = (
    *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "GPG_AGENT_INFO", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR"),
    *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "SESSION_MANAGER", "TMUX", "VSCODE_IPC_HOOK_CLI"),
)
"""Variables that refer to the user's other programs, mostly to their sockets. Commands do not get these variables,
because confined commands cannot reach those programs."""


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


@dataclass(frozen=True, slots=True)
class _OuterRepository:
    """A repository around a root."""

    tree: Path
    """The worktree of the repository, which contains the root."""
    common: Path
    """The git directory of the repository, which is outside of all roots."""


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
    _repositories: dict[Path, _OuterRepository | None] = field(default_factory=dict, repr=False)
    """The repository around each root, as it was at the first call of `_outer_repositories`."""
    _fixed: dict[tuple[Path, ...], tuple[Path, ...]] = field(default_factory=dict, repr=False)
    """The results of `_own_trees`."""

    @property
    def home(self) -> Path | None:
        """The user's home directory with links resolved; None if there is none."""
        home = os.path.realpath(os.path.expanduser("~"))
        return Path(home) if os.path.isabs(home) and os.path.isdir(home) else None

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each directory that commands should be able to use, but cannot."""
        foreign = [root for root in self.roots if _is_foreign(root)]
        return (
            *(
                f"{root} belongs to another user, so confined commands cannot write there even as root"
                for root in foreign
            ),
            *self._problems_of_settings(),
        )

    def _problems_of_settings(self) -> Iterator[str]:
        """Return one sentence for each path in the settings that cannot be used."""
        return (
            f"sandbox.{key}: {entry} {problem}"
            for key, entries in (
                ("readable", self.options.readable),
                ("writable", self.options.writable),
                ("sockets", self.options.sockets),
            )
            for entry in entries
            if (problem := self._problem_of(entry, is_writable=key == "writable"))
        )

    def writable_roots(self) -> tuple[Path, ...]:
        """Return the directories that commands with the access `write` can change: the workspace, the writable
        directories of the settings, and the git directories of repositories around the workspace."""
        common = [repository.common for repository in self._outer_repositories()]
        return tuple(dict.fromkeys([*self.roots, *self._named(self.options.writable, is_writable=True), *common]))

    def layered_trees(self) -> tuple[Path, ...]:
        """Return the trees that a layer covers: what commands with the access `write` can change. It is empty if no
        layer can cover them, because a tree does not exist, or another file system is mounted in one."""
        roots = self.writable_roots()
        trees = tuple(root for root in roots if not is_inside_any(root, set(roots) - {root}))
        if any(_is_foreign(root) or not os.path.isdir(root) for root in trees):
            return ()
        return () if any(is_inside_any(Path(place).parent, trees) for place in _mount_points()) else trees

    def searched_trees(self) -> tuple[Path, ...]:
        """Return the user's trees that commands can see. They are searched for files that the deny rules hide."""
        named = [*self._named(self.options.readable), *self._named(self.options.writable, is_writable=True)]
        return (*self.roots, *(repository.tree for repository in self._outer_repositories()), *named)

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
        home, writable = self.home, self.writable_roots()
        masked = self._masked(home)
        found = self._found_places(home)
        sockets = tuple(dict.fromkeys(self._named(self.options.sockets)))
        # if the setting names a masked directory, it stays empty except for sockets that commands make there
        shown = [path for path in sockets if path not in masked]
        others = listening_sockets(shown) if sockets else ()
        hidden = tuple(dict.fromkeys([*found.hidden, *denied, *others]))
        fixed = self._own_trees(writable)
        readable = [path for path in found.toolchains if is_inside_any(path, masked)]
        readable += shown
        readable += self._named(self.options.readable)
        readable += [private.trust] if self.options.credentials else []
        trees = (repository.tree for repository in self._outer_repositories())
        readable += [tree for tree in trees if not is_inside_any(tree, self.roots)]
        has_network = access == "write" and self.options.network
        if has_network:
            readable += _existing([_RESOLVER])
        own_writable = [private.caches]
        read_only: Sequence[Path] = ()
        throwaway: tuple[Path, ...] = ()
        if overlays:
            throwaway = tuple(overlay.root for overlay in overlays)
        elif access == "write":
            read_only, folders = _protected_parts(snapshot)
            own_writable += [*writable, *folders, *folders_above((*read_only, *fixed, *folders, *hidden), writable)]
        else:
            throwaway = tuple(root for root in self.roots if not is_inside_any(root, set(self.roots) - {root}))
            readable += [path for path in writable if path not in self.roots]
        visible, hiding = _prefixes_of((*readable, *own_writable, *throwaway)), _prefixes_of(masked)
        return Confinement(
            access=access,
            masked=masked,
            readable=tuple(dict.fromkeys(readable)),
            writable=tuple(dict.fromkeys(own_writable)),
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

    def _own_trees(self, writable: tuple[Path, ...]) -> tuple[Path, ...]:
        """Return crow's own trees in `writable`. They are searched only once, because they do not move while crow
        runs."""
        if writable not in self._fixed:
            self._fixed[writable] = own_trees(writable)
        return self._fixed[writable]

    def environment(
        self, access: ConfinedAccess, private: PrivateDirectories, *, has_overlay: bool = False
    ) -> dict[str, str]:
        """Return additional variables for a confined command: private places for temporary files and caches.

        A cache that the command can write to anyway stays where it is. `has_overlay` means that a `read` command can
        write into the workspace, but everything that it writes there is discarded.
        """
        home = self.home or Path(os.sep)
        inside = _prefixes_of(self.writable_roots() if access == "write" else ())
        caches = f"{private.caches}{os.sep}"
        variables = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(private.temporary))
        has_network = access == "write" and self.options.network
        for name, (directory, place) in _CACHES.items():
            usual = self.env.get(name) or f"{home}{os.sep}{place}"
            if f"{usual}{os.sep}".startswith(inside) or (name == "CARGO_HOME" and not has_network):
                continue
            variables[name] = f"{caches}{directory}"
        if "GOMODCACHE" in variables:
            others = self.env.get("GOPROXY") or _GO_PROXY
            variables["GOPROXY"] = ",".join([self._go_downloads(), others if has_network else "off"])
        if self._outer_repositories():  # git must look outside of the workspace, which is a mount of its own
            variables["GIT_DISCOVERY_ACROSS_FILESYSTEM"] = "1"
        if access == "read" and not has_overlay:
            variables |= {name: str(private.caches / directory) for name, directory in _WORKSPACE_CACHES.items()}
            pytest = f"-o cache_dir={shlex.quote(str(private.caches / PYTEST_CACHE))}"
            variables["PYTEST_ADDOPTS"] = f"{self.env.get('PYTEST_ADDOPTS', '')} {pytest}".strip()
        for name, place in _KEPT_PLACES.items():
            if name not in self.env and os.path.isdir(found := f"{home}{os.sep}{place}"):
                variables[name] = found
        return variables

    def download_places(self, private: PrivateDirectories) -> dict[str, str]:
        """Return more variables for a confined command that can reach hosts: where go and cargo find and put what they
        download. A cargo home with downloads of the user stays where it is, read-only, so that builds find them."""
        home, writable = self.home or Path(os.sep), self.writable_roots()
        variables = {}
        if not is_inside_any(self._go_modules(), writable):
            variables["GOPROXY"] = f"{self._go_downloads()},{self.env.get('GOPROXY') or _GO_PROXY}"
        cargo = Path(self.env.get("CARGO_HOME") or home / _CACHES["CARGO_HOME"][1])
        if not is_inside_any(cargo, writable) and not (cargo / "registry").is_dir():
            variables["CARGO_HOME"] = str(private.caches / _CACHES["CARGO_HOME"][0])
        return variables

    def _go_modules(self) -> Path:
        """Return the directory in which go keeps the modules that it has downloaded."""
        usual = (self.home or Path(os.sep)) / _CACHES["GOMODCACHE"][1]
        named = Path(self.env.get("GOMODCACHE") or usual)
        return named if named.is_absolute() else usual  # go itself refuses a relative one

    def _go_downloads(self) -> str:
        """Return the URL under which go finds the modules in that directory."""
        return (self._go_modules() / "cache" / "download").as_uri()

    def _found_places(self, home: Path | None) -> _FoundPlaces:
        """Return the toolchains and secret places. The search is repeated only if something was created or removed in
        one of the searched folders."""
        folders = [Path("/etc"), *(() if home is None else (home, *(home / name for name in _FOLDERS)))]
        stamp = tuple(_modified_ns(folder) for folder in (*folders, *self.options.own))
        if not self._places or self._places[0].stamp != stamp:
            toolchains, hidden = (*self._toolchains(home), *self._needed(home)), tuple(self._hidden())
            self._places[:] = [_FoundPlaces(stamp=stamp, toolchains=toolchains, hidden=hidden)]
        return self._places[0]

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

    def _toolchains(self, home: Path | None) -> Iterator[Path]:
        """Yield where programs are installed below HOME and in the directories on PATH, and git's settings."""
        if home is None:
            return
        yield from _existing(home / name for name in _TOOLCHAINS)
        for directory in (home, home / ".config"):
            yield from (path for path in sorted(directory.glob(".gitconfig*")) if os.path.isfile(path))
        named = [self.env.get(name, "").split(os.pathsep) for name in _TOOL_VARIABLES]
        yield from self._program_places(chain(*named), home)
        for place in self._program_places(self.env.get("PATH", "").split(os.pathsep), home):
            yield _installed_tree(place, home)

    def _needed(self, home: Path | None) -> Iterator[Path]:
        """Return where crow and its Python are, because some tools are programs of crow that run confined."""
        own = self.writable_roots()
        for tree in needed_trees():
            if os.path.isdir(tree) and not is_inside_any(tree, own) and (home is None or not _is_general(tree, home)):
                yield tree

    def _program_places(self, paths: Iterable[str], home: Path) -> Iterator[Path]:
        """Yield those of the paths that are directories with nothing but programs, outside of the writable trees."""
        own = self.writable_roots()
        for place in filter(None, map(_with_real_parent, paths)):
            if os.path.isdir(place) and not _is_general(place, home) and not is_inside_any(place, own):
                yield place

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

    def _hidden(self) -> Iterator[Path]:
        """Yield the secret places of the user that exist and that the settings do not name, and crow's own files."""
        named = {*self._named(self.options.readable), *self._named(self.options.writable, is_writable=True)}
        for path in (Path(os.path.realpath(place)) for place in secret_places()):
            if path not in named and os.access(path, os.R_OK):
                yield path
        yield from (Path(os.path.realpath(path)) for path in self.options.own if os.path.exists(path))

    def _outer_repositories(self) -> tuple[_OuterRepository, ...]:
        """Return the repositories around the roots that existed at the first call. Commands get no access to a
        repository that is created later, because its hooks would not be protected."""
        found = []
        for root in self.roots:
            repository = self._find_repository(root)
            if repository is not None and repository == self._repositories.setdefault(root, repository):
                found.append(repository)
            else:
                self._repositories.setdefault(root, None)
        return tuple(dict.fromkeys(found))

    def _find_repository(self, root: Path) -> _OuterRepository | None:
        """Return the repository that git would use in this root. None if there is no such repository, if its git
        directory is inside a root, or if commands must not see its whole tree."""
        tree = next((folder for folder in (root, *root.parents) if os.path.lexists(f"{folder}/.git")), None)
        if tree is None or (tree != root and not self._may_show(tree, root)):
            return None
        common = tree / ".git" if _is_repository(tree / ".git") else linked_repository(tree)
        if common is None or is_inside_any(common, self.roots):
            return None
        return _OuterRepository(tree, common)

    def _may_show(self, tree: Path, root: Path) -> bool:
        """Return whether commands may see the whole of a tree that contains a root. They may not see all of HOME, of a
        collection such as ~/.config, or of a directory that belongs to the system or to several users."""
        if tree in _SYSTEM or (self.home is not None and _is_general(tree, self.home)):
            return False
        masked = (*map(Path, _MASKED), *self.options.masked)
        if any(Path(os.path.realpath(path)).is_relative_to(tree) for path in masked):
            return False
        try:
            owners = {os.geteuid(), 0, root.stat().st_uid}
            return {tree.stat().st_uid, (tree / ".git").lstat().st_uid} <= owners
        except OSError:
            return False


def _is_repository(path: Path) -> bool:
    """Return whether this is a repository's own directory, and not a link to one."""
    return not path.is_symlink() and os.path.isfile(path / "HEAD")


def linked_repository(tree: Path) -> Path | None:
    """Return the repository of a linked worktree, if the repository itself confirms that the worktree belongs to it.

    The `.git` file in the worktree alone proves nothing, because the workspace may be hostile.
    """
    try:
        own = _linked_path(tree / ".git", "gitdir: ")
        if own is None or _linked_path(own / "gitdir") != tree / ".git":
            return None
        common = _linked_path(own / "commondir")
    except (OSError, ValueError):
        return None
    if common is None or own.parent != common / "worktrees" or not os.path.isfile(common / "HEAD"):
        return None
    return common


def _linked_path(file: Path, prefix: str = "") -> Path | None:
    """Return the path in a file that git wrote; None if the file contains no path. Links are resolved, except for the
    last part of the path."""
    if os.path.islink(file) or not os.path.isfile(file):
        return None
    with file.open("rb") as opened:
        text = os.fsdecode(opened.read(16_384)).rstrip("\r\n")
    if not text.startswith(prefix) or len(text) == len(prefix) or "\0" in text:
        return None
    return _with_real_parent(os.path.join(os.path.dirname(file), text[len(prefix) :]))


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


def _with_real_parent(path: str) -> Path | None:
    """Return the path with links resolved, except for a link in its last part. Return None if `path` is not
    absolute."""
    if not os.path.isabs(path) or "\0" in path:
        return None
    path = os.path.normpath(path)
    return Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _existing(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Return those of the paths that exist. Links are resolved, except for a link in the last part of a path."""
    for path in paths:
        place = _with_real_parent(str(path))
        if place is not None and os.path.exists(place):
            yield place


def is_inside_any(path: Path, roots: Iterable[Path]) -> bool:
    """Return whether the path is one of the roots or below one. All are absolute."""
    # `is_relative_to` would take a third of the time in which a command is prepared
    return f"{path}{os.sep}".startswith(_prefixes_of(roots))


def _prefixes_of(roots: Iterable[Path]) -> tuple[str, ...]:
    """Return what all paths in these directories begin with, including the final separator."""
    return tuple([f"{str(root).rstrip(os.sep)}{os.sep}" for root in roots])


def _is_general(place: Path, home: Path) -> bool:
    """Return whether a directory holds more than programs. This is true for HOME, for directories above HOME, and for
    collections such as ~/.config."""
    return home.is_relative_to(place) or (place.parent == home and place.name in _GENERAL)


def _installed_tree(directory: Path, home: Path) -> Path:
    """Return the whole tree of the program to which a directory on PATH belongs. If there is no such tree, return the
    directory itself."""
    tree = directory.parent
    if directory.name not in ("bin", "shims", "sbin") or _is_general(tree, home) or os.path.islink(directory):
        return directory
    return tree if any(os.path.exists(tree / part) for part in _PREFIX_PARTS) else directory


def folders_above(paths: Iterable[Path], roots: Sequence[Path]) -> Iterator[Path]:
    """For each path inside a root, return the folders above the path, up to and including the root. A command must not
    rename these folders, because renaming one would move the path."""
    for path in paths:
        for root in roots:
            if path.is_relative_to(root):
                yield from (parent for parent in path.parents if parent.is_relative_to(root))


def _is_visible(path: Path, masked: tuple[str, ...], visible: tuple[str, ...]) -> bool:
    """Return whether a command would see the path: nothing masks it, or it is in a visible tree. `masked` and
    `visible` are what paths in such trees begin with."""
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

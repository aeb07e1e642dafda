"""Finds the programs that crow starts, and runs the commands that the user's settings name.

A confined command may write programs into the workspace, and PATH often names a directory there, such as `.venv/bin`.
So crow's own helpers are never looked up on PATH. They come from fixed directories that no confined command can change.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM_PLACES = (
    *("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin", "/opt/local/bin", "/opt/homebrew/bin"),
    *("/run/current-system/sw/bin", "/run/current-system/profile/bin", "/nix/var/nix/profiles/default/bin"),
)
"""Directories where the system installs programs. A program from here is used only if nobody but root can change or
replace it."""

_USER_PLACES = (
    ("/nix/var/nix/profiles/default/bin", ("/nix",)),
    ("~/.nix-profile/bin", ("~/.nix-profile", "~/.local/state/nix", "/nix")),
    ("/opt/homebrew/bin", ("/opt/homebrew",)),
    ("/usr/local/bin", ("/usr/local",)),
    ("/home/linuxbrew/.linuxbrew/bin", ("/home/linuxbrew/.linuxbrew",)),
    ("~/.linuxbrew/bin", ("~/.linuxbrew",)),
    ("~/.local/bin", ("~/.local",)),
    ("~/.cargo/bin", ("~/.cargo",)),
)
"""Directories where users install their own programs, each with the trees that the program's links and its target must
stay inside. A program from here is used only if no system directory has one of that name, and if crow never worked in
any of these trees."""

ROOT_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/nix")
"""The system's trees. If crow runs as root, commands may not change them unless the workspace is in one of them."""

_LOADER_PREFIXES = ("LD_", "DYLD_", "BASH_FUNC_")
_LOADER_VARIABLES = frozenset(("GCONV_PATH", "LOCPATH", "NLSPATH", "GLIBC_TUNABLES", "BASH_ENV", "ENV"))
"""Variables that make a program load code or data from other places. Crow's helpers do not get them, because they may
name a directory of the workspace."""

OVERFLOW_ID = Path("/proc/sys/kernel/overflowuid")
_MAX_LINKS = 40


@dataclass(frozen=True, slots=True)
class Programs:
    """Finds crow's own helpers, such as bubblewrap, git and ripgrep.

    Without a ledger, only the system's programs are used.
    """

    ledger: Path | None = None
    """A file that lists where commands may have planted programs: the trees of `_USER_PLACES` in which crow has worked,
    and as root also the workspaces in `ROOT_TREES`. No program there is used ever again."""

    def find(self, name: str) -> str | None:
        """Return the absolute path of a helper, or None if there is none that can be trusted. Links are not resolved,
        because some programs look at the name by which they are started. This call blocks."""
        candidates = (f"{place}/{name}" for place in (*SYSTEM_PLACES, *(place for place, _ in _USER_PLACES)))
        return next(filter(self.trusts, map(os.path.expanduser, candidates)), None)

    def trusts(self, path: str) -> bool:
        """Return whether crow may still start this program: it is in one of the fixed places, and neither a confined
        command nor another user can change which file the path names, or what is in the file."""
        if not hasattr(os, "geteuid"):
            return False
        place, system, user = os.path.dirname(path), system_owners(), os.geteuid()
        steps = tuple(steps_to(path))
        owners = {step.owner for step in steps}
        if not steps or not owners <= {*system, user}:
            return False
        if place in SYSTEM_PLACES and owners <= system:
            return user != 0 or not self._is_distrusted(steps)
        if self.ledger is None or self._is_distrusted(steps) or _has_other_names(path):
            return False
        others = [step.path for step in steps if step.owner not in system or user == 0]
        kept = (_resolved_places(trees) for named, trees in _USER_PLACES if os.path.expanduser(named) == place)
        return any(all(_is_in_or_above(other, trees) for other in others) for trees in kept)

    def distrust(self, roots: Iterable[str | Path]) -> None:
        """Record that commands may write in these directories. Call this before the first command may start, and before
        tools may write. This call blocks.

        :raises OSError: the ledger cannot be written.
        """
        if self.ledger is None:
            return
        places = [os.path.realpath(root) for root in roots]
        trees = (tree for _, named in _USER_PLACES for tree in _resolved_places(named))
        touched = {tree for tree in trees if any(_overlap(place, tree) for place in places)}
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            touched |= {place for place in places if any(map(Path(place).is_relative_to, ROOT_TREES))}
        if new := sorted(touched - self._distrusted()):
            self.ledger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(handle, "wb") as file:
                file.write(b"".join(os.fsencode(tree) + b"\0" for tree in new))
                file.flush()
                os.fsync(file.fileno())

    def _distrusted(self) -> frozenset[str]:
        """Return the paths in the ledger. :raises OSError: it cannot be read."""
        try:
            names = b"" if self.ledger is None else self.ledger.read_bytes()
        except FileNotFoundError:
            names = b""
        return frozenset(filter(None, os.fsdecode(names).split("\0")))

    def _is_distrusted(self, steps: Iterable[Step]) -> bool:
        try:
            distrusted = self._distrusted()
        except OSError:  # a ledger that cannot be read may name any path
            return True
        return any(Path(step.path).is_relative_to(tree) for tree in distrusted for step in steps)


SYSTEM_PROGRAMS = Programs()
"""Finds only the programs of the system."""


@dataclass(frozen=True, slots=True)
class Step:
    """A directory, link or file on the way to a program."""

    path: str
    owner: int | None
    """The user who can change it. None means that others can change it too."""


def steps_to(path: str) -> Iterator[Step]:
    """Follow an absolute path to an executable file, through all links. Yield nothing if there is no such file.

    The steps are checked in the order of the path, beginning with `/`. So if all steps belong to root, no other user
    can change the meaning of the path while it is followed, nor afterwards.
    """
    waiting, at, links = path.split(os.sep)[::-1], os.sep, 0
    steps = [_step_at(at, os.lstat(at))]
    try:
        while waiting:
            name = waiting.pop()
            if name in ("", "."):
                continue
            if name == "..":
                at = os.path.dirname(at)
                continue
            place = os.path.join(at, name)
            status = os.lstat(place)
            steps.append(_step_at(place, status))
            if not stat.S_ISLNK(status.st_mode):
                at = place
                continue
            target, links = os.readlink(place), links + 1
            if links > _MAX_LINKS:
                return
            at = os.sep if os.path.isabs(target) else at
            waiting += target.split(os.sep)[::-1]
    except OSError:
        return
    if stat.S_ISREG(os.lstat(at).st_mode) and os.access(at, os.X_OK):
        yield from steps


def _step_at(path: str, status: os.stat_result) -> Step:
    """Return who can change a directory, link or file. In a sticky directory, such as /nix/store, other users cannot
    replace files that they do not own."""
    mode, owner = status.st_mode, status.st_uid
    if stat.S_ISLNK(mode):
        return Step(path, owner)
    is_shared = bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and not is_private_group(status))
    if is_shared and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return Step(path, None)
    return Step(path, owner)


def is_private_group(status: os.stat_result) -> bool:
    """Return whether only the owner of a file is in its group, or the group is root's."""
    if status.st_gid == 0:
        return True
    import grp  # Windows has no such modules
    import pwd

    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return False
    return group.gr_name == owner and {*group.gr_mem} <= {owner}


def system_owners() -> frozenset[int]:
    """Return the users who own the system's files. If this user namespace does not contain root, root's files seem to
    belong to the overflow user."""
    try:
        overflow = int(OVERFLOW_ID.read_bytes())
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return frozenset({0})
    is_mapped = any(first <= overflow < first + length for first, _, length in ranges)
    return frozenset({0}) if is_mapped else frozenset({0, overflow})


def _resolved_places(places: Iterable[str]) -> list[str]:
    """Return each of these places twice: as it is named, and with its links resolved. Leave out duplicates."""
    named = [place for place in map(os.path.expanduser, places) if os.path.isabs(place)]
    return list(dict.fromkeys(path for place in named for path in (place, os.path.realpath(place))))


def _overlap(place: str, tree: str) -> bool:
    """Return whether one of two directories contains the other. A directory may be mounted in several places, so device
    and inode numbers are compared, too."""
    if _is_in_or_above(place, [tree]):
        return True
    inner = os.path.join(tree, "bin")
    above = {_id_of(folder) for folder in (inner, tree, *map(str, Path(tree).parents[:-1]))}
    around = {_id_of(folder) for folder in (place, *map(str, Path(place).parents[:-1]))}
    return bool({_id_of(place)} & (above - {None}) or {_id_of(inner), _id_of(tree)} & (around - {None}))


def _id_of(path: str) -> tuple[int, int] | None:
    """Return the device and inode number of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_other_names(path: str) -> bool:
    """Return whether a file has other hard links, for example one in a workspace. Some installers hard-link programs to
    files of their cache."""
    return os.stat(path).st_nlink != 1


def _is_in_or_above(path: str, trees: Sequence[str]) -> bool:
    """Return whether the path is in one of the trees, or one of the trees is in it."""
    return any(Path(path).is_relative_to(tree) or Path(tree).is_relative_to(path) for tree in trees)


def _python_trees() -> tuple[str, ...]:
    """Return the trees of the Python that runs crow and of its packages. Links are not resolved."""
    packages = (place for place in sys.path if os.path.basename(place) in ("site-packages", "dist-packages"))
    return (sys.prefix, sys.base_prefix, *packages)


def needed_trees() -> tuple[Path, ...]:
    """Return the trees that a Python program of crow needs, each with and without its links resolved."""
    names = [name for name in (*_python_trees(), os.path.dirname(os.path.abspath(__file__))) if os.path.isabs(name)]
    return tuple(dict.fromkeys(Path(place) for name in names for place in (name, os.path.realpath(name))))


def own_trees(roots: Iterable[Path]) -> tuple[Path, ...]:
    """Return the trees in these directories that no command may change: the Python that runs crow, its packages and, if
    crow runs as root, the system's programs. Links in `roots` must be resolved."""
    roots = tuple(roots)
    own = [Path(os.path.realpath(name)) for name in _python_trees()]
    found = [tree for tree in own if any(map(tree.is_relative_to, roots))]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        trees = (Path(os.path.realpath(name)) for name in ROOT_TREES if os.path.isdir(name))
        found += [tree for tree in trees if any(root != tree and tree.is_relative_to(root) for root in roots)]
    found = list(dict.fromkeys(found))
    return tuple(tree for tree in found if not any(tree != other and tree.is_relative_to(other) for other in found))


def helper_environment(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split an environment in two: the variables that a helper of crow gets, and those that could make the helper load
    code from the workspace."""
    kept = {name: value for name, value in env.items() if not _is_loader_variable(name)}
    return kept, {name: value for name, value in env.items() if name not in kept}


def _is_loader_variable(name: str) -> bool:
    return name in _LOADER_VARIABLES or name.startswith(_LOADER_PREFIXES)


def system_path() -> str:
    """Return a PATH with the system's own directories, for helpers that look up other programs."""
    return os.pathsep.join(place for place in (*SYSTEM_PLACES, "/snap/bin") if os.path.isdir(place))


def trusted_path(is_inside: Callable[[Path], bool]) -> str:
    """Return the user's PATH without relative directories and without directories of the workspace. A link into the
    workspace counts as a directory of the workspace. If the workspace is the whole file system, only the relative
    directories are left out."""
    is_everything = is_inside(Path(os.sep))
    directories = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    return os.pathsep.join(
        directory for directory in directories if is_everything or not is_inside(Path(os.path.realpath(directory)))
    )


def named_program(name: str, is_inside: Callable[[Path], bool] = lambda _path: False) -> str | None:
    """Return the absolute path of a program that the user named, such as a hook: the first one on PATH that is not in
    the workspace; None if there is none. See :func:`trusted_path`. A name that contains a slash is a path."""
    if os.path.dirname(name):
        return name if os.access(name, os.X_OK) and os.path.isfile(name) else None
    is_everything = is_inside(Path(os.sep))
    for directory in filter(None, trusted_path(is_inside).split(os.pathsep)):
        path = os.path.join(directory, name)
        is_program = os.access(path, os.X_OK) and os.path.isfile(path)
        if is_program and (is_everything or not is_inside(Path(os.path.realpath(path)))):
            return path
    return None


class CommandFailed(Exception):
    """A command of the user failed. The message is a clause, such as `did not end within 5 s`."""


def output_of(
    command: Sequence[str], *, timeout_s: float, data: bytes = b"", env: Mapping[str, str] | None = None
) -> str:
    """Run a command from the user's own file, with `data` as its input, and return its output. The first item of
    `command` must be the path of a program. This function blocks until the command ends. Without `env`, the command
    gets crow's whole environment.

    :raises CommandFailed: the command cannot be started, takes too long, or ends with an exit code other than 0. In the
        last case, the message ends with the last line of the command's stderr.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the command comes from the user's own file
            command,
            input=data,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            # the default is the initial environment, in which crow has overwritten secrets
            env=os.environ if env is None else env,
        )
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise CommandFailed(f"cannot be started: {error.strerror or error}") from error
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it printed no reason"]
        raise CommandFailed(f"ended with code {done.returncode}: {last[0]}")
    return done.stdout.decode("utf-8", "replace")

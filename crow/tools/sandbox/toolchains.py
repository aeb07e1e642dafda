"""Finds the directories outside of the system's where programs that commands need are installed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from crow.programs import needed_trees
from crow.tools.sandbox.paths import existing, is_inside_any, with_real_parent

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

_GENERAL = frozenset((".local", ".config", ".cache", "Desktop", "Documents", "Downloads", "Library", "snap"))
"""Directories in HOME that hold files of many programs, or the user's own files. No single program needs everything in
them."""

_PREFIX_PARTS = ("lib", "lib64", "libexec", "share", "versions", "conda-meta", "pyvenv.cfg", "jre")
"""A directory that contains `bin` counts as an installed program if it also contains at least one of these names."""


def toolchains(home: Path, env: Mapping[str, str], writable: Sequence[Path]) -> Iterator[Path]:
    """Yield where programs are installed below HOME and in the directories on PATH, and git's settings. A directory
    that the environment names is left out if it is in one of the `writable` directories of commands."""
    yield from existing(home / name for name in _TOOLCHAINS)
    for directory in (home, home / ".config"):
        yield from (path for path in sorted(directory.glob(".gitconfig*")) if os.path.isfile(path))
    named = [env.get(name, "").split(os.pathsep) for name in _TOOL_VARIABLES]
    yield from _program_places(chain(*named), home, writable)
    for place in _program_places(env.get("PATH", "").split(os.pathsep), home, writable):
        yield _installed_tree(place, home)


def own_programs(home: Path | None, writable: Sequence[Path]) -> Iterator[Path]:
    """Yield where crow and its Python are, because some tools are programs of crow that run confined."""
    for tree in needed_trees():
        if os.path.isdir(tree) and not is_inside_any(tree, writable) and (home is None or not is_general(tree, home)):
            yield tree


def is_general(place: Path, home: Path) -> bool:
    """Return whether a directory holds more than programs. This is true for HOME, for directories above HOME, and for
    collections such as ~/.config."""
    return home.is_relative_to(place) or (place.parent == home and place.name in _GENERAL)


def _program_places(paths: Iterable[str], home: Path, writable: Sequence[Path]) -> Iterator[Path]:
    """Yield those of the paths that are directories with nothing but programs, outside of the writable trees."""
    for place in filter(None, map(with_real_parent, paths)):
        if os.path.isdir(place) and not is_general(place, home) and not is_inside_any(place, writable):
            yield place


def _installed_tree(directory: Path, home: Path) -> Path:
    """Return the whole tree of the program to which a directory on PATH belongs. If there is no such tree, return the
    directory itself."""
    tree = directory.parent
    if directory.name not in ("bin", "shims", "sbin") or is_general(tree, home) or os.path.islink(directory):
        return directory
    return tree if any(os.path.exists(tree / part) for part in _PREFIX_PARTS) else directory

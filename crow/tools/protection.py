"""Says which paths of this machine are protected from tools and commands, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from crow.domain.protected_names import DEFAULT_NAMES, REPOSITORY_PARTS, ProtectedNames, fold_name
from crow.tools.git import GitFiles, contains_any

SECRET_PLACES = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".my.cnf"),
    *(".pypirc", ".vault-token", ".password-store", ".authinfo", ".authinfo.gpg", ".docker/config.json"),
    *(".config/gh", ".config/hub", ".config/glab-cli", ".config/gcloud", ".config/git/credentials", ".config/op"),
    *(".config/rclone", ".config/sops", ".config/age", ".config/containers/auth.json", ".config/github-copilot"),
    *(".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".terraform.d/credentials.tfrc.json"),
    *(".codex/auth.json", ".claude/.credentials.json", ".local/share/keyrings", "Library/Keychains"),
    *(".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium"),
    *("etc/shadow", "etc/shadow-", "etc/gshadow", "etc/gshadow-", "etc/sudoers", "etc/sudoers.d", "etc/ssl/private"),
    *("etc/NetworkManager/system-connections", "etc/krb5.keytab"),
    *(f"etc/ssh/ssh_host_{kind}_key" for kind in ("rsa", "dsa", "ecdsa", "ed25519")),
)
"""Files and folders with keys and passwords, wherever they are found. Most are in a home directory."""

_HOME_SECRET_PLACES = (
    *(".docker", ".terraform.d", ".npmrc", ".yarnrc", ".yarnrc.yml", ".config/doctl", ".m2/settings.xml"),
    *(".m2/settings-security.xml", ".gradle/gradle.properties", ".nuget/NuGet", ".config/NuGet", ".s3cfg", ".boto"),
    *(".local/share/kwalletd", ".claude.json", ".codex", ".gemini"),
    *(".bash_history", ".zsh_history", ".python_history"),
)
"""More files and folders with secrets, but only in the user's own home directory. In projects, files with some of these
names are harmless."""

FOLDED_SECRET_PLACES = tuple(place.casefold() for place in SECRET_PLACES)
_PROC_SECRETS = frozenset({"environ", "mem", "auxv"})


@dataclass(frozen=True, eq=False, kw_only=True)
class ProtectedPaths:
    """Tells which paths tools may change only if the user allows each change."""

    roots: tuple[str, ...] = ()
    """The folders of the workspace, with links resolved."""

    names: ProtectedNames = DEFAULT_NAMES
    """The names that are protected in any folder."""

    git: GitFiles = field(default_factory=GitFiles)
    """Finds the files that git would run or read as settings."""

    def covers(self, path: Path) -> bool:
        """Return whether a resolved path is protected. This reads git's settings in the repositories around it, and
        blocks."""
        if is_protected(path, self.names):
            return True
        place = f"{path}/".casefold()
        others = (*self.git.named_around(str(path), self.roots), *self._linked())
        return any(
            place.startswith(f"{other.rstrip(os.sep)}/".casefold())
            for other in others
            if not contains_any(other, self.roots)
        )

    def _linked(self) -> Iterator[str]:
        """Return the targets of those links in the roots and in the home directory that have protected names."""
        for folder in dict.fromkeys((*self.roots, os.path.expanduser("~"))):
            yield from _linked_from(folder, self.names)


def _linked_from(folder: str, names: ProtectedNames) -> Iterator[str]:
    """Return the targets of those links in a folder that have protected names."""
    try:
        with os.scandir(folder) as entries:
            links = [entry for entry in entries if entry.is_symlink()]
    except OSError:
        return
    parts = [fold_name(part) for part in Path(folder).parts]
    for link in links:
        if names.names([*parts, fold_name(link.name)]):
            yield os.path.realpath(link.path)


def is_protected(path: Path, names: ProtectedNames = DEFAULT_NAMES) -> bool:
    """Return whether the file at a resolved path may hold secrets, instruct agents, or make programs run commands,
    judged by its name and the folders above it.

    Names that some file system treats as the same, such as names that differ only in case, are the same here.
    """
    parts = [fold_name(part) for part in path.parts]
    if names.covers(parts) or is_secret(path):
        return True
    folders = [*reversed(path.parents)]
    return any(
        name in REPOSITORY_PARTS and os.path.lexists(folder / "HEAD")
        for folder, name in zip(folders, parts[1:], strict=True)
    )


def is_secret(path: Path) -> bool:
    """Return whether a resolved path is a place for keys or passwords, or is inside such a place. Some files of
    processes in /proc count as such places."""
    names = [fold_name(part) for part in path.parts]
    place = f"/{'/'.join(names[1:])}/"
    if any(f"/{secret}/" in place for secret in FOLDED_SECRET_PLACES):
        return True
    if f"{str(path).casefold()}/".startswith(folded_home_secrets(os.path.expanduser("~"))):
        return True
    return names[1:2] == ["proc"] and names[-1] in _PROC_SECRETS


def secret_places() -> list[str]:
    """Return the secret places of this machine and of its user. Not all of these places exist."""
    home = os.path.expanduser("~")
    tops = [os.sep, home] if os.path.isabs(home) else [os.sep]
    more = [os.path.join(home, place) for place in _HOME_SECRET_PLACES] if os.path.isabs(home) else []
    return [*(os.path.join(top, place) for top in tops for place in SECRET_PLACES), *more]


@lru_cache(maxsize=4)
def folded_home_secrets(home: str) -> tuple[str, ...]:
    """Return the places in `_HOME_SECRET_PLACES` as path prefixes, case-folded for comparison."""
    places = (os.path.join(os.path.realpath(home), place) for place in _HOME_SECRET_PLACES)
    return tuple(f"{place.casefold()}/" for place in places) if os.path.isabs(home) else ()

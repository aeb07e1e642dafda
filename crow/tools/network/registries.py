"""The package registries that a project's tools use: the usual ones, and those that its files name.

A workspace is untrusted. The hosts that its files name are shown to the user, and used only if the user allows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

DEFAULT_REGISTRIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pip": ("pypi.org", "files.pythonhosted.org"),
        "npm": ("registry.npmjs.org",),
        "yarn": ("registry.yarnpkg.com", "registry.npmjs.org"),
        "cargo": ("index.crates.io", "static.crates.io", "crates.io"),
        "go": ("proxy.golang.org", "sum.golang.org"),
        "maven": ("repo.maven.apache.org", "repo1.maven.org"),
        "gradle": ("repo.maven.apache.org", "repo1.maven.org", "plugins.gradle.org", "services.gradle.org"),
        "gem": ("rubygems.org", "index.rubygems.org"),
    }
)
"""For each tool, the hosts that it uses unless it is configured otherwise."""


def siblings_of(host: str) -> tuple[str, ...]:
    """Return the other usual hosts of the registries to which a host belongs. The index of a registry and its files are
    often on different hosts."""
    groups = [hosts for hosts in DEFAULT_REGISTRIES.values() if host in hosts]
    return tuple(dict.fromkeys(other for hosts in groups for other in hosts if other != host))


_FILES: Mapping[str, str] = MappingProxyType(
    {
        "pyproject.toml": "pip",
        "requirements.txt": "pip",
        "setup.py": "pip",
        "setup.cfg": "pip",
        "uv.lock": "pip",
        "Pipfile": "pip",
        "package.json": "npm",
        "yarn.lock": "yarn",
        "Cargo.toml": "cargo",
        "go.mod": "go",
        "pom.xml": "maven",
        "build.gradle": "gradle",
        "build.gradle.kts": "gradle",
        "Gemfile": "gem",
    }
)
"""The files by which crow recognises that a project uses a tool."""

_URL = r"https?://(?:[^\s/@\"']*@)?([A-Za-z0-9_.:-]+)"
_SETTINGS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        ".npmrc": re.compile(rf"^\s*(?:@[\w.-]+:)?registry\s*=\s*[\"']?{_URL}", re.MULTILINE),
        ".yarnrc.yml": re.compile(rf"^\s*npmRegistryServer:\s*[\"']?{_URL}", re.MULTILINE),
        "requirements.txt": re.compile(rf"^\s*(?:-i|--index-url|--extra-index-url)[\s=]+{_URL}", re.MULTILINE),
        "pip.conf": re.compile(rf"^\s*(?:extra-)?index-url\s*=\s*{_URL}", re.MULTILINE),
        "pyproject.toml": re.compile(rf"^\s*(?:url|index-url|extra-index-url)\s*=\s*\[?\s*\"{_URL}", re.MULTILINE),
        "uv.toml": re.compile(rf"^\s*(?:url|index-url|extra-index-url)\s*=\s*\[?\s*\"{_URL}", re.MULTILINE),
        "Pipfile": re.compile(rf"^\s*url\s*=\s*\"{_URL}", re.MULTILINE),
        ".cargo/config.toml": re.compile(rf"^\s*(?:index|registry)\s*=\s*\"(?:sparse\+)?{_URL}", re.MULTILINE),
        "Gemfile": re.compile(rf"^\s*source\s*\(?[\"']{_URL}", re.MULTILINE),
        "pom.xml": re.compile(rf"<repository>.{{0,400}}?<url>\s*{_URL}", re.DOTALL),
    }
)
"""The files of a project that can name a registry, each with the pattern that finds the registry's host."""

_MAX_BYTES = 200_000
_MAX_NAMED = 4
"""At most this many of the hosts that a project's files name are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registries:
    """The registries of one project."""

    tools: tuple[str, ...] = ()
    """The tools that the project uses."""
    usual: tuple[str, ...] = ()
    """The hosts that these tools use by default."""
    named: tuple[str, ...] = ()
    """Other hosts that the project's files name, such as `npm.corp.example:8443`. These files are untrusted."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts."""
        return (*self.usual, *self.named)

    def words(self) -> str:
        """Return a text that names all hosts, for the question whether the command may reach them."""
        named = f", and {', '.join(self.named)}, which files of this project name" if self.named else ""
        return f"the registries of {', '.join(self.tools)}: {', '.join(self.usual)}{named}"


def find_registries(roots: Sequence[Path]) -> Registries:
    """Return the registries of the projects in these directories. This call blocks."""
    present = [(root, name) for root in roots for name in {**_FILES, **_SETTINGS} if (root / name).is_file()]
    tools = tuple(dict.fromkeys(_FILES[name] for _, name in present if name in _FILES))
    usual = tuple(dict.fromkeys(host for tool in tools for host in DEFAULT_REGISTRIES[tool]))
    found = (host for root, name in present for host in _named_in(root / name, name))
    named = tuple(host for host in dict.fromkeys(found) if host not in usual)
    return Registries(tools=tools, usual=usual, named=named[:_MAX_NAMED])


def _named_in(path: Path, name: str) -> Iterator[str]:
    """Yield the hosts of registries that a file names; none if it cannot be read. `name` is its key in `_SETTINGS`."""
    pattern = _SETTINGS.get(name)
    if pattern is None:
        return
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        for place in pattern.findall(text):
            host = place.lower().rstrip(".")
            yield host.removesuffix(":443").removesuffix(":80")

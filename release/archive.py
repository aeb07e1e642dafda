"""The platforms of the archives, and archives that have the same bytes whenever and wherever they are made."""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crow.version import __version__

FOLDER = "crow-acp"
"""The folder in each archive."""

MAX_BYTES = 45_000_000
MODIFIED_S = 1_577_836_800
"""The time of every file in an archive: 1 January 2020, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A platform that gets an archive."""

    name: str
    """The registry's name of the platform, such as `linux-x86_64`."""
    python: str
    """How uv calls the Python of this platform."""
    wheels: str
    """How uv calls the platform when it chooses wheels."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Versions that differ from constraints.txt, or that only this platform needs."""

    @property
    def is_windows(self) -> bool:
        """Whether the archive has Windows' layout."""
        return self.name.startswith("windows-")

    @property
    def archive(self) -> str:
        """The name of the archive's file."""
        return f"crow-acp-{__version__}-{self.name}{'.zip' if self.is_windows else '.tar.gz'}"

    @property
    def library(self) -> str:
        """Where the standard library is, from the archive's folder."""
        return "Lib" if self.is_windows else "lib/python3.13"

    @property
    def packages(self) -> str:
        """Where the packages are."""
        return f"{self.library}/site-packages"

    @property
    def interpreter(self) -> str:
        """Where the interpreter is."""
        return "python.exe" if self.is_windows else "bin/python3.13"


PLATFORMS = {
    each.name: each
    for each in (
        Platform(name="linux-x86_64", python="linux-x86_64-gnu", wheels="x86_64-manylinux_2_17"),
        Platform(name="linux-aarch64", python="linux-aarch64-gnu", wheels="aarch64-manylinux_2_17"),
        Platform(name="darwin-aarch64", python="macos-aarch64-none", wheels="aarch64-apple-darwin"),
        Platform(
            name="darwin-x86_64",
            python="macos-x86_64-none",
            wheels="x86_64-apple-darwin",
            pins={"cryptography": "48.0.0"},  # later versions have no wheels for Intel Macs
        ),
        Platform(
            name="windows-x86_64",
            python="windows-x86_64-none",
            wheels="x86_64-pc-windows-msvc",
            pins={"pywin32": "312"},  # mcp needs it there
        ),
    )
}


def constraints_for(target: Platform, constraints: str) -> str:
    """Return the lines of constraints.txt, with the pins of a platform in place of others."""
    lines = [line for line in constraints.splitlines() if line.partition("==")[0].lower() not in target.pins]
    return "\n".join([*lines, *(f"{name}=={version}" for name, version in target.pins.items())]) + "\n"


def pack(stage: Path, archive: Path) -> tuple[str, int]:
    """Write a folder into an archive, by the name a zip or a compressed tar. Return its SHA-256 and its size in bytes.

    The same files give the same bytes: names are sorted, and times, owners and permissions are always the same.
    """
    data = _zip(stage) if archive.suffix == ".zip" else _tar(stage)
    archive.write_bytes(data)
    return hashlib.sha256(data).hexdigest(), len(data)


def _tar(stage: Path) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path, name in _files(stage):
            member = tarfile.TarInfo(name)
            member.mtime, member.mode = MODIFIED_S, _mode(path)
            if path.is_symlink():
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                tar.addfile(member)
            else:
                member.size = path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(member, file)
    return buffer.getvalue()


def _zip(stage: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, name in _files(stage):
            member = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            member.create_system, member.compress_type = 3, zipfile.ZIP_DEFLATED
            member.external_attr = (stat.S_IFREG | _mode(path)) << 16
            archive.writestr(member, path.read_bytes())
    return buffer.getvalue()


def _files(stage: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files and links of a folder with their names in the archive, sorted by name."""
    found = (path for path in stage.rglob("*") if path.is_symlink() or path.is_file())
    yield from sorted(((path, f"{FOLDER}/{path.relative_to(stage).as_posix()}") for path in found), key=lambda x: x[1])


def _mode(path: Path) -> int:
    return 0o755 if path.stat(follow_symlinks=False).st_mode & 0o100 else 0o644

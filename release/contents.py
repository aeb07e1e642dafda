"""What is in an archive: what is left out, how it starts, whose it is, and whether it fits its platform."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from email.parser import Parser
from email.policy import default
from pathlib import Path

from release.archive import Platform

_NO_MODULES = (
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo", "turtle.py", "venv"),
    *("config-*", "__phello__", "site-packages/*", "lib-dynload/_test*", "lib-dynload/_tkinter*", "lib-dynload/xx*"),
    *("lib-dynload/_ctypes_test*", "EXTERNALLY-MANAGED"),
)
"""Parts of the standard library that crow and its packages do not import."""

_NO_PARTS = (
    *("include", "libs", "share", "tcl", "Scripts", "lib/pkgconfig", "lib/itcl*", "lib/tcl*", "lib/tk*", "lib/thread*"),
    *("lib/libtcl*", "lib/libtk*", "lib/*.a", "DLLs/_test*", "DLLs/_tkinter*", "DLLs/_ctypes_test*", "DLLs/tcl*"),
    *("DLLs/tk*", "DLLs/zlib1.dll", "bin/idle*", "bin/pip*", "bin/pydoc*", "bin/*-config", "bin/2to3*", "pythonw.exe"),
)
"""Parts of a Python that only developers use."""

_NO_FILES = (
    "*.pyi",
    "*.pyx",
    "*.pxd",
    "*.c",
    "*.h",
    "*.pdb",
    "*.lib",
    "direct_url.json",
    "uv_cache.json",
    "INSTALLER",
    "RECORD",
    "REQUESTED",
)
"""Files of packages that are not needed when they run. RECORD would name the files that are left out."""

_NO_PACKAGES = (
    "bin",
    "share",
    "Scripts",
    "pywin32_postinstall*",
    "PyWin32.chm",
    "pythonwin",
    "win32/Demos",
    "win32/test",
)
"""What wheels install beside the packages, and the parts of pywin32 that are programs of their own."""

_LAUNCHER = """#!/bin/sh
# Starts crow with the Python of this folder, from wherever a link leads here.
it=$0
while [ -h "$it" ]; do
  to=$(readlink "$it")
  case $to in
    /*) it=$to ;;
    *) it=${it%/*}/$to ;;
  esac
done
case $it in
  */*) here=${it%/*} ;;
  *) here=. ;;
esac
[ -x "$here/python3.13" ] || here=$here/bin
exec "$here/python3.13" -I -m crow "$@"
"""
"""The same text is `crow` and `bin/crow`. Only a link takes another program, `readlink`."""

_WINDOWS_LAUNCHER = '@"%~dp0python.exe" -I -m crow %*\r\n'

_ELF = {0x3E: "x86_64", 0xB7: "aarch64"}
_MACH_O = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_PE = {0x8664: "x86_64", 0xAA64: "aarch64"}
_TAGS = {"linux": r"manylinux.*_{}|linux_{}", "darwin": r"macosx_.*_({}|universal2)", "windows": r"win_(amd64)"}
_MACHINES = {("darwin", "aarch64"): "arm64"}
_LICENCE_FILES = re.compile(r"(?i)(licen[cs]e|copying|notice|authors)[^/]*$")


def prune_python(stage: Path) -> None:
    """Remove from a Python what crow does not need. The shared library stays if the interpreter is linked with it."""
    for library in (*stage.glob("lib/python3.*"), *stage.glob("Lib")):
        _remove(library, _NO_MODULES)
    _remove(stage, _NO_PARTS)
    for link in [path for path in stage.glob("bin/*") if path.is_symlink()]:
        link.unlink()
    interpreter = next(stage.glob("bin/python3.*"), None)
    program = b"" if interpreter is None else interpreter.read_bytes()
    for shared in stage.glob("lib/libpython3*"):
        if shared.is_symlink() or (interpreter is not None and shared.name.encode() not in program):
            shared.unlink()
    _remove(stage, ("**/__pycache__",))


def prune_packages(packages: Path) -> None:
    """Remove what wheels bring beside their modules: sources of extensions, stubs, scripts, lists of files."""
    _remove(packages, _NO_PACKAGES)
    _remove(packages, tuple(f"**/{pattern}" for pattern in (*_NO_FILES, "__pycache__")))


def _remove(folder: Path, patterns: tuple[str, ...]) -> None:
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def add_launchers(stage: Path, target: Platform) -> None:
    """Write the programs that start crow. They are in the folder of Python, which no command of crow may change."""
    if target.is_windows:
        (stage / "crow.cmd").write_bytes(_WINDOWS_LAUNCHER.encode())
        return
    for name in ("crow", "bin/crow", "bin/crow-acp"):
        (stage / name).write_text(_LAUNCHER, "utf-8")
        (stage / name).chmod(0o755)


def third_party(stage: Path, target: Platform) -> str:
    """Return the notice about the software of others in an archive: names, versions, licences and their texts."""
    python = stage / target.library / "LICENSE.txt"
    python = python if python.exists() else stage / "LICENSE.txt"
    texts = [_notice("Python", "Python-2.0", [python] if python.exists() else [])]
    for folder in sorted((stage / target.packages).glob("*.dist-info"), key=lambda each: each.name.lower()):
        about = Parser(policy=default).parsestr((folder / "METADATA").read_text("utf-8"), headersonly=True)
        if about["Name"] == "crow-acp":
            continue
        files = [path for path in folder.rglob("*") if path.is_file() and _LICENCE_FILES.search(path.name)]
        texts.append(_notice(f"{about['Name']} {about['Version']}", _licence(about.items()), sorted(files)))
    return "This folder contains Crow (see LICENSE) and software of others:\n\n" + "\n".join(texts)


def _licence(headers: list[tuple[str, str]]) -> str:
    """Return the licence that a package's metadata name."""
    named = {name: value.strip() for name, value in reversed(headers) if name in ("License", "License-Expression")}
    classified = [value.split(" :: ")[-1] for name, value in headers if value.startswith("License :: OSI Approved")]
    first = (named.get("License") or "").splitlines()
    return named.get("License-Expression") or ", ".join(classified) or (first[0] if first else "see its licence below")


def _notice(name: str, licence: str, files: list[Path]) -> str:
    line = "=" * 100
    texts = [path.read_text("utf-8", "replace").strip() for path in files]
    return "\n".join([line, f"{name}: {licence}", line, *(f"\n{text}\n" for text in texts)])


def problems(stage: Path, target: Platform, version: str) -> list[str]:
    """Return what is wrong with the content of an archive, in words."""
    found = [f"{name} is missing" for name in _needed(target) if not (stage / name).exists()]
    crow = f"{target.packages}/crow_acp-{version}.dist-info"
    found += [] if (stage / crow).exists() else [f"crow {version} is not installed"]
    system, _, machine = target.name.partition("-")
    wheel = re.compile(_TAGS[system].replace("{}", _MACHINES.get((system, machine), machine)))
    for path in sorted(stage.rglob("*")):
        name = path.relative_to(stage).as_posix()
        if path.is_symlink():
            found += [] if path.resolve().is_relative_to(stage.resolve()) else [f"{name} is a link out of the archive"]
        elif path.is_file() and (kind := binary_kind(path)) and (system, machine) not in kind:
            found.append(f"{name} is for {' and '.join('-'.join(each) for each in kind)}")
        elif path.name == "WHEEL":
            tags = re.findall(r"(?m)^Tag: \S+-(\S+)$", path.read_text("utf-8"))
            found += (
                [] if all(tag == "any" or wheel.fullmatch(tag) for tag in tags) else [f"{name} has the tags {tags}"]
            )
    return found


def _needed(target: Platform) -> tuple[str, ...]:
    launchers = ("crow.cmd",) if target.is_windows else ("crow", "bin/crow", "bin/crow-acp")
    return (target.interpreter, f"{target.packages}/crow/__main__.py", "LICENSE", "THIRD_PARTY.txt", *launchers)


def binary_kind(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the systems and machines for which a program or library is made; () for any other file."""
    with path.open("rb") as file:
        head = file.read(4096)
    return tuple(_kinds(head))


def _kinds(head: bytes) -> Iterator[tuple[str, str]]:
    if head[:4] == b"\x7fELF":
        yield "linux", _ELF.get(int.from_bytes(head[18:20], "little"), "another machine")
    elif head[:4] == b"\xcf\xfa\xed\xfe":
        yield "darwin", _MACH_O.get(int.from_bytes(head[4:8], "little"), "another machine")
    elif head[:4] == b"\xca\xfe\xba\xbe" and int.from_bytes(head[4:8], "big") < 10:
        for number in range(int.from_bytes(head[4:8], "big")):
            at = 8 + 20 * number
            yield "darwin", _MACH_O.get(int.from_bytes(head[at : at + 4], "big"), "another machine")
    elif head[:2] == b"MZ":
        at = int.from_bytes(head[60:64], "little")
        if head[at : at + 4] == b"PE\0\0":
            yield "windows", _PE.get(int.from_bytes(head[at + 4 : at + 6], "little"), "another machine")

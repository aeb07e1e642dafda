"""The archives of a release: what is in them, how they start, and that the same files give the same bytes."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from release.__main__ import main
from release.archive import FOLDER, PLATFORMS, Platform, constraints_for, pack
from release.contents import add_launchers, binary_kind, problems, prune_packages, prune_python, third_party

LINUX, MAC, WINDOWS = PLATFORMS["linux-x86_64"], PLATFORMS["darwin-aarch64"], PLATFORMS["windows-x86_64"]
ELF = b"\x7fELF\x02\x01\x01" + bytes(11)
HEADS = {
    "linux-x86_64": ELF + struct.pack("<H", 0x3E),
    "linux-aarch64": ELF + struct.pack("<H", 0xB7),
    "darwin-x86_64": b"\xcf\xfa\xed\xfe" + struct.pack("<I", 0x01000007),
    "darwin-aarch64": b"\xcf\xfa\xed\xfe" + struct.pack("<I", 0x0100000C),
    "windows-x86_64": b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0" + struct.pack("<H", 0x8664),
}
"""How programs of each platform begin."""
BOTH_MACS = (
    b"\xca\xfe\xba\xbe"
    + struct.pack(">I", 2)
    + b"".join(struct.pack(">I", cpu) + bytes(16) for cpu in (0x01000007, 0x0100000C))
)


def write(path: Path, data: bytes | str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def staged(place: Path, target: Platform) -> Path:
    """A folder with all that an archive needs, and one package of somebody else."""
    stage = place / FOLDER
    write(stage / target.interpreter, HEADS[target.name]).chmod(0o755)
    write(stage / target.library / "LICENSE.txt", "The licence of Python.\n")
    packages = stage / target.packages
    write(packages / "crow" / "__main__.py")
    write(packages / "crow_acp-1.2.3.dist-info" / "METADATA", "Name: crow-acp\nVersion: 1.2.3\n")
    about = packages / "Other-2.0.dist-info"
    write(about / "METADATA", "Name: Other\nVersion: 2.0\nLicense-Expression: MIT\n\nLicense: wrong\n")
    write(about / "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    write(about / "licenses" / "LICENSE.md", "You may use Other.\n")
    add_launchers(stage, target)
    write(stage / "THIRD_PARTY.txt", third_party(stage, target))
    write(stage / "LICENSE")
    return stage


@pytest.mark.parametrize("name", PLATFORMS)
def test_an_archive_with_only_its_own_platform_has_no_problem(tmp_path: Path, name: str) -> None:
    target = PLATFORMS[name]
    stage = staged(tmp_path, target)
    write(stage / target.packages / "native.so", HEADS[name])
    assert problems(stage, target, "1.2.3") == []


def test_what_belongs_to_another_platform_or_is_missing_is_named(tmp_path: Path) -> None:
    stage = staged(tmp_path, LINUX)
    packages = stage / LINUX.packages
    write(packages / "a.so", HEADS["linux-aarch64"])
    write(packages / "b.so", BOTH_MACS)
    write(packages / "Other-2.0.dist-info" / "WHEEL", "Tag: cp313-cp313-win_amd64\nTag: cp313-none-any\n")
    (packages / "out").symlink_to("/etc")
    (stage / "THIRD_PARTY.txt").unlink()
    at = LINUX.packages
    assert problems(stage, LINUX, "1.2.4") == [
        "THIRD_PARTY.txt is missing",
        "crow 1.2.4 is not installed",
        f"{at}/Other-2.0.dist-info/WHEEL has the tags ['win_amd64', 'any']",
        f"{at}/a.so is for linux-aarch64",
        f"{at}/b.so is for darwin-x86_64 and darwin-aarch64",
        f"{at}/out is a link out of the archive",
    ]


@pytest.mark.parametrize("name", HEADS)
def test_programs_are_told_by_their_first_bytes(tmp_path: Path, name: str) -> None:
    assert binary_kind(write(tmp_path / "x", HEADS[name])) == (tuple(name.split("-", 1)),)


@pytest.mark.parametrize("head", [b"", b"MZ", b"\x7fELF", b"\xca\xfe\xba\xbe\x00\x00\x00\x41 a class file of Java"])
def test_no_first_bytes_break_the_check(tmp_path: Path, head: bytes) -> None:
    assert [
        system for system, machine in binary_kind(write(tmp_path / "x", head)) if machine != "another machine"
    ] == []


@pytest.mark.parametrize("target", [LINUX, WINDOWS], ids=lambda each: each.name)
def test_the_same_files_give_the_same_bytes(tmp_path: Path, target: Platform) -> None:
    first, second = staged(tmp_path / "first", target), staged(tmp_path / "second", target)
    for number, path in enumerate(sorted(second.rglob("*"), reverse=True)):
        os.utime(path, (number, number))
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)
    made = [pack(stage, stage.parent / target.archive) for stage in (first, second)]
    assert made[0] == made[1]
    assert made[0][1] == (first.parent / target.archive).stat().st_size
    if target.is_windows:
        names = zipfile.ZipFile(first.parent / target.archive).namelist()
    else:
        with tarfile.open(first.parent / target.archive) as tar:
            names = [member.name for member in tar]
            assert {(each.uid, each.gid, each.mtime) for each in tar} == {(0, 0, 1_577_836_800)}
            assert tar.getmember(f"{FOLDER}/crow").mode == 0o755
    assert names == sorted(names)
    assert f"{FOLDER}/{target.interpreter}" in names


@pytest.mark.parametrize("start", ["crow", "bin/crow", "bin/crow-acp"])
def test_the_launcher_finds_its_python_through_links_and_from_any_directory(tmp_path: Path, start: str) -> None:
    stage = staged(tmp_path / "a folder with spaces", LINUX)
    write(stage / LINUX.interpreter, '#!/bin/sh\necho "$0" "$@"\n').chmod(0o755)
    near, far = tmp_path / "near", tmp_path / "links" / "far"
    near.symlink_to(stage / start)
    far.parent.mkdir()
    far.symlink_to("../near")
    for program in (stage / start, near, far):
        told = subprocess.run([program, "acp", "a b"], cwd="/", capture_output=True, text=True, check=True).stdout
        python, _, arguments = told.partition(" -I ")
        assert Path(python).resolve() == stage / LINUX.interpreter
        assert arguments == "-m crow acp a b\n"


def test_the_parts_that_crow_does_not_need_are_left_out(tmp_path: Path) -> None:
    stage = tmp_path / FOLDER
    kept = ["bin/python3.13", "lib/python3.13/os.py", "lib/python3.13/lib-dynload/_ssl.so", "lib/libpython3.13.so.1.0"]
    gone = ["bin/pip3", "include/x.h", "lib/libtcl8.6.so", "lib/python3.13/test/a.py", "lib/python3.13/tkinter/b.py"]
    gone += ["lib/python3.13/site-packages/pip/c.py", "lib/python3.13/__pycache__/os.cpython-313.pyc", "share/man/x"]
    for name in (*kept, *gone):
        write(stage / name, b"linked with libpython3.13.so.1.0")
    (stage / "bin" / "python3").symlink_to("python3.13")
    prune_python(stage)
    assert sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()) == sorted(kept)
    write(stage / "bin" / "python3.13", b"linked with nothing")
    prune_python(stage)
    assert not (stage / kept[-1]).exists()


def test_packages_keep_their_modules_data_and_licences(tmp_path: Path) -> None:
    kept = ["a/__init__.py", "a/data.json", "a/py.typed", "a-1.dist-info/licenses/LICENSE", "a-1.dist-info/METADATA"]
    gone = ["a/__init__.pyi", "a/x.pyx", "bin/a", "a-1.dist-info/RECORD", "a-1.dist-info/direct_url.json", "a/b/x.h"]
    gone += ["a-1.dist-info/uv_cache.json"]  # has the time of a local wheel
    for name in (*kept, *gone):
        write(tmp_path / name)
    prune_packages(tmp_path)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        kept
    )


def test_the_notice_names_everybody_with_licence_and_text(tmp_path: Path) -> None:
    notice = third_party(staged(tmp_path, MAC), MAC)
    assert "Python: Python-2.0\n" in notice
    assert "The licence of Python." in notice
    assert "Other 2.0: MIT\n" in notice
    assert "You may use Other." in notice
    assert "crow-acp" not in notice


def test_a_platform_replaces_pins_and_adds_its_own() -> None:
    assert constraints_for(PLATFORMS["darwin-x86_64"], "a==1\ncryptography==50.0.2\n") == "a==1\ncryptography==48.0.0\n"
    assert constraints_for(WINDOWS, "a==1\n").splitlines()[0] == "a==1"
    assert constraints_for(LINUX, "a==1\n") == "a==1\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("vms-vax=python", '--python vms-vax=python: "vms-vax" is not one of linux-x86_64, '),
        ("linux-x86_64", '--python linux-x86_64: "" has no bin/python3.13'),
        ("linux-x86_64=.", '--python linux-x86_64=.: "." has no bin/python3.13'),
        ("windows-x86_64=none", '--python windows-x86_64=none: "none" has no python.exe'),
    ],
)
def test_a_python_that_cannot_be_used_is_refused_with_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: str, words: str
) -> None:
    out = tmp_path / "dist"
    assert main(["--wheel", "crow.whl", "--out", str(out), "--python", given]) == 1
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_python_of_another_platform_and_a_wrong_checksum_are_refused_with_words(tmp_path: Path) -> None:
    stage = staged(tmp_path, LINUX)
    write(stage / LINUX.interpreter, HEADS["linux-aarch64"])
    assert problems(stage, LINUX, "1.2.3") == ["bin/python3.13 is for linux-aarch64"]
    digest, _ = pack(stage, tmp_path / LINUX.archive)
    for line, code in ((f"{digest}  {LINUX.archive}", 0), (f"{'0' * 64}  {LINUX.archive}", 1), ("", 1)):
        command, given = ["sha256sum", "--check"], f"{line}\n".encode()
        assert subprocess.run(command, input=given, cwd=tmp_path, capture_output=True, check=False).returncode == code


def test_the_launcher_needs_no_other_program_without_links(tmp_path: Path) -> None:
    stage = staged(tmp_path, LINUX)
    write(stage / LINUX.interpreter, "#!/bin/sh\necho started\n").chmod(0o755)
    told = subprocess.run([stage / "crow"], env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=True)
    assert told.stdout == "started\n"

"""`grep` gives the same answer with and without ripgrep, and never runs one from the workspace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from crow import programs
from crow.programs import Programs
from crow.tools.builtin import scan
from tests.tools.conftest import OpenBox

FAKE = f"""#!{sys.executable} -IS
import os, re, sys
assert sys.argv[1] == "--no-config" and "\\0" not in sys.argv
pattern = sys.argv[sys.argv.index("--regexp") + 1].replace("(?-u:", "(?:").encode()
if b"\\\\\\\\t" in pattern:
    sys.exit(2)
with open("@LOG", "a") as log:
    log.write("asked\\n")
for name in sys.argv[sys.argv.index("--") + 1:]:
    assert not os.path.islink(name) and os.path.isfile(name), name
    with open(name, "rb") as file:
        if any(re.search(pattern, line) for line in file.read().split(b"\\n")):
            sys.stdout.buffer.write(os.fsencode(name) + b"\\0")
"""
PATTERNS = (
    *("nee.le", r"^x = \d+$", "(one|two) three", r"\bword\b", r"caf\w", r"a\tb", r"\Sz", "[^a-z]$", "$"),
    *(r"(?<=x)y", "[a&&b]", r"(a)\1", "ne{2}dle", "[]x]"),
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that answers like ripgrep and logs each call. The user installed it below HOME."""
    path = tmp_path / ".local" / "bin" / "rg"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE.replace("@LOG", str(tmp_path / "log")))
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    """Enough files to use ripgrep, with all kinds that it could read differently."""
    for number in range(scan.RIPGREP_FILES):
        (root / f"f{number}.txt").write_text(f"x = {number}\nneedle {number % 9}\n")
    (root / "crlf.txt").write_bytes(b"x = 1\r\none three\r\n")
    (root / "é.txt").write_text("café word\n")
    (root / "latin.txt").write_bytes(b"caf\xe9 nee\xffle\n")
    (root / "wide.txt").write_bytes("needle word\n".encode("utf-16"))
    (root / "separators.txt").write_bytes(b"q\x1cz \x1f\n")
    (root / "zero.bin").write_bytes(b"needle\0\n")
    (root / "empty.txt").write_bytes(b"")
    (root / "-").write_text("needle\n")
    (root / "--pre=touch").write_text("two three\n")
    (root / "two\nlines.txt").write_text("a\tb\n")
    (tmp_path / "secret").write_text("needle\n")
    (root / "out.txt").symlink_to(tmp_path / "secret")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    return root


def searched(tree: Path, pattern: str, ripgrep: Path | None, *, ignore_case: bool) -> dict[str, object]:
    """The answer of the search in this process."""
    names = sorted(path.name for path in tree.iterdir())
    flags = re.IGNORECASE if ignore_case else 0
    if ripgrep is not None and scan.is_shared(pattern):
        names = scan.narrow(names, str(ripgrep), pattern, flags)
    return scan.search(names, pattern, flags, 1_000, scan.Skipped())


def test_the_answer_is_the_same_with_and_without_ripgrep(
    tree: Path, program: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setattr(scan, "ARGUMENT_BYTES", 1_500)  # for several batches
    rg = shutil.which("rg")
    for ripgrep in [program] if rg is None else [program, Path(rg)]:
        for pattern in PATTERNS:
            ignore_case = pattern == "nee.le"
            without = searched(tree, pattern, None, ignore_case=ignore_case)
            assert searched(tree, pattern, ripgrep, ignore_case=ignore_case) == without, (ripgrep, pattern)


@pytest.mark.parametrize(
    "pattern", ["é", "[[a]", "[a--b]", "[a~~b]", r"\Ax", r"\<", "(?x)a b", "(?=a)", "a{,3}", "[](x[]", r"[\b]", r"\n"]
)
def test_expressions_that_ripgrep_reads_differently_are_not_given_to_it(pattern: str) -> None:
    assert not scan.is_shared(pattern)


async def test_grep_uses_ripgrep_if_there_is_one_and_it_saves_time(
    open_box: OpenBox, tree: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    async with open_box() as box:
        monkeypatch.setattr(programs, "SYSTEM_PLACES", ())
        plain = (await box.run("grep", pattern=r"x = 1\d$")).text
        monkeypatch.setenv("HOME", str(tmp_path))
        assert (await box.run("grep", pattern="x = 17")).text.startswith("f17.txt:1: x = 17\n[")
        assert not log.exists(), "plain text is searched without ripgrep"
        assert (await box.run("grep", pattern=r"x = 1\d$")).text == plain
        assert log.read_text() == "asked\n"
        await anyio.Path(program).write_text("#!/bin/sh\nexit 3\n")
        assert (await box.run("grep", pattern=r"x = 1\d$")).text == plain


async def ignore(_output: str) -> None: ...


async def test_a_search_runs_no_program_of_the_workspace(
    open_box: OpenBox, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    (tree / ".venv").mkdir()
    for name in ("rg", "git", "bash", "env", "python3"):
        (tree / ".venv" / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (tree / ".venv" / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rg").symlink_to(tree / ".venv" / "rg")
    monkeypatch.chdir(tree)
    for place in (str(tmp_path / "bin"), ".venv", "", str(tree / ".venv")):
        monkeypatch.setenv("PATH", place, prepend=os.pathsep)
    async with open_box() as box:
        assert "f7.txt:1: x = 7" in (await box.run("grep", pattern="x = [7]")).text
        assert "f7.txt" in (await box.run("list_files")).text
        assert await box.workspace.run("type bash", access="full", timeout_s=60, on_output=ignore)
        monkeypatch.setenv("HOME", str(tree))
        (tree / ".local").mkdir()
        (tree / ".venv").rename(tree / ".local" / "bin")
        Programs(tmp_path / "untrusted-programs").distrust([tree])
        monkeypatch.setattr(programs, "SYSTEM_PLACES", ())
        assert "f7.txt:1: x = 7" in (await box.run("grep", pattern="x = [7]")).text
    assert not ran.exists()


def test_a_search_ends_when_nobody_reads_its_answer(root: Path) -> None:
    (root / "a.txt").write_text("a" * 60 + "b\n")
    request = {"glob": None, "limit": 1, "seconds": 600, "file": "a.txt", "ignore_case": False, "ripgrep": None}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", scan.__file__, json.dumps({**request, "pattern": "(a+)+$"})],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        running.stdout.close()  # like when crow is killed
        assert running.wait(timeout=60) == 1


def test_a_search_has_a_limit_on_processor_time() -> None:
    script = (
        "import resource, scan\nscan.limit_lifetime(77)\nscan.limit_lifetime(99)\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU))"
    )
    place = Path(scan.__file__).parent
    told = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=place, check=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert told.stdout == b"(77, 78)\n", "a stricter limit stays"

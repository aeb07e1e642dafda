from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from crow.agent.permissions.decisions import excluded_paths
from crow.agent.permissions.rules import user_rules
from crow.domain.entries import Announcement, Location
from crow.tools import Outcome, PlannedCall, Touched
from crow.tools.builtin import scan
from crow.tools.builtin.scan import Folders, Skipped, glob_expression, search, summarize, walk
from tests.tools.conftest import OpenBox, call


def write(root: Path, *names: str, text: str = "x\n") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout


async def test_a_listing_of_a_repository_leaves_out_ignored_files(open_box: OpenBox, root: Path) -> None:
    write(root, "b.py", "src/a.py", "src/gone.py", "built/out.o", ".github/ci.yml", "node_modules/x.js", "ü\n.txt")
    (root / ".gitignore").write_text("built/\n")
    git(root, "init", "-q")
    git(root, "add", "src", ".gitignore")
    (root / "src" / "gone.py").unlink()
    async with open_box() as box:
        everything = await box.run("list_files")
        below = await box.run("list_files", path="src")
        ignored = await box.run("list_files", path="built")
        python = await box.run("list_files", pattern="*.py")
        none = await box.run("list_files", pattern="*.rs", path="src")
    assert everything.text.splitlines() == [
        ".github/ci.yml",
        ".gitignore",
        "b.py",
        "node_modules/x.js",
        "src/a.py",
        "ü\\n.txt",
    ]
    assert below.text == "Paths are relative to src.\na.py"
    assert ignored.text == "Paths are relative to built.\nout.o"
    assert python.text == "b.py\nsrc/a.py"
    assert none == Outcome(text="No files matching *.rs in src.")


async def test_warnings_of_the_shell_are_no_part_of_the_answer(
    open_box: OpenBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "a.py")
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")  # bash says that there is no such locale
    async with open_box() as box:
        assert (await box.run("list_files")).text == "a.py"
        assert (await box.run("grep", pattern="x")).text == "a.py:1: x"


async def test_a_listing_without_a_repository_skips_caches_and_packages_and_follows_no_link(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    write(root, "a.py", "src/b.py", "node_modules/x.js", "src/__pycache__/b.pyc", ".venv/lib.py")
    write(tmp_path, "other/secret.txt")
    (root / "out").symlink_to(tmp_path / "other")
    async with open_box() as box:
        assert (await box.run("list_files")).text.splitlines() == [
            *("a.py", "out", "src/b.py"),
            "[left out installed packages in .venv, node_modules; set path to look there]",
        ]
        assert (await box.run("list_files", path="node_modules")).text.endswith("\nx.js")


async def test_no_name_in_a_repository_index_leads_out_of_the_workspace(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    write(root, "link/secret.txt", "deep/link/secret.txt", "sub/link/.git/x", "kept.txt", text="needle\n")
    git(root, "init", "-q")
    git(root, "add", "link", "deep", "kept.txt")
    write(tmp_path, "other/secret.txt", "other/deeper/secret.txt", text="needle outside\n")
    for place in ("link", "deep/link"):
        (root / place / "secret.txt").unlink()
        (root / place).rmdir()
        (root / place).symlink_to(tmp_path / "other")
    async with open_box() as box:
        found = await box.run("grep", pattern="needle")
        listed = await box.run("list_files", pattern="*.txt")
    assert found.text == "kept.txt:1: needle\n[did not follow 2 links to places outside the directory]"
    assert listed.text == "kept.txt"


async def test_an_index_made_by_hand_does_not_lead_out_of_the_workspace(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    write(root, "kept.txt", text="needle\n")
    write(tmp_path, "secret.txt", "other/secret.txt", text="needle outside\n")
    git(root, "init", "-q")
    names = (f"{tmp_path}/secret.txt", "../secret.txt", "./../other/secret.txt", "kept.txt", "x/../../secret.txt")
    (root / ".git" / "index").write_bytes(index_of(*names))
    assert "../secret.txt" in git(root, "ls-files").splitlines(), "git lists any name in its index"
    async with open_box() as box:
        found = await box.run("grep", pattern="needle")
        listed = await box.run("list_files")
    assert (found.text, listed.text) == ("kept.txt:1: needle", "kept.txt")


def index_of(*names: str) -> bytes:
    """A git index (version 2) with these names, unchecked."""
    entries = b""
    for name in sorted(name.encode() for name in names):
        entry = struct.pack(">24xI12x20xH", 0o100644, len(name)) + name
        entries += entry + bytes(8 - len(entry) % 8)
    data = b"DIRC" + struct.pack(">II", 2, len(names)) + entries
    return data + hashlib.sha1(data, usedforsecurity=False).digest()


async def test_a_program_named_in_the_repository_configuration_is_not_started(open_box: OpenBox, root: Path) -> None:
    write(root, "a.py")
    git(root, "init", "-q")
    trap = root / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {root}/sprung\n")
    trap.chmod(0o755)
    git(root, "config", "core.fsmonitor", str(trap))
    git(root, "config", "core.hooksPath", str(root))
    async with open_box() as box:
        listed = await box.run("list_files")
        found = await box.run("grep", pattern="x", glob="*.py")
    assert (listed.text, found.text) == ("a.py\ntrap.sh", "a.py:1: x")
    assert not (root / "sprung").exists()


async def test_a_large_tree_is_summarized_by_directory(open_box: OpenBox, root: Path) -> None:
    write(root, "README.md", *(f"src/d{number % 3}/f{number:03}.py" for number in range(600)))
    async with open_box() as box:
        tree = (await box.run("list_files")).text.splitlines()
        flat = await box.run("list_files", path="src/d0", pattern="*.py")
    assert tree[:3] == ["README.md", "src/d0/*.py (180 more files)", "src/d0/f000.py"]
    assert tree[-1] == "[601 files in all; set path or pattern to list the files of one directory]"
    assert len(tree) == 1 + 3 * 21 + 1
    assert len(flat.text.splitlines()) == 201


def some_kind(number: int) -> str:
    return ("py", "py", "json", "ts")[number % 4]


TREES = {
    "flat": [f"f{number:04}.log" for number in range(3_000)],
    "deep": [f"src/main/java/{'abc'[n % 3]}/{'defg'[n % 4]}/p{n % 11}/C{n}.java" for n in range(3_000)],
    "mixed": [
        *("Makefile", "README.md"),
        *(f"pkg{n % 8}/src/m{n % 9}/f{n}.{some_kind(n // 72)}" for n in range(2_100)),
        *(f"tests/data/case{n}.json" for n in range(898)),
    ],
    "wide": [f"d{number}/a.py" for number in range(3_000)],
    "bottomless": [f"{'a/' * 900}f{number}.py" for number in range(300)],
}


@pytest.mark.parametrize("shape", TREES)
def test_every_file_of_a_large_tree_is_named_or_counted_in_few_lines(shape: str) -> None:
    names = sorted(TREES[shape])
    lines = summarize(names, 200)
    assert len(lines) <= 151
    counted = [int(found[1].replace(",", "")) for line in lines if (found := re.search(r"\(([\d,]+) ", line))]
    named = [line for line in lines if line in names]
    if shape == "wide":
        assert lines[-1] == "(2,850 more directories and files)"
    else:
        assert len(named) + sum(counted) == len(names)


def test_a_directory_is_described_by_the_kinds_of_its_files() -> None:
    lines = summarize(sorted(TREES["mixed"]), 200)
    assert lines[:2] == ["Makefile", "README.md"]
    assert "pkg0/src/m0/ (30 files: 16 .py, 7 .json, 7 .ts)" in lines
    assert "tests/data/case0.json" in lines


async def test_grep_shows_lines_around_matches(open_box: OpenBox, root: Path) -> None:
    write(root, "a.txt", text="".join(f"{'end' if number == 16 else 'line'} {number}\n" for number in range(1, 21)))
    write(root, "b.txt", text="line 9")
    async with open_box() as box:
        found = await box.run("grep", pattern="line (5|7|9)$|end", context=1)
        many = await box.run("grep", pattern="line", context=99, path="a.txt")
        other = box.toolbox.understood(call("Grep", pattern="line 9", **{"-A": 2, "-B": 1, "path": "b.txt"}))
    assert found.text.splitlines() == [
        *("a.txt", "4- line 4", "5: line 5", "6- line 6", "7: line 7", "8- line 8", "9: line 9", "10- line 10", "--"),
        *("15- line 15", "16: end 16", "17- line 17", "--", "b.txt:1: line 9"),
    ]
    assert many.text.splitlines()[-2].startswith("[only the first 12 matches;")
    assert many.text.splitlines()[-1] == "[context is at most 20 lines]"
    assert other == call("grep", pattern="line 9", path="b.txt", context=2)


@pytest.fixture
def abyss(root: Path) -> Iterator[None]:
    """Nested directories: more than the recursion limit, and in the end deeper than the longest path."""
    here = os.getcwd()
    os.chdir(root)
    try:
        for depth in range(1_040):
            if depth in (3, 1_010, 1_039):
                write(Path(), "n.txt", text="needle\n")
            os.mkdir("d" if depth < 1_020 else "d" * 200)
            os.chdir("d" if depth < 1_020 else "d" * 200)
        yield
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-r", str(root / "d")], check=True)  # too deep for shutil


async def test_a_tree_deeper_than_the_longest_path_is_searched_as_far_as_possible(
    open_box: OpenBox, abyss: None
) -> None:
    async with open_box() as box:
        found = (await box.run("grep", pattern="needle")).text.splitlines()
    assert found == [
        *(f"{'d/' * depth}n.txt:1: needle" for depth in (1_010, 3)),
        "[could not read 1 of the files and directories]",
    ]


async def test_the_end_of_a_line_is_found_in_files_with_crlf_too_and_foreign_syntax_is_explained(
    open_box: OpenBox, root: Path
) -> None:
    (root / "crlf.txt").write_bytes(b"a needle\r\nneedles\r\na needle\r")
    (root / "wide.txt").write_bytes("a needle\r\nb".encode("utf-16"))
    async with open_box() as box:
        found = (await box.run("grep", pattern="needle$")).text
        several = (await box.run("grep", pattern=r"needle\nneedles")).text
        folder = (await box.run("grep", pattern=r"C:\\new")).text
        either = (await box.run("grep", pattern=r"pin\|\<tack\>")).text
        spaces = (await box.run("grep", pattern=r"x[[:space:]]y")).text
    assert found == "crlf.txt\n1: a needle\n3: a needle\nwide.txt:1: a needle"
    assert several == (
        "No matches for `needle\\nneedles`.\n"
        r"[grep searches each line by itself, without its line end: \n and \r match nothing]"
    )
    assert folder == r"No matches for `C:\\new`."
    assert either == (
        "No matches for `pin\\|\\<tack\\>`.\n"
        r"[\| matches the character |; write | between alternatives]"
        "\n"
        r"[\< and \> match the characters < and >; write \b for the edge of a word]"
    )
    assert spaces.endswith("[classes such as [[:space:]] are not known; write \\s, \\w or \\d]")


@pytest.mark.long
@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("!*.py", "a.txt src/c.txt"),
        ("!src", "a.py a.txt"),
        ("!src/", "a.py a.txt"),
        ("!**/src/**", "a.py a.txt"),
        ("!./*.py", "a.txt src/b.py src/c.txt"),
        ("ROOT/*.py", "a.py"),
        ("!ROOT/src/*.py", "a.py a.txt src/c.txt"),
        ("./*.py", "a.py"),
    ],
)
async def test_a_glob_may_leave_files_out_or_be_absolute(open_box: OpenBox, root: Path, glob: str, found: str) -> None:
    write(root, "a.py", "a.txt", "src/b.py", "src/c.txt")
    glob = glob.replace("ROOT", str(root))
    async with open_box() as box:
        listed = (await box.run("list_files", pattern=glob)).text.split()
        searched = (await box.run("grep", pattern="x", glob=glob)).text.splitlines()
    assert listed == found.split()
    assert searched == [f"{name}:1: x" for name in found.split()]


async def test_grep_returns_path_line_and_text_without_binary_linked_or_ignored_files(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    write(root, "a.py", text="import os\r\nx = 1\nIMPORT = 2\n")
    write(root, "src/b.txt", text="no\nimport re")
    write(root, "built/c.py", text="import built\n")
    (root / "utf16.txt").write_bytes("import sixteen\n".encode("utf-16"))
    (root / "d.bin").write_bytes(b"import\0")
    (root / "name\udcff.py").write_text("import bytes\n")
    (tmp_path / "secret.py").write_text("import secret\n")
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    os.mkfifo(root / "pipe.py")
    (root / ".gitignore").write_text("built/\n")
    git(root, "init", "-q")
    async with open_box() as box:
        everywhere = await box.run("grep", pattern="^import")
        python = await box.run("grep", pattern="^import", glob="*.py", ignore_case=True)
        in_file = await box.run("grep", pattern=r"re$", path="src/b.txt")
        nothing = await box.run("grep", pattern="nowhere", path="src")
    assert everywhere.text.splitlines() == [
        "a.py:1: import os",
        "name�.py:1: import bytes",
        "src/b.txt:2: import re",
        "utf16.txt:1: import sixteen",
        "[did not follow 1 link to places outside the directory]",
    ]
    assert python.text.splitlines() == [
        *("a.py", "1: import os", "3: IMPORT = 2", "name�.py:1: import bytes"),
        "[did not follow 1 link to places outside the directory]",
    ]
    assert in_file.text == "src/b.txt:2: import re"
    assert nothing == Outcome(text="No matches for `nowhere` in src.")


async def test_grep_limits_matches_line_length_and_file_size(
    open_box: OpenBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "many.txt", text="needle\n" * 300)
    write(root, "long/a.txt", text="x" * 1000 + "needle" + "y" * 1000)
    with (root / "long" / "sparse.txt").open("wb") as file:
        file.truncate(1_000_000_000)
    async with open_box() as box:
        many = await box.run("grep", pattern="needle", glob="many.txt")
        long = await box.run("grep", pattern="needle", path="long")
    assert many.text.splitlines() == [
        "many.txt",
        *(f"{number}: needle" for number in range(1, 201)),
        "[only the first 200 matches; narrow the search with path, glob or a more specific pattern]",
    ]
    assert long.text.splitlines() == [
        f"long/a.txt:1: …{'x' * 100}needle{'y' * 294}…",
        "[skipped 1 file larger than 20,000,000 bytes]",
    ]


@pytest.mark.parametrize("pattern", [r"\Aone", r"one\Z", r"(?<!\n)one", "o[^x]*e", "[[a]one|one"])
async def test_each_line_is_matched_on_its_own(open_box: OpenBox, root: Path, pattern: str) -> None:
    write(root, "a.txt", text="zero\none\ntwo")
    async with open_box() as box:
        assert (await box.run("grep", pattern=pattern)).text == "a.txt:2: one"


async def test_a_bad_pattern_is_reported_with_its_error(open_box: OpenBox) -> None:
    words = (
        'grep: the pattern "foo(" is not a Python regular expression: missing ), unterminated subpattern at position '
        "3. Put a backslash before special characters to match them literally"
    )
    async with open_box() as box:
        assert (await box.plan("grep", pattern="foo(")).fault == words
        assert await box.run("grep", pattern="foo(") == Outcome(text=words, is_error=True)
        long = await box.run("grep", pattern="x" * 3_000 + "(")
    assert long.is_error
    assert long.text.startswith(f'grep: the pattern "{"x" * 200}…" is not a Python regular expression: missing )')


async def test_a_pattern_that_takes_long_to_compile_is_stopped(
    open_box: OpenBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.builtin.search.TIMEOUT_S", 0.3)
    write(root, "a.txt")
    ranges = "".join(f"{chr(0x100 + number)}-{chr(0xD7FF - number)}" for number in range(5_000))  # some 20 s
    async with open_box() as box:
        with anyio.fail_after(120):
            offer = await box.plan("grep", pattern=f"(?i)[{ranges}]")
            outcome = await box.run("grep", pattern=f"(?i)[{ranges}]")
    assert offer.fault is None
    assert outcome == Outcome(
        text="grep: timed out after 0.3 s; narrow the search with path, or use a simpler pattern", is_error=True
    )


async def test_a_pattern_that_never_ends_is_stopped(
    open_box: OpenBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.builtin.search.TIMEOUT_S", 0.3)
    write(root, "a.txt", text="a" * 60 + "b\n")
    async with open_box() as box:
        with anyio.fail_after(120):
            outcome = await box.run("grep", pattern="(a+)+$")
    assert outcome == Outcome(
        text="grep: timed out after 0.3 s; narrow the search with path, or use a simpler pattern", is_error=True
    )


async def test_a_search_of_a_missing_path_or_a_pipe_is_refused(open_box: OpenBox, root: Path) -> None:
    write(root, "src/a.py")
    os.mkfifo(root / "pipe")
    async with open_box() as box:
        said = [
            (await box.run("list_files", path="scr")).text,
            (await box.run("list_files", path="src/a.py")).text,
            (await box.run("grep", pattern="x", path="scr")).text,
            (await box.run("grep", pattern="x", path="pipe")).text,
        ]
    assert said == [
        "list_files: scr does not exist; similar: src",
        "list_files: src/a.py is a file; expected a directory; use read_file for files",
        "grep: scr does not exist; similar: src",
        "grep: pipe is a device, pipe or socket; expected a file or directory",
    ]


async def test_planned_searches_name_pattern_and_directory(open_box: OpenBox, root: Path, tmp_path: Path) -> None:
    async with open_box() as box:
        assert await box.plan("grep", pattern="foo", path="src") == PlannedCall(
            announcement=Announcement(
                title="Search `foo` in src", kind="search", locations=(Location(path=str(root / "src")),)
            ),
            access="read",
            touched=Touched(rule_paths=(str(root / "src"), "src")),
        )
        titles = [
            (offer.announcement.title, offer.touched.is_outside)
            for offer in (
                await box.plan("grep", pattern="foo"),
                await box.plan("list_files"),
                await box.plan("list_files", path="..", pattern="*.py"),
            )
        ]
    assert titles == [
        ("Search `foo`", False),
        ("List files", False),
        (f"List files matching `*.py` in {tmp_path}", True),
    ]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*.py", ["a.py"], ["a.pyc", "src/a.py"]),
        ("src/**/*.ts", ["src/a.ts", "src/x/y/a.ts"], ["a.ts", "src/a.tsx"]),
        ("src/**", ["src/a", "src/b/c"], ["lib/a"]),
        ("**/test_*.py", ["test_a.py", "x/y/test_b.py"], ["x/a_test.py"]),
        ("file[0-9!].{c,h}?", ["file1.cc", "file!.hh"], ["filex.cc", "file1.c"]),
        ("[!a]b", ["cb"], ["ab"]),
        ("a+(b).txt", ["a+(b).txt"], ["aab.txt"]),
        ("odd[{", ["odd[{"], ["odd"]),
        ("./a", ["a"], ["b"]),
    ],
)
def test_globs_match_like_in_a_shell(pattern: str, matching: list[str], other: list[str]) -> None:
    expression = re.compile(glob_expression(pattern))
    assert [name for name in matching + other if expression.fullmatch(name)] == matching


def test_the_scanning_program_runs_with_the_standard_library_alone(root: Path) -> None:
    program = Path(sys.modules["crow.tools.builtin.scan"].__file__ or "")
    answer = subprocess.run(
        [sys.executable, "-I", "-S", program, '{"glob": "*.none", "limit": 1, "seconds": 9}'],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    assert answer.stdout == b'{"names": [], "total": 0, "left_out": 0, "skipped": {}, "folders": []}\n'


async def test_searches_leave_out_secrets_and_excluded_files_and_say_so(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    write(root, "a.py", ".env", "deep/.ENV", ".ssh/id", ".config/gh/hosts.yml", "docs/x/b.md", text="needle\n")
    os.link(root / ".env", root / "link.txt")
    write(root, "shared.txt", text="needle\n")
    os.link(root / "shared.txt", tmp_path / "elsewhere")
    os.link(root / ".env", root / "copy (1).txt")
    excluded = excluded_paths("grep", user_rules([], ["read_file(.env)", "*(docs/**)"]))
    async with open_box() as box:
        for name, arguments in (("grep", {"pattern": "needle"}), ("list_files", {})):
            planned = replace(await box.plan(name, **arguments), excluded=excluded)
            found = await box.toolbox.run(call(name, **arguments), "call_1_0", box.show, planned=planned)
            lines = [line.partition(":")[0] for line in found.text.splitlines()]
            assert lines == ["a.py", "[left out 8 files that the user's rules forbid or that may hold keys]"]
        without = (await box.run("grep", pattern="needle")).text.splitlines()
        secret = (await box.run("grep", pattern="needle", path=".ssh")).text
    assert [line.partition(":")[0] for line in without[:-1]] == [
        *(".env", "a.py", "copy (1).txt", "deep/.ENV", "docs/x/b.md", "link.txt", "shared.txt")
    ]
    assert without[-1] == "[left out 2 files that the user's rules forbid or that may hold keys]"
    assert secret == f".ssh{os.sep}id:1: needle"


async def test_a_pattern_that_is_too_long_is_refused_by_its_length(open_box: OpenBox, root: Path) -> None:
    write(root, "a.py")
    async with open_box() as box:
        found = await box.run("grep", pattern="x" * 200_000)
        longest = await box.run("grep", pattern="\u00e9" * 20_000)
    assert found.text.endswith("; expected text of at most 20,000 characters")
    assert longest.text.startswith("No matches for")


def test_a_pattern_that_gives_nothing_back_is_tried_on_each_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "a.txt", text="abc\nx")
    monkeypatch.chdir(root)
    assert search(["a.txt"], "[^x]++$", 0, 10, Skipped())["matches"] == [("a.txt", 1, "abc")]


def test_a_directory_that_becomes_a_link_during_a_search_is_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "a/x.txt", "b/c/x.txt", "b/x.txt", "d/x.txt", text="inside\n")
    write(tmp_path, "out/x.txt", "out/c/x.txt", text="outside\n")
    monkeypatch.chdir(root)
    walked = walk("", Skipped())
    names = [next(walked)]
    for folder in ("b/c", "b", "d"):
        (root / folder).rename(tmp_path / folder.replace("/", "-"))
    for folder in ("b", "d"):
        (root / folder).symlink_to(tmp_path / "out")
    names += walked
    assert names == ["a/x.txt"]
    given = ["a/x.txt", "b/c/x.txt", "b/x.txt", "d/x.txt", "../out/x.txt", "b/../../out/x.txt"]
    assert search(given, "side", 0, 10, Skipped())["matches"] == [("a/x.txt", 1, "inside")]
    folders = Folders()
    for name in given[1:]:
        with pytest.raises(OSError, match=r"."):
            folders.open(name)
        with pytest.raises(OSError, match=r"."):
            folders.status(name)


async def test_grep_says_what_it_could_not_look_for(open_box: OpenBox, root: Path) -> None:
    (root / "d.bin").write_bytes(b"caf\xe9\0")
    (root / "latin.txt").write_bytes("café\n".encode("latin-1"))
    (root / "wide.txt").write_bytes("a café\n".encode("utf-32"))
    async with open_box() as box:
        binary = (await box.run("grep", pattern="caf", path="d.bin")).text
        accent = (await box.run("grep", pattern="café")).text
        plain = (await box.run("grep", pattern="caf")).text
        unmatched = (await box.run("grep", pattern="caf", glob="src/*.txt")).text
    assert binary == "No matches for `caf` in d.bin.\n[d.bin is binary; grep searches only text]"
    assert accent == (
        "wide.txt:1: a café\n[characters outside ASCII cannot be found in 1 file with an encoding other than UTF-8]"
    )
    assert plain == "latin.txt:1: caf�\nwide.txt:1: a café"
    assert unmatched == "There are no files that match src/*.txt to search."


def test_a_walk_counts_what_it_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "a.py", "b/c.py", "b/venv/d.py", "b/__pycache__/e.pyc", "f.py")
    monkeypatch.chdir(root)
    monkeypatch.setattr(scan, "MAX_WALKED", 2)
    skipped = Skipped()
    assert list(walk("", skipped)) == ["a.py", "f.py"]
    assert (skipped.counts, skipped.folders) == ({"walked": 1}, set())
    monkeypatch.setattr(scan, "MAX_WALKED", 3)
    skipped = Skipped()
    assert list(walk("", skipped)) == ["a.py", "f.py", "b/c.py"]
    assert (skipped.counts, skipped.folders) == ({}, {"b/venv"})
    search(["a.py", "b/gone.py", "x" * 300], "x", 0, 9, skipped)
    assert skipped.counts == {"unreadable": 1}


async def test_a_byte_order_mark_is_no_part_of_the_first_line(open_box: OpenBox, root: Path) -> None:
    (root / "a.cs").write_bytes(b"\xef\xbb\xbfusing System;\n")
    async with open_box() as box:
        assert "using System;" in (await box.run("grep", pattern="^using")).text


async def test_a_directory_whose_name_is_no_valid_class_of_characters_is_found(open_box: OpenBox, root: Path) -> None:
    write(root, "app/[user-id]/page.ts")
    async with open_box() as box:
        assert "app/[user-id]/page.ts" in (await box.run("list_files", glob="app/[user-id]/*.ts")).text

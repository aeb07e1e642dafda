"""The benchmark of questions: its corpus, its scratch repository, and how it compares runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.questions.__main__ import ALLOWED, MIXES, MODES, Command, Ran, Result, corpus, differences, summary
from benchmarks.questions.repository import changes, ignored, make_area
from benchmarks.rows import ROOT, Row
from crow.tools.sandbox.confiner import choose_sandbox

ASKED: Mapping[str, int] = dict.fromkeys(MODES, 1)
FREE: Mapping[str, int] = dict.fromkeys(MODES, 0)


def test_the_corpus_has_at_least_300_different_lines_of_known_groups() -> None:
    lines = corpus()
    assert len({command.line for command in lines}) == len(lines) >= 300
    assert {command.access for command in lines} == {"read", "write", "full"}
    assert {group for mix in MIXES.values() for group in mix} <= {command.group for command in lines}


def test_two_scratch_repositories_are_the_same(tmp_path: Path) -> None:
    states = []
    for name in ("one", "two"):
        area = tmp_path / name
        area.mkdir()
        make_area(area)
        states.append({path: state for path, state in changes(area).items() if "/.git/config" not in path})
        assert ignored(area / "work") == (".env", ".venv/")
    first, second = states
    own = {path for path in first if path.startswith("work/.venv/")}  # its scripts name their directory
    assert {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)} <= own


def test_a_confined_run_that_does_less_is_noticed() -> None:
    plain = Ran(asks=ASKED, end=0, output="fine\n", state={"work/a.txt": "file 1", "work/build/a": "program"})
    assert list(differences(plain, plain, ())) == []
    confined = replace(plain, end=1, output="fine\ntouch: Read-only file system\n", state={"work/a.txt": "file 2"})
    assert list(differences(plain, confined, ["build/"])) == [
        "ended with 1 instead of 0: 'fine\\ntouch: Read-only file system\\n'",
        "touch: Read-only file system",
        "work/a.txt: file 2 instead of file 1",
    ]
    assert len(list(differences(plain, confined, ()))) == 4


def test_a_repeated_command_counts_as_a_question() -> None:
    look = Command(group="look", access="read", line="ls")
    free = Result(command=look, tries=("read",), before=ASKED, after=FREE, faults=((),))
    again = replace(free, tries=("read", "write"), after=ASKED, faults=(("denied",), ()))
    rows = {row.what.strip(): row.median for row in summary([free, free, free, again])}
    assert rows["mode ask: questions without confinement"] == 4
    assert rows["mode ask, look: what is left of 4 questions"] == 25
    assert rows["repetitions with more access"] == 1
    assert rows["that ran with the same files and exit code"] == 4


def test_the_answer_that_allows_confined_writes_counts_as_one_question() -> None:
    write = Command(group="build", access="write", line="make")
    confined = Result(command=write, tries=("write",), before=ASKED, after={**ASKED, ALLOWED: 0}, faults=((),))
    full = replace(confined, tries=("full",), after=ASKED)
    assert questions(summary([confined, confined, full])) == {"ask": (3, 3), ALLOWED: (3, 2)}
    assert questions(summary([full, full])) == {"ask": (2, 2), ALLOWED: (2, 2)}


def questions(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """The questions without and with confinement in the mode `ask`, plain and with the answer."""
    numbers = [row.median for row in rows]
    start = "mode {}: questions without confinement"
    places = {mode: [row.what for row in rows].index(start.format(mode)) for mode in ("ask", ALLOWED)}
    return {mode: (numbers[place], numbers[place + 1]) for mode, place in places.items()}


@pytest.mark.long
def test_lines_run_in_a_scratch_repository_and_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.questions",
        "--grep",
        "^(git add -A|git stash push .*|nproc.*|tree .*|sudo .*)$",
    ]
    subprocess.run([*command, "--json", str(file)], cwd=ROOT, check=True, capture_output=True)
    found = [Row(row["what"], row["median"], row["worst"], row["unit"]) for row in json.loads(file.read_text())["rows"]]
    rows = {row.what.strip(): row.median for row in found}
    assert rows["command lines"] == 6
    assert rows["that ran"] in (3, 4)  # tree may be missing; the lines with sudo never run
    assert rows["that ran with the same files and exit code"] == rows["that ran"]
    unconfined = 6
    if choose_sandbox().sandbox is None:
        assert questions(found) == {"ask": (unconfined, unconfined), ALLOWED: (unconfined, unconfined)}
    else:
        full = 2  # sudo
        assert questions(found) == {"ask": (unconfined, full + 2), ALLOWED: (unconfined, full + 1)}

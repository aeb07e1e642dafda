"""Crow and git agree on what git ignores."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from crow.tools.layers.ignored import IgnoreRules, parse_pattern

NAMES = ["a", "b", "build", "x.log", "keep.log", "a b", "[x]", "#c", "!d", "deep"]
PATTERNS = [
    *("*.log", "!keep.log", "build/", "/a", "a/b", "**/b", "a/**", "a/**/b", "deep/**/x.log", "?", "[ab]", "[!a]x"),
    *("\\#c", "\\!d", "#c", "", "a b", "a\\ b", "*", "!*/", "/*/b", "[[]x[]]", "x*g", "**", "b/", "!/a/b", "/deep/a/"),
]


@pytest.mark.parametrize("seed", range(12))
def test_crow_ignores_what_git_ignores(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folders = [tmp_path]
    for _ in range(12):
        folder = rng.choice(folders) / rng.choice(NAMES)
        if not folder.exists():
            folder.mkdir()
            folders.append(folder)
    for folder in folders:
        for name in rng.sample(NAMES, 4):
            if not (folder / name).exists():
                (folder / name).touch()
        if rng.random() < 0.4:
            (folder / ".gitignore").write_text("\n".join(rng.choices(PATTERNS, k=rng.randint(1, 6))))
    (tmp_path / ".git" / "info" / "exclude").write_text(rng.choice(PATTERNS) + "\n")
    paths = [path for path in tmp_path.rglob("*") if ".git" not in path.parts]
    asked = "\0".join(str(path.relative_to(tmp_path)) for path in paths)
    told = subprocess.run(
        ["git", "-C", str(tmp_path), "check-ignore", "-z", "--no-index", "--stdin"],
        input=asked.encode(),
        capture_output=True,
        check=False,
    )
    by_git = {name for name in told.stdout.decode().split("\0") if name}

    rules = IgnoreRules([str(tmp_path)])
    by_crow = {str(path.relative_to(tmp_path)) for path in paths if rules.ignores(str(path), path.is_dir())}

    assert by_crow == by_git


def test_lines_and_brackets_are_read_as_git_reads_them(tmp_path: Path) -> None:
    lines = ("a\fb", "c\u2028d", "e[", "[!]f]g", "[]-]h", "\ti")
    names = ("a\fb", "a", "b", "c\u2028d", "c", "d", "e[", "fg", "]g", "xg", "]h", "-h", "xh", "\ti", "i")
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    (tmp_path / ".gitignore").write_text("\n".join(lines), encoding="utf-8")
    command = ["git", "-C", str(tmp_path), "check-ignore", "-z", "--no-index", "--stdin"]
    known = subprocess.run(command, input="\0".join(names).encode(), capture_output=True, check=True).stdout
    rules = IgnoreRules([str(tmp_path)])
    assert [name for name in names if rules.ignores(str(tmp_path / name), False)] == known.decode().split("\0")[:-1]


def test_nothing_is_ignored_outside_of_a_repository_or_in_gits_own_directory(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    assert not IgnoreRules([str(tmp_path)]).ignores(str(tmp_path / "a"), False)
    (tmp_path / ".git").mkdir()
    rules = IgnoreRules([str(tmp_path)])

    assert [rules.ignores(str(tmp_path / name), False) for name in ("a", ".git/config", "sub/.git/HEAD")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "pattern", ["*" * 400, "a*" * 200 + "b", "*a" * 200 + "b", "[" * 400, "**/" * 100, "(a+)+$", "[z-a]", "[\\"]
)
def test_hostile_patterns_take_no_time_and_raise_nothing(pattern: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text(pattern)

    assert IgnoreRules([str(tmp_path)]).ignores(str(tmp_path / ("a" * 250)), False) in (True, False)
    assert parse_pattern(pattern) is None or parse_pattern(pattern)

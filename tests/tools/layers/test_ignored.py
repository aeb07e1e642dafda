"""Crow and git agree on what git ignores."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from crow.tools.layers.ignored import IgnoreRules, parse_pattern

NAMES = ["a", "b", "build", "x.log", "keep.log", "a b", "[x]", "#c", "!d", "deep"]
PATTERNS = [
    *("*.log", "!keep.log", "build/", "/a", "a/b", "**/b", "a/**", "a/**/b", "deep/**/x.log", "?", "[ab]", "[!a]x"),
    *("\\#c", "\\!d", "#c", "", "a b", "a\\ b", "*", "!*/", "/*/b", "[[]x[]]", "x*g", "**", "b/", "!/a/b", "/deep/a/"),
]


def git(*arguments: str | Path, told: Sequence[str] = ()) -> list[str]:
    """Run git, which reads `told` with zero bytes between. Return what it writes, split in the same way."""
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *map(str, arguments)],
        input="\0".join(told).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [name for name in done.stdout.decode().split("\0") if name]


def ignored_by_git(root: Path, names: Sequence[str]) -> set[str]:
    return set(git("-C", root, "check-ignore", "-z", "--no-index", "--stdin", told=names))


def ignored_by_crow(root: Path, names: Sequence[str]) -> set[str]:
    rules = IgnoreRules([str(root)])
    return {name for name in names if rules.ignores(str(root / name), (root / name).is_dir())}


def fill(top: Path, rng: random.Random) -> list[Path]:
    """Make directories, files and ignore files at random. Return the directories."""
    folders = [top]
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
    return folders


def names_in(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*") if ".git" not in path.parts]


@pytest.mark.parametrize("seed", range(12))
def test_crow_ignores_what_git_ignores_also_in_a_subfolder_of_a_repository(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    git("init", "-q", tmp_path)
    folders = fill(tmp_path, rng)
    (tmp_path / ".git" / "info" / "exclude").write_text(rng.choice(PATTERNS) + "\n")
    by_git = ignored_by_git(tmp_path, names_in(tmp_path))

    for root in [folder for folder in folders if str(folder.relative_to(tmp_path)) not in by_git]:
        assert ignored_by_crow(root, names_in(root)) == ignored_by_git(root, names_in(root)), root


def test_a_linked_worktree_and_its_subfolders_have_the_rules_of_the_repository(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    git("init", "-q", main)
    (main / ".gitignore").write_text("*.log\n")
    (main / "package").mkdir()
    (main / "package" / "file").touch()
    git("-C", main, "add", ".")
    git("-C", main, "commit", "-qm", "a")
    git("-C", main, "worktree", "add", "-q", tree)
    (main / ".git" / "info" / "exclude").write_text("/package/build\n")

    for root, names in ((tree, ["a.log", "package/build", "build"]), (tree / "package", ["a.log", "build", "x"])):
        assert ignored_by_crow(root, names) == ignored_by_git(root, names) == set(names[:2]), root


def test_each_repository_in_a_workspace_has_its_own_rules(tmp_path: Path) -> None:
    for name in ("one", "two", "one/inner", "one/build/inner"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        git("init", "-q", tmp_path / name)
    (tmp_path / "one" / ".gitignore").write_text("*.log\nbuild/\n")
    (tmp_path / "one" / "inner" / ".git" / "info" / "exclude").write_text("*.out\n")
    (tmp_path / ".gitignore").write_text("*\n")  # this directory is in no repository
    (tmp_path / "two" / ".git" / "HEAD").unlink()  # git takes it for none
    names = ["a", "one/a", "one/a.log", "one/inner/a.log", "one/inner/a.out", "one/build/inner/a", "two/a.log"]

    assert ignored_by_crow(tmp_path, names) == {"one/a.log", "one/inner/a.out", "one/build/inner/a"}


def test_a_repository_that_ignores_the_workspace_hides_nothing_in_it(tmp_path: Path) -> None:
    """Some people keep the settings in their home directory in a repository that ignores everything else."""
    git("init", "-q", tmp_path)
    (tmp_path / ".gitignore").write_text("*\n!.profile\n")
    (tmp_path / "project").mkdir()

    assert ignored_by_crow(tmp_path / "project", ["a", "b/c"]) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_nobody_else_can_hide_changes_with_a_repository_around_the_workspace(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    git("init", "-q", tmp_path)
    (tmp_path / ".gitignore").write_text("*.log\n")
    assert ignored_by_crow(root, ["a.log"]) == {"a.log"}

    os.chown(tmp_path / ".git", 12_345, -1)
    assert ignored_by_crow(root, ["a.log"]) == set()
    os.chown(tmp_path, 12_345, -1)
    os.chown(root, 12_345, -1)  # root works for another user, such as in a container
    assert ignored_by_crow(root, ["a.log"]) == {"a.log"}


def test_hostile_repositories_make_crow_wait_for_nothing_and_read_no_links(tmp_path: Path) -> None:
    root = tmp_path / "work"
    git("init", "-q", root)
    (tmp_path / "rules").write_text("*\n")
    (root / ".gitignore").symlink_to(tmp_path / "rules")
    (root / "sub").mkdir()
    os.mkfifo(root / "sub" / ".gitignore")
    writer = os.open(root / "sub" / ".gitignore", os.O_RDWR)  # a reader would wait for what it writes
    try:
        for number, text in enumerate(
            ("gitdir: .", "gitdir: /proc/self/fd/0", "gitdir: \0", "gitdir: ../../../..", "x")
        ):
            (root / str(number)).mkdir()
            (root / str(number) / ".git").write_text(text)
            (root / str(number) / ".gitignore").write_text("*\n")
        (root / "5").mkdir()
        (root / "5" / ".git").symlink_to("5")
        names = ["a", "sub/a", "5/a"]
        assert ignored_by_crow(root, names) == set()
        assert ignored_by_crow(root, [f"{number}/a" for number in range(5)]) == {f"{number}/a" for number in range(5)}
    finally:
        os.close(writer)


def test_lines_and_brackets_are_read_as_git_reads_them(tmp_path: Path) -> None:
    lines = ("a\fb", "c\u2028d", "e[", "[!]f]g", "[]-]h", "\ti")
    names = ("a\fb", "a", "b", "c\u2028d", "c", "d", "e[", "fg", "]g", "xg", "]h", "-h", "xh", "\ti", "i")
    git("init", "-q", tmp_path)
    (tmp_path / ".gitignore").write_text("\n".join(lines), encoding="utf-8")
    assert ignored_by_crow(tmp_path, names) == ignored_by_git(tmp_path, names)


def test_nothing_is_ignored_outside_of_a_repository_or_in_gits_own_directory(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    assert not IgnoreRules([str(tmp_path)]).ignores(str(tmp_path / "a"), False)
    git("init", "-q", tmp_path)
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
    git("init", "-q", tmp_path)
    (tmp_path / ".gitignore").write_text(pattern)

    assert IgnoreRules([str(tmp_path)]).ignores(str(tmp_path / ("a" * 250)), False) in (True, False)
    assert parse_pattern(pattern) is None or parse_pattern(pattern)

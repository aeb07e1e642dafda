"""The files that deny rules hide from commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crow.agent.permissions.decisions import excluded_paths
from crow.agent.permissions.rules import user_rules
from crow.tools.sandbox.denied import MAX_DENIED, DeniedFiles
from crow.tools.sandbox.scan import FOLDER_DEPTH


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def find(denied: DeniedFiles, root: Path, *rules: str) -> set[str]:
    excluded = excluded_paths("shell", user_rules([], [f"read_file({rule})" for rule in rules]))
    return {os.path.relpath(path, root) for path in denied.find(excluded, [root])}


@pytest.mark.parametrize(
    ("rule", "hidden"),
    [
        (".env", {".env", "a/.ENV", "a/b/.env"}),
        ("a/.env", {"a/.ENV"}),
        ("*.key", {"x.key", "a/y.key"}),
        ("a/*", {"a/.ENV", "a/y.key"}),
        ("a/**", {"a"}),
        ("a/", {"a"}),
        ("a/*/.env", {"a/b/.env"}),
        ("**", {".env", "x.key", "a", "node_modules"}),
        ("node_modules/pack/.env", {"node_modules/pack/.env"}),
        ("{root}/a/b/**", {"a/b"}),
        ("missing/", set()),
        ("../**", set()),
    ],
)
def test_each_pattern_hides_what_it_covers(tmp_path: Path, rule: str, hidden: set[str]) -> None:
    write(tmp_path, ".env", "a/.ENV", "a/b/.env", "x.key", "a/y.key", "node_modules/pack/.env")
    assert find(DeniedFiles(tmp_path, [tmp_path]), tmp_path, rule.format(root=tmp_path)) == hidden


def test_the_search_ends_below_four_folders_but_a_rule_can_name_deeper_ones(tmp_path: Path) -> None:
    folders = [str(number) for number in range(FOLDER_DEPTH + 2)]
    reached, deeper = "/".join([*folders[:FOLDER_DEPTH], ".env"]), "/".join([*folders, ".env"])
    write(tmp_path, reached, deeper)
    denied = DeniedFiles(tmp_path, [tmp_path])
    assert find(denied, tmp_path, ".env") == {reached}
    assert find(denied, tmp_path, ".env", deeper) == {reached, deeper}


def test_other_names_of_a_denied_file_are_hidden_but_no_file_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, "a/plain", "b/real", "b/plain")
    write(tmp_path, "elsewhere", "secret")
    (root / ".env").symlink_to("b/real")
    (root / "b" / ".env").symlink_to(tmp_path / "elsewhere")
    os.link(tmp_path / "secret", root / "a" / "hard")
    assert find(DeniedFiles(root, [root]), root, ".env", str(tmp_path / "secret")) == {"b/real", "../secret", "a/hard"}


def test_a_file_that_appears_or_a_rule_that_changes_counts_at_once(tmp_path: Path) -> None:
    denied = DeniedFiles(tmp_path, [tmp_path])
    write(tmp_path, "a/x")
    os.utime(tmp_path / "a", (0, 0))
    assert find(denied, tmp_path, ".env") == set()
    write(tmp_path, "a/.env")
    assert find(denied, tmp_path, ".env") == {"a/.env"}
    (tmp_path / "a" / ".env").rename(tmp_path / ".env")
    assert find(denied, tmp_path, ".env") == {".env"}
    assert find(denied, tmp_path, "x") == {"a/x"}
    assert find(denied, tmp_path) == set()


def test_more_files_than_can_be_hidden_are_refused_and_a_folder_is_not(tmp_path: Path) -> None:
    write(tmp_path, *(f"keys/{number}.pem" for number in range(MAX_DENIED + 1)))
    denied = DeniedFiles(tmp_path, [tmp_path])
    with pytest.raises(PermissionError, match=r"cover 501 files here, such as .* too many to hide one by one"):
        find(denied, tmp_path, "*.pem")
    assert find(denied, tmp_path, "keys/") == {"keys"}

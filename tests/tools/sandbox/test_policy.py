"""What commands may see and change, and the variables that they get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crow.tools.sandbox.policy import Policy, PrivateDirectories, SandboxOptions


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def private(tmp_path: Path) -> PrivateDirectories:
    return PrivateDirectories(
        temporary=tmp_path / "temporary",
        caches=tmp_path / "caches",
        blank=tmp_path / "temporary" / "blank",
        trust=tmp_path / "trust",
    )


def policy(home: Path, env: dict[str, str], **options: object) -> Policy:
    return Policy((home / "project",), SandboxOptions(**options), env)  # type: ignore[arg-type]


def test_programs_on_path_are_readable_but_not_the_directories_of_the_user(
    home: Path, private: PrivateDirectories
) -> None:
    for folder in (
        "tool/bin",
        "tool/lib",
        "work/bin",
        "work/secret",
        "bin",
        ".local/bin",
        ".local/share",
        "project/bin",
    ):
        (home / folder).mkdir(parents=True)
    (home / "linked").symlink_to(home / "tool")
    names = ["tool/bin", "work/bin", "bin", ".local/bin", "project/bin", "", ".local", "missing/bin", "linked/bin"]
    path = ":".join([*(str(home / name) for name in names), ".", "relative/bin", "/usr/bin"])
    confinement = policy(home, {"PATH": path}).confinement("read", private)
    readable = {str(path.relative_to(home)) for path in confinement.readable if path.is_relative_to(home)}
    assert readable == {"tool", "work/bin", "bin", ".local/bin"}
    assert confinement.throwaway == (home / "project",)
    assert home in confinement.masked


def test_only_a_write_command_gets_the_workspace_and_the_network(home: Path, private: PrivateDirectories) -> None:
    rules = policy(home, {}, network=True)
    read, write = rules.confinement("read", private), rules.confinement("write", private)
    assert (read.writable, read.has_network) == ((private.caches,), False)
    assert (write.writable, write.has_network) == ((private.caches, home / "project"), True)
    assert not rules.confinement("read", private).read_only


def test_caches_are_private_unless_the_user_made_them_writable(home: Path, private: PrivateDirectories) -> None:
    for folder in (".cache/go-build", ".cache/pre-commit", ".npm"):
        (home / folder).mkdir(parents=True)
    closed = policy(home, {}).environment("write", private)
    opened = policy(home, {"GOPROXY": "https://proxy"}, network=True, writable=("~/.npm",)).environment(
        "write", private
    )
    assert closed["TMPDIR"] == closed["TMP"] == str(private.temporary)
    assert {closed[name] for name in ("npm_config_cache", "GOCACHE")} == {
        str(private.caches / "npm"),
        str(private.caches / "go-build"),
    }
    assert closed["PRE_COMMIT_HOME"] == str(home / ".cache/pre-commit")
    assert closed["GOPROXY"] == f"file://{home}/go/pkg/mod/cache/download,off"
    assert opened["GOPROXY"] == f"file://{home}/go/pkg/mod/cache/download,https://proxy"
    assert "npm_config_cache" not in opened
    assert ("CARGO_HOME" in closed, "CARGO_HOME" in opened) == (False, True)


def test_a_home_that_is_a_directory_of_the_system_is_not_masked(
    monkeypatch: pytest.MonkeyPatch, home: Path, private: PrivateDirectories
) -> None:
    monkeypatch.setenv("HOME", "/")
    assert Path("/") not in policy(home, {}).confinement("read", private).masked


def make_repository(folder: Path) -> Path:
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return folder


def shown_repositories(root: Path, private: PrivateDirectories) -> tuple[set[Path], set[Path]]:
    """What a `write` command in the root can read and write around it."""
    confinement = Policy((root,), SandboxOptions(), {}).confinement("write", private)
    return {path for path in confinement.readable if root.is_relative_to(path)}, {
        path for path in confinement.writable if path not in (root, private.caches)
    }


def test_the_repository_around_a_workspace_is_shown(home: Path, private: PrivateDirectories) -> None:
    outer = make_repository(home / "code" / "mono")
    root = outer / "packages" / "a"
    root.mkdir(parents=True)
    assert shown_repositories(root, private) == ({outer}, {outer / ".git"})
    both = Policy((root, outer), SandboxOptions(), {}).confinement("read", private)
    assert not [path for path in both.readable if path.is_relative_to(outer)], "a root contains the repository"


def test_a_linked_worktree_around_a_workspace_is_shown_if_its_repository_knows_it(
    home: Path, private: PrivateDirectories
) -> None:
    main, tree = make_repository(home / "main"), home / "tree"
    own, root = main / ".git" / "worktrees" / "tree", tree / "packages" / "a"
    own.mkdir(parents=True)
    root.mkdir(parents=True)
    (own / "commondir").write_text("../..\n")
    (own / "gitdir").write_text(f"{home}/elsewhere/.git\n")
    (tree / ".git").write_text(f"gitdir: {own}\n")
    assert shown_repositories(root, private) == (set(), set())
    (own / "gitdir").write_text(f"{tree}/.git\n")
    assert shown_repositories(root, private) == ({tree}, {main / ".git"})


@pytest.mark.parametrize("tree", ["..", "", ".config", "link", *(["theirs"] if os.geteuid() == 0 else [])])
def test_a_repository_is_not_shown_if_its_tree_is_too_much_or_belongs_to_others(
    home: Path, private: PrivateDirectories, tree: str
) -> None:
    outer = home / tree
    root = outer.resolve() / "packages" / "a"
    root.mkdir(parents=True)
    if tree == "link":
        (outer / ".git").symlink_to(make_repository(home / "other") / ".git")
    else:
        make_repository(outer)
    if tree == "theirs":
        os.chown(outer / ".git", 12_345, 12_345)
    assert shown_repositories(root, private) == (set(), set())


def test_a_repository_that_appears_later_is_not_shown(home: Path, private: PrivateDirectories) -> None:
    """Its hooks are not protected, because the session's protected places are known by then."""
    root = home / "code" / "mono" / "a"
    root.mkdir(parents=True)
    rules = Policy((root,), SandboxOptions(), {})
    before = rules.confinement("write", private)
    make_repository(root.parent)
    assert rules.confinement("write", private) == before

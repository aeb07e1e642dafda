"""What git would run is found in git's own files, without running git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.tools.git import GitFiles, commands_in, find_repository, parse_settings
from crow.tools.workspace import DiskWorkspace

SETTINGS = """\ufeff[core] bare = false
\thooksPath = tools/hooks ; a comment
[include]
\tpath = ../shared.inc
[filter "odd\\"name"]
\tclean = "sh -c 'x # y'" # comment
\tsmudge = one \\
  two
[diff "a.b"] textconv = \\"quoted\\"
[alias]
\tgo = !tools/go.sh
\tempty =
\tflag
[gc.old]
\tname = x
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository. Nothing outside it has settings for git."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    (tmp_path / "home").mkdir()
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet")
    return root


def git(cwd: Path, *arguments: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *who, *arguments], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def listed_by_git(file: Path) -> list[tuple[str, str, str]]:
    """The settings of a file as git itself lists them: section, name, value."""
    found = []
    for entry in git(file.parent, "config", "--file", str(file), "--list", "--null").split("\0")[:-1]:
        key, _, value = entry.partition("\n")
        found.append((key.partition(".")[0], key.rpartition(".")[2], value))
    return found


def test_settings_are_read_as_git_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(SETTINGS)
    assert list(parse_settings(SETTINGS)) == listed_by_git(file)
    assert ("filter", "smudge", "one   two") in listed_by_git(file)


TEXT = st.text(alphabet='ab ./"\\;#!=\t$', max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["core.editor", "filter.x y.clean", "alias.go"]), TEXT), max_size=5))
def test_quoted_and_escaped_values_are_read_back(settings: list[tuple[str, str]]) -> None:
    lines = []
    for key, value in settings:
        section, _, name = key.rpartition(".")
        head, _, inner = section.partition(".")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
        lines.append(f'[{head}{f" {chr(34)}{inner}{chr(34)}" if inner else ""}]\n\t{name} = "x{escaped}"\n')
    expected = [(key.partition(".")[0], key.rpartition(".")[2], f"x{value}".strip()) for key, value in settings]
    assert list(parse_settings("".join(lines))) == expected


@given(st.text(alphabet='[]a."\\\n\r =#;\t\0', max_size=200))
def test_no_text_is_too_broken_to_be_read(text: str) -> None:
    assert all(len(setting) == 3 for setting in parse_settings(text))


NAMED = {
    "core.hooksPath": ("tools/hooks", "tools/hooks/pre-commit"),
    "init.templateDir": ("tools/template", "tools/template/hooks/post-checkout"),
    "include.path": ("../shared.inc", "shared.inc"),
    "includeIf.gitdir:/nowhere/.path": ("../other.inc", "other.inc"),
    "core.attributesFile": ("tools/attributes", "tools/attributes"),
    "core.fsmonitor": ("tools/watch.sh", "tools/watch.sh"),
    "core.sshCommand": ("sh tools/ssh.sh -q", "tools/ssh.sh"),
    "core.editor": ("./tools/editor", "tools/editor"),
    "core.pager": ("less | tools/pager", "tools/pager"),
    "core.askPass": ("tools/ask", "tools/ask"),
    "core.gitProxy": ("tools/proxy for example.org", "tools/proxy"),
    "core.alternateRefsCommand": ("tools/refs", "tools/refs"),
    "sequence.editor": ("python3 tools/todo.py", "tools/todo.py"),
    "filter.x.clean": ("python tools/clean.py %f", "tools/clean.py"),
    "filter.x.smudge": ("$PWD/tools/smudge", "tools/smudge"),
    "filter.x.process": ("node 'tools/with space.js'", "tools/with space.js"),
    "diff.external": ("tools/diff", "tools/diff"),
    "diff.x.command": ("$(git rev-parse --show-toplevel)/tools/diff2", "tools/diff2"),
    "diff.x.textconv": ("script.py", "script.py"),
    "interactive.diffFilter": ("tools/filter", "tools/filter"),
    "merge.x.driver": ("tools/merge %O %A %B", "tools/merge"),
    "mergetool.x.cmd": ("tools/tool", "tools/tool"),
    "difftool.x.path": ("tools/difftool", "tools/difftool"),
    "alias.go": ("!tools/go.sh", "tools/go.sh"),
    "credential.helper": ("!tools/login", "tools/login"),
    "gpg.program": ("tools/gpg", "tools/gpg"),
    "gpg.ssh.defaultKeyCommand": ("tools/key", "tools/key"),
    "pager.log": ("tools/pager2", "tools/pager2"),
    "trailer.x.command": ("tools/trailer", "tools/trailer"),
    "trailer.y.cmd": ("tools/trailer2", "tools/trailer2"),
    "sendemail.smtpServer": ("tools/mail", "tools/mail"),
    "submodule.x.update": ("!tools/update", "tools/update"),
    "remote.origin.uploadpack": ("tools/upload", "tools/upload"),
    "uploadpack.packObjectsHook": ("tools/pack", "tools/pack"),
    "lfs.customtransfer.x.path": ("tools/transfer", "tools/transfer"),
    "hook.x.command": ("tools/hook", "tools/hook"),
    "filter.y.clean": ("cd tools && ./clean", "tools/clean"),
    "filter.z.clean": ("python3 -mcommon", "common.py"),
    "filter.z.smudge": ("python3 -Im 'pkg.strip' x", "pkg/strip.py"),
    "filter.z.process": ("python3 -m pkg.strip", "pkg/__init__.py"),
    "diff.y.textconv": ("$HOME/../project/tools/conv", "tools/conv"),
}
"""Settings of git, each with a value and a file that git would then run or read."""


@pytest.mark.parametrize("key", NAMED)
def test_what_the_settings_of_git_name_is_protected(root: Path, key: str) -> None:
    value, file = NAMED[key]
    (root / "tools").mkdir()
    if not value.startswith("../"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")
    workspace = DiskWorkspace(root)
    assert workspace.protection(root / file) == "none"
    git(root, "config", key, value)
    assert workspace.protection(root / file) == "ask"
    assert workspace.protection(root / "src" / "other.py") == "none"


def test_settings_of_the_user_and_of_included_files_count(root: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / ".gitconfig").write_text(f"[include]\npath = {root}/a.inc\n[core]\nhooksPath = hooks\n")
    (root / "a.inc").write_text("[include]\npath = sub/b.inc\n")
    (root / "sub").mkdir()
    (root / "sub" / "b.inc").write_text("[alias]\nx = !./run.sh\n[include]\npath = ../a.inc\n")
    (root / "run.sh").write_text("")
    workspace = DiskWorkspace(root)
    named = ("a.inc", "sub/b.inc", "run.sh", "hooks/pre-commit", "src/a.py", "sub/c.inc")
    assert [workspace.protection(root / path) for path in named] == ["ask"] * 4 + ["none"] * 2


def test_settings_in_a_dotfiles_repository_are_protected_by_the_links_to_them(root: Path, tmp_path: Path) -> None:
    for name in ("gitconfig", "bashrc", "notes"):
        (root / name).write_text("")
    (tmp_path / "home" / ".gitconfig").symlink_to(root / "gitconfig")
    (tmp_path / "home" / ".bashrc").symlink_to(root / "bashrc")
    (root / ".envrc").symlink_to("env")
    workspace = DiskWorkspace(root)
    assert [workspace.protection(root / name) for name in ("gitconfig", "bashrc", "env", "notes")] == [
        *("ask", "ask", "ask", "none")
    ]


def test_hooks_behind_links_are_protected(root: Path) -> None:
    (root / "scripts").mkdir()
    (root / "scripts" / "check.sh").write_text("")
    (root / ".git" / "hooks" / "pre-push").symlink_to("../../scripts/check.sh")
    workspace = DiskWorkspace(root)
    assert workspace.protection(root / "scripts" / "check.sh") == "ask"
    assert workspace.protection(root / "scripts" / "other.sh") == "none"
    for hook in (root / ".git" / "hooks").iterdir():
        hook.unlink()
    (root / ".git" / "hooks").rmdir()
    (root / ".git" / "hooks").symlink_to("../scripts")
    assert workspace.protection(root / "scripts" / "other.sh") == "ask"


def test_every_link_on_the_way_to_a_hook_is_protected(root: Path) -> None:
    (root / "scripts").mkdir()
    (root / "real").mkdir()
    (root / "scripts" / "check").symlink_to("../real/check.sh")
    (root / "way").symlink_to("scripts")
    (root / ".git" / "hooks" / "pre-push").symlink_to("../../way/check")
    named = GitFiles().named_around(str(root / "a"), [str(root)])
    assert {str(root / name) for name in ("way", "scripts/check", "real/check.sh")} <= named


def test_scripts_and_modules_that_hooks_call_are_protected(root: Path) -> None:
    (root / "scripts").mkdir()
    for name in ("scripts/lint.sh", "scripts/data.txt", "notes.md", "run"):
        (root / name).write_text("")
    (root / "run").chmod(0o755)
    lines = ("#!/bin/sh", "# see notes.md", "exec python3 -mpre_commit hook", "./run <scripts/data.txt")
    (root / ".git" / "hooks" / "pre-commit").write_text("\n".join((*lines, "sh scripts/lint.sh notes.md", "")))
    workspace = DiskWorkspace(root)
    named = ("scripts/lint.sh", "run", "pre_commit.py", "pre_commit/__init__.py")
    others = ("scripts/data.txt", "notes.md", "src/pre_commit.py")
    assert [path for path in (*named, *others) if workspace.protection(root / path) == "ask"] == [*named]


def test_hooks_beside_the_sources_are_protected_by_their_names(root: Path) -> None:
    git(root, "config", "core.hooksPath", ".")
    workspace = DiskWorkspace(root)
    assert [workspace.protection(root / name) for name in ("pre-commit", "update", "main.py")] == ["ask", "ask", "none"]


def test_a_git_file_that_points_elsewhere_protects_what_it_points_to(root: Path) -> None:
    (root / "tree").mkdir()
    git(root, "init", "--quiet", "--separate-git-dir", str(root / "store"), str(root / "tree"))
    (root / "store" / "rebase-merge").mkdir()
    workspace = DiskWorkspace(root)
    for name in ("store/config", "store/rebase-merge/git-rebase-todo", "store/anything", "store/modules/a/config"):
        assert workspace.protection(root / name) == "ask", name
    assert workspace.protection(root / "tree" / "a.py") == "none"


def test_settings_of_submodules_and_worktrees_count(root: Path, tmp_path: Path) -> None:
    git(root, "commit", "--quiet", "--allow-empty", "-m", "first")
    git(root, "submodule", "--quiet", "add", str(root), "parts/inner")
    git(root / "parts" / "inner", "config", "core.hooksPath", "../../shared-hooks")
    git(root, "config", "extensions.worktreeConfig", "true")
    git(root, "worktree", "add", "--quiet", str(tmp_path / "second"))
    git(tmp_path / "second", "config", "--worktree", "core.fsmonitor", str(root / "watch"))
    workspace = DiskWorkspace(root)
    assert workspace.protection(root / "shared-hooks" / "pre-commit") == "ask"
    assert workspace.protection(root / "watch") == "ask"


def test_a_neighbour_repository_can_name_files_too(root: Path) -> None:
    inner = root / "a" / "b" / "c" / "inner"
    inner.mkdir(parents=True)
    workspace = DiskWorkspace(root)
    assert workspace.protection(root / "src" / "pre-commit") == "none"
    git(inner, "init", "--quiet")
    git(inner, "config", "core.hooksPath", str(root / "src"))
    assert workspace.protection(root / "src" / "pre-commit") == "ask"


def test_values_that_name_no_program_protect_nothing(root: Path) -> None:
    for folder in ("docs", "cache", "code", "vim"):
        (root / folder).mkdir()
    (root / "main").write_text("")
    (root / ".git" / "config").write_text(
        '[user]\nname = docs\n[branch "docs"]\nremote = main\n[remote "main"]\nurl = ../main\n'
        "[alias]\nst = status docs/x\nlg = !git log docs/\n[core]\npager = less -R\neditor = code --wait\n"
        '[credential]\nhelper = cache\n[mergetool "code"]\npath = code\n[difftool "vim"]\ncmd = vim -d\n'
        "[init]\ndefaultBranch = main\n[core]\nhooksPath = /dev/null\n"
    )
    workspace = DiskWorkspace(root)
    free = ("docs/x", "main", "less", "cache/a", "code/a.py", "vim/a")
    assert [path for path in free if workspace.protection(root / path) != "none"] == []


def test_settings_that_name_everything_protect_no_workspace(root: Path) -> None:
    (root / ".git" / "config").write_text(f"[core]\neditor = / {root} .. .\n[init]\ntemplateDir = /\n")
    assert DiskWorkspace(root).protection(root / "src" / "a.py") == "none"


def test_nothing_is_run_and_nothing_hangs(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / ".git" / "config").write_text(
        "[include]\npath = ../pipe\npath = /dev/zero\npath = ../missing\npath = \0\n[core]\nfsmonitor = touch ran\n"
        "pager = touch ran\n[alias]\nconfig = !touch ran\n"
    )
    (root / "tree").mkdir()
    os.mkfifo(root / "tree" / ".git")
    GitFiles().named_around(str(root / "a" / "b"), [str(root)])
    assert find_repository(str(root / "tree")) is None
    assert not (root / "ran").exists()


def test_a_chain_of_includes_is_followed_only_so_far(root: Path) -> None:
    for number in range(200):
        (root / f"{number}.inc").write_text(f"[include]\npath = {number + 1}.inc\n")
    git(root, "config", "include.path", "../0.inc")
    assert 30 < len(GitFiles().named_around(str(root / "a"), [str(root)])) < 80


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("git-rebase-todo", b"pick 1 a\nfixup 2 b\nlabel x\n# exec no\n", set()),
        ("git-rebase-todo", b"pick 1 a\nexec make\n", {b"exec make"}),
        ("git-rebase-todo", b"  x touch a\r\npick exec a\n", {b"x touch a"}),
        ("git-rebase-todo", b"executive\nxylophone\n", set()),
        ("git-rebase-todo", None, {b"?"}),
        ("strategy", b"ort\n", set()),
        ("strategy", b"../../evil\n", {b"../../evil"}),
        ("opts", b"[options]\n\tstrategy = ort\n\tedit = true\n", set()),
        ("opts", b"[options]\n\tStrategy = ../evil\n", {b"../evil"}),
    ],
)
def test_lines_that_git_would_run_later_are_found(name: str, content: bytes | None, found: set[bytes]) -> None:
    assert commands_in(name, content) == found

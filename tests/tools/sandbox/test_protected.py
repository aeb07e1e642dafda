"""Protected files are put back after a command has changed them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crow.domain.protected_names import ProtectedNames
from crow.tools.sandbox import protected, scan
from crow.tools.sandbox.protected import ProtectedFiles
from crow.tools.trees import remove_tree
from tests.tools.conftest import nest
from tests.tools.layers.trees import as_nobody

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
posix_only = pytest.mark.skipif(os.name == "nt", reason="needs links and modes")
GIT = {name: os.environ[name] for name in ("PATH",)} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a commit and protected files."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet")
    (root / "AGENTS.md").write_text("be kind\n")
    (root / ".vscode").mkdir()
    (root / ".vscode" / "tasks.json").write_text("{}")
    (root / "src").mkdir()
    (root / "src" / "main.c").write_text("int main;")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def git(cwd: Path, *arguments: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    found = subprocess.run(["git", *who, *arguments], cwd=cwd, env=GIT, check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout


def after(root: Path, kept: Path, change: Callable[[], object], *, only_created: bool = False) -> tuple[str, ...]:
    """What `put_back` reports after a change."""
    files = ProtectedFiles([root], kept)
    snapshot = files.snapshot()
    change()
    return files.put_back(snapshot, only_created=only_created)


def test_a_changed_file_gets_its_content_and_mode_back_and_the_new_content_is_kept(root: Path, kept: Path) -> None:
    config = root / ".git" / "config"
    config.chmod(0o640)
    before = config.read_bytes()

    said = after(root, kept, lambda: config.write_text("[core]\n\tfsmonitor = evil\n"))

    new = kept / ".git" / "config"
    assert said == (f"the command changed .git/config; the former content was put back; the new one is in {new}",)
    assert (config.read_bytes(), config.stat().st_mode & 0o777) == (before, 0o640)
    assert (kept / ".git" / "config").read_text() == "[core]\n\tfsmonitor = evil\n"


def test_created_files_and_folders_are_moved_away_whole(root: Path, kept: Path) -> None:
    def change() -> None:
        (root / ".git" / "hooks" / "post-index-change").write_text("evil")
        (root / "src" / ".envrc").write_text("evil")
        (root / ".husky" / "_").mkdir(parents=True)
        (root / ".husky" / "_" / "pre-commit").write_text("evil")

    said = after(root, kept, change)

    assert said == (
        f"the command created .git/hooks/post-index-change; it was moved to {kept / '.git/hooks/post-index-change'}",
        f"the command created .husky; it was moved to {kept / '.husky'}",
        f"the command created src/.envrc; it was moved to {kept / 'src/.envrc'}",
    )
    assert not (root / ".git" / "hooks" / "post-index-change").exists()
    assert not (root / ".husky").exists()
    assert not (root / "src" / ".envrc").exists()
    assert (kept / ".husky" / "_" / "pre-commit").read_text() == "evil"


@posix_only
def test_removed_files_folders_and_links_are_made_again(root: Path, kept: Path) -> None:
    (root / "CLAUDE.md").symlink_to("AGENTS.md")

    def change() -> None:
        shutil.rmtree(root / ".vscode")
        (root / "CLAUDE.md").unlink()

    said = after(root, kept, change)

    assert said == (
        "the command removed .vscode; it was put back",
        "the command removed .vscode/tasks.json; it was put back",
        "the command removed CLAUDE.md; it was put back",
    )
    assert (root / ".vscode" / "tasks.json").read_text() == "{}"
    assert (root / "CLAUDE.md").readlink() == Path("AGENTS.md")


@posix_only
def test_links_in_place_of_files_and_files_in_place_of_folders_are_replaced(
    root: Path, kept: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")

    def change() -> None:
        (root / "AGENTS.md").unlink()
        (root / "AGENTS.md").symlink_to(secret)
        shutil.rmtree(root / ".vscode")
        (root / ".vscode").symlink_to(tmp_path)

    after(root, kept, change)

    assert (root / "AGENTS.md").read_text() == "be kind\n"
    assert not (root / "AGENTS.md").is_symlink()
    assert (root / ".vscode" / "tasks.json").read_text() == "{}"
    assert not (root / ".vscode").is_symlink()
    assert secret.read_text() == "mine"
    assert not (tmp_path / "tasks.json").exists()
    assert (kept / "AGENTS.md").readlink() == secret


def test_what_was_moved_away_before_never_stops_the_next_move(root: Path, kept: Path) -> None:
    folder, name = root / ".claude", "x" * 255
    folder.mkdir()

    def replace_folder() -> None:
        folder.rmdir()
        folder.write_text("a file in its place")

    assert len(after(root, kept, replace_folder)) == 1
    for number in (2, 3):
        said = after(root, kept, lambda: (folder / name).write_text("evil"))
        place = kept / str(number) / ".claude" / name
        assert said == (f"the command created .claude/{name}; it was moved to {place}",)
    assert os.listdir(folder) == []


@posix_only
def test_modes_are_put_back_and_folders_that_a_command_closed_are_searched(root: Path, kept: Path) -> None:
    hook = root / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)

    def change() -> None:
        hook.chmod(0o644)
        (root / "src" / ".git").mkdir()
        (root / "src").chmod(0o300)

    said = after(root, kept, change)

    assert "the command changed the mode of .git/hooks/pre-commit; the former mode was put back" in said
    assert hook.stat().st_mode & 0o777 == 0o755
    assert not (root / "src" / ".git").exists()


def test_a_renamed_repository_comes_back_and_its_replacement_is_kept(root: Path, kept: Path) -> None:
    def change() -> None:
        (root / ".git").rename(root / "src" / "old")
        (root / ".git").mkdir()
        (root / ".git" / "config").write_text("evil")
        (root / ".git" / "HEAD").write_text("ref: refs/heads/main")

    said = after(root, kept, change)

    assert said == ("the command moved .git to src/old; it was moved back",)
    assert git(root, "log", "--format=%s") == "first\n"
    assert git(root, "status", "--short") == ""
    assert (kept / ".git" / "config").read_text() == "evil"


def test_a_repository_that_a_command_creates_is_disarmed(root: Path, kept: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    (plain / "config").mkdir(parents=True)
    (plain / "config" / "app.toml").write_text("mine")

    def change() -> None:
        git(plain, "init", "--quiet", "inner")
        (plain / "HEAD").write_text("ref: refs/heads/main")
        (plain / "objects").mkdir()
        (plain / "refs").mkdir()

    said = after(plain, kept, change)

    assert said == (
        f"the command created HEAD; it was moved to {kept / 'HEAD'}",
        f"the command created inner/.git; it was moved to {kept / 'inner/.git'}",
    )
    assert (plain / "config" / "app.toml").read_text() == "mine"
    found = subprocess.run(["git", "rev-parse", "--git-dir"], cwd=plain / "inner", env=GIT, capture_output=True)
    assert found.returncode != 0


def test_parts_that_complete_a_repository_beside_a_head_file_are_moved_away(kept: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "HEAD").write_text("ref: refs/heads/main")

    def change() -> None:
        (plain / "config").write_text("[core]\n\tworktree = .\n")
        (plain / "objects").mkdir()
        (plain / "refs").mkdir()

    assert len(after(plain, kept, change)) == 3
    assert os.listdir(plain) == ["HEAD"]


def test_ordinary_git_commands_change_nothing_that_is_watched(root: Path, kept: Path) -> None:
    def change() -> None:
        (root / "src" / "main.c").write_text("int main, x;")
        git(root, "stash", "--quiet")
        git(root, "stash", "pop", "--quiet")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", "second")
        git(root, "checkout", "--quiet", "-b", "topic")
        git(root, "tag", "v1")
        git(root, "pack-refs", "--all")
        git(root, "repack", "-d", "--quiet", "-n")
        git(root, "gc", "--quiet")
        git(root, "update-server-info")

    assert after(root, kept, change) == ()
    assert (root / ".git" / "info" / "refs").exists()
    assert git(root, "log", "--format=%s") == "second\nfirst\n"


@pytest.mark.parametrize("change", ["remove", "link", "files"])
def test_the_info_folder_of_a_repository_comes_back(root: Path, kept: Path, change: str) -> None:
    info, evil = root / ".git" / "info", root / "evil"

    def attack() -> None:
        if change == "files":
            (info / "attributes").write_text("* filter=evil")
            (info / "exclude").write_text("AGENTS.md")
        else:
            info.rename(evil)
        if change == "link":
            info.symlink_to(evil)

    before = (info / "exclude").read_bytes()
    assert after(root, kept, attack)
    assert not info.is_symlink()
    assert os.listdir(info) == ["exclude"]
    assert (info / "exclude").read_bytes() == before


def test_the_common_directory_of_a_linked_worktree_is_watched_as_a_root(root: Path, kept: Path, tmp_path: Path) -> None:
    git(root, "worktree", "add", "--quiet", str(tmp_path / "linked"))
    linked, common = tmp_path / "linked", root / ".git"
    files = ProtectedFiles([linked, common], kept)
    snapshot = files.snapshot()
    before = (common / "config").read_bytes()

    (common / "config").write_text("evil")
    (common / "hooks" / "pre-push").write_text("evil")
    (linked / ".git").write_text("gitdir: /elsewhere")
    git_dir = common / "worktrees" / "linked" / "commondir"
    git_dir.write_text("/elsewhere")
    said = files.put_back(snapshot)

    assert len(said) == 4
    assert ((common / "config").read_bytes(), git_dir.read_text()) == (before, "../..\n")
    (linked / "new").write_text("new")
    snapshot = files.snapshot()
    git(linked, "add", "new")
    git(linked, "commit", "--quiet", "-m", "from the worktree")
    assert files.put_back(snapshot) == ()


def test_only_created_leaves_changed_and_removed_files_alone(root: Path, kept: Path) -> None:
    def change() -> None:
        (root / "AGENTS.md").write_text("changed in the editor")
        (root / ".vscode" / "tasks.json").unlink()
        (root / ".mcp.json").write_text("{}")

    said = after(root, kept, change, only_created=True)

    assert said == (f"the command created .mcp.json; it was moved to {kept / '.mcp.json'}",)
    assert (root / "AGENTS.md").read_text() == "changed in the editor"
    assert not (root / ".vscode" / "tasks.json").exists()


def test_a_second_command_does_not_take_the_changes_of_the_first_for_the_former_state(root: Path, kept: Path) -> None:
    files = ProtectedFiles([root], kept)
    first = files.snapshot()
    (root / "AGENTS.md").write_text("evil")
    second = files.snapshot()
    files.put_back(first)
    files.put_back(second)
    assert (root / "AGENTS.md").read_text() == "be kind\n"

    (root / "AGENTS.md").write_text("changed by the user between two commands")
    assert files.put_back(files.snapshot()) == ()


def test_accepted_changes_stay(root: Path, kept: Path) -> None:
    files = ProtectedFiles([root], kept)
    snapshot = files.snapshot()
    (root / "AGENTS.md").write_text("allowed by the user")
    (root / ".zed").mkdir()
    (root / ".zed" / "settings.json").write_text("{}")
    (root / ".mcp.json").write_text("{}")
    files.accept(root / "AGENTS.md")
    files.accept(root / ".zed" / "settings.json")

    assert files.put_back(snapshot) == (f"the command created .mcp.json; it was moved to {kept / '.mcp.json'}",)
    assert (root / "AGENTS.md").read_text() == "allowed by the user"
    assert (root / ".zed" / "settings.json").read_text() == "{}"


def test_a_change_that_keeps_size_and_times_is_seen(root: Path, kept: Path) -> None:
    path = root / "AGENTS.md"
    before = path.stat()

    def change() -> None:
        path.write_text("be evil"[:7] + "\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert len(after(root, kept, change)) == 1
    assert path.read_text() == "be kind\n"


def test_a_large_file_is_reported_but_not_put_back(root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = root / ".idea"
    large.write_bytes(b"x" * (scan.FILE_BYTES + 1))

    def change() -> None:
        with large.open("ab") as file:
            file.write(b"y")

    assert after(root, kept, change) == (
        "the command changed .idea; it is too large to be put back, so check it yourself",
    )


@posix_only
def test_pipes_sockets_and_links_to_folders_hang_and_lead_nowhere(root: Path, kept: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / ".vscode").mkdir(parents=True)

    def change() -> None:
        os.mkfifo(root / ".envrc")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(root / ".netrc"))
        (root / "link").symlink_to(outside)

    assert len(after(root, kept, change)) == 2
    assert (outside / ".vscode").is_dir()
    assert not (root / ".envrc").exists()


@posix_only
def test_a_folder_that_became_a_link_leads_no_write_outside(root: Path, kept: Path, tmp_path: Path) -> None:
    (root / "src" / "AGENTS.md").write_text("inner")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "AGENTS.md").write_text("another project's")

    def change() -> None:
        (root / "src").rename(root / "moved")
        (root / "src").symlink_to(outside)

    said = after(root, kept, change)

    assert (outside / "AGENTS.md").read_text() == "another project's"
    assert any("src/AGENTS.md" in sentence and "could not be put back" in sentence for sentence in said)


@posix_only
def test_kept_files_go_to_another_file_system_without_following_links(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = tmp_path_factory.mktemp("other") / "kept"
    if kept.parent.stat().st_dev == root.stat().st_dev:
        pytest.skip("needs two file systems")

    def change() -> None:
        (root / ".husky").mkdir()
        (root / ".husky" / "hook").write_text("evil")
        (root / ".husky" / "link").symlink_to("/etc")
        os.mkfifo(root / ".husky" / "pipe")

    assert len(after(root, kept, change)) == 1
    assert (kept / ".husky" / "hook").read_text() == "evil"
    assert (kept / ".husky" / "link").readlink() == Path("/etc")
    assert not (root / ".husky").exists()


def test_names_are_compared_as_lenient_file_systems_do_and_shown_without_control_characters(
    root: Path, kept: Path
) -> None:
    def change() -> None:
        (root / ".ENVRC").write_text("evil")
        (root / "AGENTS.md\u200b").write_text("evil")

    said = after(root, kept, change)

    assert len(said) == 2
    assert said[1].startswith(r"the command created AGENTS.md\u200b; ")


def test_a_file_that_keeps_changing_is_put_back_once_it_stops(root: Path, kept: Path) -> None:
    files, stop = ProtectedFiles([root], kept), threading.Event()
    snapshot = files.snapshot()

    def keep_writing() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            (root / "AGENTS.md").write_text(f"evil {number}")

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        files.put_back(snapshot)
    finally:
        stop.set()
        writer.join()
    files.put_back(snapshot)
    assert (root / "AGENTS.md").read_text() == "be kind\n"


def test_folders_of_submodules_that_are_nested_very_deeply_do_not_keep_files_from_being_put_back(
    root: Path, kept: Path
) -> None:
    (root / ".git" / "modules").mkdir()
    nest(root / ".git" / "modules")
    try:
        after(root, kept, lambda: (root / "AGENTS.md").unlink())
        assert (root / "AGENTS.md").read_text() == "be kind\n"
    finally:
        remove_tree(root / ".git" / "modules")  # pytest cannot


@linux_only
def test_nested_folders_are_moved_even_to_another_file_system(root: Path) -> None:
    def change() -> None:
        (root / ".idea").mkdir()
        nest(root / ".idea")
        (root / "AGENTS.md").write_text("be evil")

    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory(dir="/tmp") as other:
        kept = Path(other if root.stat().st_dev == os.stat(one).st_dev else one)
        assert kept.stat().st_dev != root.stat().st_dev
        said = after(root, kept, change)
        assert said[0] == f"the command created .idea; it was moved to {kept}/.idea"
        assert (kept / ".idea" / "d" / "d").is_dir()
    assert not (root / ".idea").exists()
    assert (root / "AGENTS.md").read_text() == "be kind\n"


@linux_only
def test_a_changed_file_that_nobody_may_read_is_put_back(tmp_path: Path) -> None:
    def scenario(directory: Path) -> list[Any]:
        file = directory / "project" / "AGENTS.md"
        file.parent.mkdir()
        file.write_text("be kind\n")
        file.chmod(0o640)

        def change() -> None:
            file.write_text("be evil")
            file.chmod(0)

        said = after(file.parent, directory / "kept", change)
        texts = [path.read_text() for path in (file, directory / "kept" / "AGENTS.md")]
        return [len(said), *texts, file.stat().st_mode & 0o777]

    found = as_nobody(scenario) if os.geteuid() == 0 else scenario(tmp_path)
    assert found == [1, "be kind\n", "be evil", 0o640]


def test_dependencies_are_not_watched(root: Path, kept: Path) -> None:
    def change() -> None:
        (root / "node_modules" / "left-pad" / ".vscode").mkdir(parents=True)
        (root / "node_modules" / "left-pad" / "AGENTS.md").write_text("read me")

    assert after(root, kept, change) == ()
    assert (root / "node_modules" / "left-pad" / "AGENTS.md").exists()


def test_new_folders_do_not_push_protected_files_out_of_sight(
    root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_FOLDERS", 3)
    monkeypatch.setattr(scan, "_MAX_ENTRIES", 30)
    (root / "src" / "AGENTS.md").write_text("inner")
    (root / "src" / ".envrc").write_text("mine")

    def change() -> None:
        for number in range(10):
            (root / f"a{number}" / ".vscode").mkdir(parents=True)
        (root / "src" / "AGENTS.md").write_text("evil")

    said = after(root, kept, change)

    assert [sentence for sentence in said if "src" in sentence] == [
        f"the command changed src/AGENTS.md; the former content was put back; the new one is in {kept}/src/AGENTS.md"
    ]
    assert (root / "src" / "AGENTS.md").read_text() == "inner"


NAMED_BY_GIT = {
    "hooks in a folder of their own": ("core.hooksPath", "tools/hooks", "tools/hooks/pre-commit"),
    "hooks beside the sources": ("core.hooksPath", ".", "pre-commit"),
    "an included file": ("include.path", "../shared.inc", "shared.inc"),
    "a filter": ("filter.x.clean", "python tools/clean.py", "tools/clean.py"),
    "an alias": ("alias.go", "!tools/go.sh", "tools/go.sh"),
    "a monitor": ("core.fsmonitor", "./watch", "watch"),
}


@pytest.mark.parametrize("what", NAMED_BY_GIT)
@pytest.mark.parametrize("exists", [True, False])
def test_what_git_would_run_is_put_back(root: Path, kept: Path, what: str, exists: bool) -> None:
    key, value, file = NAMED_BY_GIT[what]
    git(root, "config", key, value)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    if exists:
        (root / file).write_text("good")
    sentences = after(root, kept, lambda: (root / file).write_text("evil"))
    assert len(sentences) == 1
    assert ((root / file).read_text() if exists else os.path.lexists(root / file)) == ("good" if exists else False)


@posix_only
def test_what_links_with_protected_names_lead_to_is_put_back(root: Path, kept: Path) -> None:
    (root / "scripts").mkdir()
    for name in ("check.sh", "env", "other"):
        (root / "scripts" / name).write_text("good")
    (root / ".git" / "hooks" / "pre-push").symlink_to("../../scripts/check.sh")
    (root / ".envrc").symlink_to("scripts/env")

    def change() -> None:
        for name in ("check.sh", "env", "other"):
            (root / "scripts" / name).write_text("evil")

    assert len(after(root, kept, change)) == 2
    assert [(root / "scripts" / name).read_text() for name in ("check.sh", "env", "other")] == ["good", "good", "evil"]


UNFINISHED = {
    "todo": ("rebase-merge/git-rebase-todo", "pick 1 a\nexec touch ran\n"),
    "strategy": ("rebase-merge/strategy", "../../evil\n"),
    "options": ("sequencer/opts", "[options]\n\tstrategy = ../../evil\n"),
    "remote": ("remotes/origin", "URL: ext::sh -c ./evil\n"),
}


@pytest.mark.parametrize("what", UNFINISHED)
def test_commands_planted_in_an_unfinished_rebase_are_moved_away(root: Path, kept: Path, what: str) -> None:
    name, content = UNFINISHED[what]
    file = root / ".git" / name

    def plant() -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)

    sentences = after(root, kept, plant, only_created=True)
    assert [f"the command created .git/{name}; it was moved to" in sentence for sentence in sentences] == [True]
    assert not file.exists()
    assert (kept / ".git" / name).read_text() == content


def test_a_rebase_of_the_user_goes_on_but_gets_no_new_commands(root: Path, kept: Path) -> None:
    for number in range(3):
        (root / "src" / "main.c").write_text(f"int main{number};")
        git(root, "commit", "--quiet", "-am", f"change {number}")
    with pytest.raises(subprocess.CalledProcessError):
        git(root, "rebase", "--quiet", "--exec", "false", "HEAD~2")
    todo = root / ".git" / "rebase-merge" / "git-rebase-todo"
    assert "exec false" in todo.read_text()
    before = todo.read_text()
    planted = after(root, kept, lambda: todo.write_text(f"exec touch ran\n{before}"), only_created=True)
    assert len(planted) == 1
    assert todo.read_text() == before
    assert after(root, kept, lambda: todo.write_text("noop\n")) == ()
    assert after(root, kept, lambda: git(root, "rebase", "--continue"), only_created=True) == ()
    assert not todo.parent.exists()


def test_a_conflict_in_a_rebase_leaves_the_rebase_as_it_is(root: Path, kept: Path) -> None:
    git(root, "branch", "other")
    (root / "src" / "main.c").write_text("int ours;")
    git(root, "commit", "--quiet", "-am", "ours")
    git(root, "checkout", "--quiet", "other")
    (root / "src" / "main.c").write_text("int theirs;")
    git(root, "commit", "--quiet", "-am", "theirs")

    def rebase() -> None:
        with pytest.raises(subprocess.CalledProcessError):
            git(root, "rebase", "--quiet", "-")

    assert after(root, kept, rebase) == ()
    assert (root / ".git" / "rebase-merge").is_dir()
    assert after(root, kept, lambda: git(root, "rebase", "--abort")) == ()


def test_files_that_the_user_protects_are_put_back_and_others_are_left(root: Path, kept: Path) -> None:
    (root / "deploy").mkdir()
    files = ProtectedFiles([root], kept, ProtectedNames(["deploy/*.sh"], [".vscode"]))
    snapshot = files.snapshot()
    (root / "deploy" / "run.sh").write_text("evil")
    (root / "deploy" / "notes.md").write_text("fine")
    (root / ".vscode" / "tasks.json").write_text("{1}")
    assert len(files.put_back(snapshot)) == 1
    assert os.listdir(root / "deploy") == ["notes.md"]
    assert (root / ".vscode" / "tasks.json").read_text() == "{1}"


def test_what_package_managers_keep_in_protected_folders_is_left_alone(root: Path, kept: Path) -> None:
    for name in (".yarn/cache", ".yarn/releases", ".claude/worktrees/x"):
        (root / name).mkdir(parents=True)

    def change() -> None:
        (root / ".yarn" / "cache" / "a.zip").write_text("data")
        (root / ".yarn" / "install-state.gz").write_text("data")
        (root / ".claude" / "worktrees" / "x" / "a.py").write_text("x = 1")
        (root / ".yarn" / "releases" / "yarn.cjs").write_text("evil")
        (root / ".claude" / "worktrees" / "x" / ".envrc").write_text("evil")

    assert len(after(root, kept, change)) == 2
    assert os.listdir(root / ".yarn" / "releases") == []
    assert os.listdir(root / ".claude" / "worktrees" / "x") == ["a.py"]
    assert sorted(os.listdir(root / ".yarn")) == ["cache", "install-state.gz", "releases"]


def test_a_check_undoes_what_two_checks_have_seen(root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protected, "_CHECK_SHARE", 0)
    files = ProtectedFiles([root], kept)
    snapshot = files.snapshot()
    (root / ".envrc").write_text("evil")
    (root / "AGENTS.md").write_text("evil")
    assert files.check(snapshot) == ()
    assert (root / ".envrc").exists()
    (root / ".npmrc").write_text("for a moment")
    assert len(files.check(snapshot)) == 2
    assert (os.path.lexists(root / ".envrc"), (root / "AGENTS.md").read_text()) == (False, "be kind\n")
    (root / ".npmrc").unlink()
    (root / ".envrc").write_text("evil again")
    assert len(files.check(snapshot)) == 1, "a path that was changed once is undone at once"
    assert files.put_back(snapshot) == ()


@posix_only
@pytest.mark.parametrize("only_created", [True, False])
def test_links_on_the_way_to_what_git_runs_stay(root: Path, kept: Path, only_created: bool) -> None:
    (root / "real" / "hooks").mkdir(parents=True)
    (root / "real" / "hooks" / "pre-commit").write_text("good")
    (root / "tools").symlink_to("real")
    git(root, "config", "core.hooksPath", "tools/hooks")

    def change() -> None:
        (root / "tools").unlink()
        (root / "tools" / "hooks").mkdir(parents=True)
        (root / "tools" / "hooks" / "pre-commit").write_text("evil")

    assert len(after(root, kept, change, only_created=only_created)) == 1
    assert os.readlink(root / "tools") == "real"
    assert (root / "tools" / "hooks" / "pre-commit").read_text() == "good"


@posix_only
def test_a_link_in_place_of_the_steps_of_a_rebase_is_moved_away(root: Path, kept: Path) -> None:
    (root / ".git" / "rebase-merge").mkdir()
    todo = root / ".git" / "rebase-merge" / "git-rebase-todo"
    todo.write_text("pick 1 a\n")

    def change() -> None:
        (root / "steps").write_text("exec touch ran\n")
        todo.unlink()
        todo.symlink_to("../../steps")

    assert len(after(root, kept, change, only_created=True)) == 1
    assert not os.path.lexists(todo)


@posix_only
@pytest.mark.parametrize("only_created", [True, False])
def test_a_new_repository_or_link_takes_nothing_else_with_it(root: Path, kept: Path, only_created: bool) -> None:
    def change() -> None:
        git(root, "init", "--quiet", "sub")
        git(root / "sub", "config", "core.hooksPath", str(root / "src"))
        (root / ".envrc").symlink_to("src")
        (root / "src" / "new.c").write_text("int new;")

    assert len(after(root, kept, change, only_created=only_created)) == 2
    assert sorted(os.listdir(root / "src")) == ["main.c", "new.c"]
    assert os.listdir(root / "sub") == []
    assert not os.path.lexists(root / ".envrc")


@posix_only
def test_a_protected_file_comes_back_if_it_was_changed_by_its_other_name(root: Path, kept: Path) -> None:
    os.link(root / "AGENTS.md", root / "notes")
    assert len(after(root, kept, lambda: (root / "notes").write_text("evil"), only_created=True)) == 1
    assert (root / "AGENTS.md").read_text() == "be kind\n"


def test_what_the_user_lets_git_run_from_now_on_stays(root: Path, kept: Path) -> None:
    files = ProtectedFiles([root], kept)
    snapshot = files.snapshot()
    git(root, "config", "core.hooksPath", "src")
    files.accept(root / ".git" / "config")
    assert files.put_back(snapshot) == ()
    assert os.listdir(root / "src") == ["main.c"]

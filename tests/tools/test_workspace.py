from __future__ import annotations

import os
import stat
from pathlib import Path

import anyio
import pytest

from crow.domain.errors import ArgumentError
from crow.tools import FileStat
from crow.tools.process import HiddenKeys
from crow.tools.protection import is_protected
from crow.tools.workspace import DiskWorkspace
from tests.tools.conftest import skip_time, until_gone


async def unwatched(_text: str) -> None: ...


def test_paths_are_checked_after_resolving_links_and_dots_even_if_missing(tmp_path: Path, root: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "in").symlink_to(root)
    (root / "dangling").symlink_to(tmp_path / "outside" / "not-yet")
    (tmp_path / "also").mkdir()
    (tmp_path / "project-2").mkdir()
    workspace = DiskWorkspace(root, [tmp_path / "also"])
    planned = {
        name: workspace.contains(workspace.resolve(name))
        for name in (
            ".",
            "new/deep/file",
            "in/in/file",
            "out/file",
            "dangling",
            "../escape",
            "new/../../escape",
            str(tmp_path / "also" / "x"),
            str(tmp_path / "project-2"),
            "~/file",
            "/",
        )
    }
    assert planned == {
        ".": True,
        "new/deep/file": True,
        "in/in/file": True,
        "out/file": False,
        "dangling": False,
        "../escape": False,
        "new/../../escape": False,
        str(tmp_path / "also" / "x"): True,
        str(tmp_path / "project-2"): False,
        "~/file": True,
        "/": False,
    }
    assert workspace.resolve("out/new/file") == tmp_path / "outside" / "new" / "file"


NFC, NFD = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}"


@pytest.mark.parametrize(("on_disk", "asked"), [(NFC, NFD), (NFD, NFC)])
def test_a_name_in_another_normalization_form_leads_to_the_one_that_exists(
    root: Path, on_disk: str, asked: str
) -> None:
    (root / on_disk / "new").mkdir(parents=True)
    (root / on_disk / "new" / f"{on_disk}.txt").touch()
    workspace = DiskWorkspace(root)
    assert workspace.resolve(f"{asked}/new/{asked}.txt") == root / on_disk / "new" / f"{on_disk}.txt"
    assert workspace.resolve(f"{asked}/{asked}/x") == root / on_disk / asked / "x"
    assert workspace.resolve(f"{asked}.md") == root / f"{asked}.md"


def test_of_several_names_that_are_the_same_none_is_chosen(root: Path) -> None:
    # Angstrom sign and A with ring; the third form is decomposed.
    for name in ("\u212b", "A\u030a"):
        (root / name).touch()
    workspace = DiskWorkspace(root)
    assert workspace.resolve("\u00c5") == root / "\u00c5"
    assert workspace.resolve("A\u030a") == root / "A\u030a"
    (root / "\u212b").unlink()
    assert workspace.resolve("\u00c5") == root / "A\u030a"


def test_the_real_path_behind_another_normalization_form_is_judged(tmp_path: Path, root: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / ".git").mkdir()
    (root / NFD).symlink_to(tmp_path / "outside")
    (root / f"{NFD}-git").symlink_to(".git")
    (root / "\u212aEY").touch()
    workspace = DiskWorkspace(root)
    assert workspace.resolve(f"{NFC}/file") == tmp_path / "outside" / "file"
    assert not workspace.contains(workspace.resolve(f"{NFC}/file"))
    assert workspace.protection(workspace.resolve(f"{NFC}-git/config")) == "ask"
    assert workspace.resolve("KEY") == root / "KEY"  # the Kelvin sign is no other spelling of a plain name


def test_names_that_lead_to_each_other_end(root: Path) -> None:
    (root / "a").mkdir()
    (root / NFD).symlink_to(f"a/{NFC}")
    (root / "a" / NFD).symlink_to(f"../{NFC}")
    assert DiskWorkspace(root).resolve(NFC) == root / NFC


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_an_invalid_path_is_refused(root: Path, path: str) -> None:
    with pytest.raises(ArgumentError, match="expected the path of a file or directory"):
        DiskWorkspace(root).resolve(path)


async def test_no_file_is_removed_through_a_link_that_was_put_into_its_path(tmp_path: Path, root: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    workspace = DiskWorkspace(root)
    path = workspace.resolve("folder/file")
    (root / "folder").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"The path now leads elsewhere|Not a directory|Too many levels"):
        await workspace.restore(path, None)
    assert (tmp_path / "outside" / "file").exists()


async def test_no_directory_is_made_through_a_link_that_was_put_into_its_path(tmp_path: Path, root: Path) -> None:
    (tmp_path / "outside").mkdir()
    workspace = DiskWorkspace(root)
    path = workspace.resolve("folder/new/deep/file")
    (root / "folder").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"The path now leads elsewhere|Not a directory|Too many levels"):
        await workspace.write_text(path, "x")
    assert os.listdir(tmp_path / "outside") == []


async def test_no_part_of_a_key_is_left_where_the_output_of_a_program_is_cut(root: Path) -> None:
    key = "sk-0123456789abcdefghij"
    workspace = DiskWorkspace(root, keys=lambda: HiddenKeys(values=(key,)))
    done = await workspace.run_program(["printf", f"before {key}"], b"", timeout_s=60, max_bytes=24)
    assert (done.output, done.is_cut) == (b"before ", True)


async def test_stat_distinguishes_files_directories_others_and_missing_paths(root: Path) -> None:
    (root / "file").write_bytes(b"abc")
    os.mkfifo(root / "pipe")
    workspace = DiskWorkspace(root)
    kinds = {name: (await workspace.stat(root / name)).kind for name in ("file", ".", "pipe", "no", "file/below")}
    assert kinds == {"file": "file", ".": "directory", "pipe": "other", "no": "missing", "file/below": "missing"}
    found = await workspace.stat(root / "file")
    mtime_ns = (root / "file").stat().st_mtime_ns
    assert found == FileStat(path=root / "file", kind="file", size=3, mtime_ns=mtime_ns)


async def test_reading_keeps_bom_and_line_ends_and_marks_invalid_utf8(root: Path) -> None:
    (root / "file").write_bytes(b"\xef\xbb\xbfa\r\nb\xff")
    workspace = DiskWorkspace(root)
    assert await workspace.read_text(root / "file") == "\ufeffa\r\nb\ufffd"
    assert await workspace.read_bytes(root / "file", 4) == b"\xef\xbb\xbfa"


async def test_a_write_replaces_the_file_in_one_step_and_keeps_its_mode(root: Path) -> None:
    target = root / "tool.sh"
    target.write_text("old")
    target.chmod(0o750)
    before = target.stat().st_ino
    assert await DiskWorkspace(root).write_text(target, "new\r\n") == "new\r\n"
    assert target.read_bytes() == b"new\r\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    assert target.stat().st_ino != before
    assert os.listdir(root) == ["tool.sh"]


async def test_a_write_makes_directories_and_follows_a_link_to_its_file(root: Path) -> None:
    workspace = DiskWorkspace(root)
    (root / "link").symlink_to(root / "deep" / "er" / "file")
    await workspace.write_text(workspace.resolve("link"), "x")
    assert (root / "link").is_symlink()
    assert (root / "deep" / "er" / "file").read_text() == "x"


async def test_a_failed_write_leaves_no_temporary_file(root: Path) -> None:
    (root / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        await DiskWorkspace(root).write_text(root / "directory", "x")
    assert os.listdir(root) == ["directory"]


async def test_a_command_has_ordered_output_and_no_input_terminal_or_key(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OTHER", "kept")
    code, output = await DiskWorkspace(root).run(
        'echo a; echo b >&2; cat; pwd; echo "$OTHER$OPENAI_API_KEY $TERM $PAGER"; : </dev/tty; kill -9 $$',
        access="full",
        timeout_s=60,
        on_output=unwatched,
    )
    lines = output.splitlines()
    assert lines[:4] == ["a", "b", str(root), "kept dumb cat"]
    assert "/dev/tty" in lines[4]
    assert code == -9


async def test_bytes_of_a_character_that_arrive_apart_are_decoded_together(root: Path) -> None:
    async def go_on(_text: str) -> None:
        (root / "go").touch()

    command = r"printf 'x\303'; until [ -e go ]; do sleep 0.01; done; printf '\244\377\303'"
    code, output = await DiskWorkspace(root).run(command, access="full", timeout_s=60, on_output=go_on)
    assert (code, output) == (0, "xä\ufffd\ufffd")


async def test_output_is_shown_while_the_command_runs(root: Path) -> None:
    shown: list[str] = []
    first = anyio.Event()

    async def show(text: str) -> None:
        shown.append(text)
        (root / "go").touch()
        first.set()

    command = "echo one; until [ -e go ]; do sleep 0.01; done; echo two"
    code, output = await DiskWorkspace(root).run(command, access="full", timeout_s=60, on_output=show)
    assert first.is_set()
    assert shown[0] == "one\n"
    assert (code, output) == (0, "one\ntwo\n")


async def test_cancelling_a_command_ends_all_processes_it_started(root: Path) -> None:
    workspace = DiskWorkspace(root)
    pids: list[int] = []

    async def show(text: str) -> None:
        pids.extend(map(int, text.split()))
        scope.cancel()

    with anyio.CancelScope() as scope:
        await workspace.run("sleep 600 & echo $$ $!; sleep 600", access="full", timeout_s=60, on_output=show)
    assert scope.cancelled_caught
    assert len(pids) == 2
    for pid in pids:
        await until_gone(pid)
    await workspace.reap()
    assert not workspace.has_leftovers


async def test_a_program_whose_start_is_cancelled_is_ended_with_all_that_it_started(root: Path) -> None:
    """Such a program may have started others before crow knows that it runs."""
    workspace = DiskWorkspace(root)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await workspace.run_program(["sh", "-c", "sleep 600"], b"", timeout_s=600, max_bytes=10)
    assert scope.cancelled_caught
    assert workspace.has_leftovers
    pids = [process.pid for process, _ in workspace._left]
    await workspace.reap()
    await until_gone(*pids)


async def test_reap_kills_processes_that_ignore_sigterm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.workspace.TERM_S", 0.2)
    workspace = DiskWorkspace(root)
    pids: list[int] = []

    async def show(text: str) -> None:
        pids.extend(map(int, text.split()))
        scope.cancel()

    with anyio.CancelScope() as scope:
        await workspace.run(
            "trap '' TERM; sleep 600 & echo $$ $!; sleep 600", access="full", timeout_s=60, on_output=show
        )
    await workspace.reap()
    for pid in pids:
        await until_gone(pid)


async def test_a_command_that_times_out_is_ended_and_keeps_its_output(root: Path) -> None:
    pid_file = root / "pid"

    async def expire(_: str) -> None:
        skip_time(300)

    code, output = await DiskWorkspace(root).run(
        "sleep 600 & echo $! >pid; echo started; sleep 600", access="full", timeout_s=300, on_output=expire
    )
    assert (code, output) == (None, "started\n")
    await until_gone(int(pid_file.read_text()))


async def test_processes_left_in_the_background_are_ended_and_reported(root: Path) -> None:
    workspace = DiskWorkspace(root)
    code, output = await workspace.run(
        "sleep 600 >/dev/null 2>&1 & echo $!", access="full", timeout_s=60, on_output=unwatched
    )
    pid, words = output.split("\n", 1)
    assert code == 0
    assert words == "\n[background processes that the command left running were ended]\n"
    await until_gone(int(pid))
    await workspace.reap()


async def test_a_background_process_that_holds_the_output_open_delays_nothing(root: Path) -> None:
    workspace = DiskWorkspace(root)
    code, output = await workspace.run("sleep 600 & echo done", access="full", timeout_s=60, on_output=unwatched)
    assert code == 0, "not ended by the timeout"
    assert output.startswith("done\n")
    await workspace.reap()


async def test_seven_megabytes_of_output_arrive_whole(root: Path) -> None:
    code, output = await DiskWorkspace(root).run(
        "head -c 7000000 /dev/zero | tr '\\0' a", access="full", timeout_s=60, on_output=unwatched
    )
    assert code == 0
    assert output == "a" * 7_000_000


async def test_the_middle_of_very_long_output_is_replaced_by_a_marker(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.workspace.RETAINED_CHARS", 20)
    _, output = await DiskWorkspace(root).run("seq 100000", access="full", timeout_s=60, on_output=unwatched)
    assert output == "1\n2\n3\n4\n5\n\n[... 588,875 characters in 99,993 lines left out ...]\n99\n100000\n"


async def test_a_command_in_a_missing_directory_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await DiskWorkspace(tmp_path / "gone").run("true", access="full", timeout_s=60, on_output=unwatched)


@pytest.mark.parametrize(
    "path",
    [
        *(".git", ".git/config", ".git/hooks/pre-commit", "sub/.git/hooks/x.md", ".GIT/config", "a/.Git/HEAD"),
        *(".git./config", ".git /config", ".g\u200cit/config", ".git::$INDEX_ALLOCATION/config", "GIT~1/config"),
        *("\uff0egit/config", ".vscode/tasks.json", ".idea/x.xml", ".zed/tasks.json", ".envrc", "a/.envrc"),
        *(".husky/pre-commit", ".mcp.json", ".claude/settings.json", ".codex/config.toml", ".crow/skills/a/SKILL.md"),
        *(".devcontainer/devcontainer.json", "AGENTS.md", "docs/agents.md", "CLAUDE.md", ".bashrc", ".zshenv"),
        *(".ssh/authorized_keys", ".gnupg/gpg.conf", ".aws/credentials", ".netrc", "HEAD", "bare/head"),
        *("store/config", "store/hooks/post-checkout", "store/CONFIG", "store/refs/heads/x"),
        *(".npmrc", "a/.yarnrc.yml", ".yarn/releases/yarn.cjs", ".cargo/config.toml", "a/.cargo/config"),
        *(".pre-commit-config.yaml", "lefthook.yml", "my.code-workspace", "a/MY.Code-Workspace", ".gitattributes"),
        *(".gitmodules", ".mise.toml", ".tool-versions", ".bazelrc", "opencode.json", ".opencode/plugin/a.ts"),
        *(".roo/rules/a.md", ".kiro/hooks/a", ".pi/a", ".gemini/settings.json", ".cursor/rules/a", ".cursorrules"),
        *(".windsurf/a", ".github/workflows/a.yml", ".GitHub/Workflows/a.yml", ".github/copilot-instructions.md"),
        *(".claude.json", ".config/git/config", ".pnp.cjs", ".mvn/extensions.xml", "a/gradle-wrapper.properties"),
        *(".ripgreprc", "pyrightconfig.json", ".lefthook.yaml", "bunfig.toml", "lib/ruby_lsp/evil/addon.rb"),
        *(".claude/worktrees/x/.git", ".claude/worktrees/x/.vscode/tasks.json", "store/rebase-merge/git-rebase-todo"),
    ],
)
def test_paths_of_commands_agents_and_keys_are_protected(root: Path, path: str) -> None:
    (root / "store").mkdir()
    (root / "store" / "HEAD").write_text("ref: refs/heads/main\n")
    workspace = DiskWorkspace(root)
    assert is_protected(workspace.resolve(path))
    assert workspace.protection(workspace.resolve(path)) == "ask"


@pytest.mark.parametrize(
    "path",
    [
        *("src/app.py", ".gitignore", ".github/dependabot.yml", "git/config", "config/hooks/a", "package.json"),
        *("docs/agents.rst", "src/HEAD.py", "head/a.py", "store/notes.md", "my.git/x", ".env", "Makefile"),
        *("workflows/a.yml", "cargo/config.toml", ".cargo/registry/a", ".config/x", "copilot-instructions.md"),
        *(".yarn/cache/a.zip", ".claude/worktrees/x/src/a.py", "npmrc", "code-workspace", "addon.rb"),
    ],
)
def test_other_paths_are_not_protected(root: Path, path: str) -> None:
    (root / "store").mkdir()
    (root / "store" / "HEAD").write_text("ref: refs/heads/main\n")
    assert DiskWorkspace(root).protection(root / path) == "none"


def test_a_link_does_not_hide_a_protected_path(root: Path) -> None:
    (root / ".git").mkdir()
    (root / "docs").symlink_to(".git")
    (root / "notes.md").symlink_to("docs/config")
    workspace = DiskWorkspace(root)
    paths = ("docs/hooks/x.md", "notes.md", "docs")
    assert [workspace.protection(workspace.resolve(path)) for path in paths] == ["ask"] * 3


def test_crows_own_files_are_never_written_through_links(root: Path) -> None:
    (root / "dotfiles").mkdir()
    (root / "dotfiles" / "config.toml").write_text("")
    (root / "config").mkdir()
    (root / "config" / "config.toml").symlink_to(root / "dotfiles" / "config.toml")
    workspace = DiskWorkspace(root, own=(root / "config" / "config.toml", root / "crow.db", root / "config" / "skills"))
    paths = ("config/config.toml", "dotfiles/config.toml", "crow.db-wal", "CROW.DB", "config/skills/a/SKILL.md")
    assert [workspace.protection(workspace.resolve(path)) for path in paths] == ["never"] * 5
    assert workspace.protection(root / "config" / "other") == "none"


@pytest.mark.parametrize(
    "path",
    [
        *(".ssh/id", "deep/.ssh/known_hosts", ".SSH/x", ".gnupg/x", ".aws/credentials", ".netrc", "x/.git-credentials"),
        *(".config/gh/hosts.yml", ".kube/config", ".docker/config.json", ".mozilla/a/b", ".cargo/credentials.toml"),
    ],
)
def test_secret_places_are_protected_from_reads_and_writes(root: Path, path: str) -> None:
    workspace = DiskWorkspace(root)
    assert (workspace.read_protection(root / path), workspace.protection(root / path)) == ("ask", "ask")


def test_other_files_can_be_read(root: Path) -> None:
    workspace = DiskWorkspace(root)
    for path in (".env", ".git/config", ".config/ghost/x", ".docker/x", "AGENTS.md", "ssh/x", ".npmrc"):
        assert workspace.read_protection(root / path) == "none", path
    assert workspace.read_protection(Path(f"/proc/{os.getpid()}/environ")) == "ask"
    assert workspace.read_protection(Path("/etc/shadow")) == "ask"


def test_crows_own_files_are_never_read_but_the_users_skills_are(root: Path) -> None:
    (root / "config.toml").write_text("x")
    os.link(root / "config.toml", root / "copy")
    workspace = DiskWorkspace(
        root,
        own=(root / "config.toml", root / "crow.db"),
        own_folders=(root / "crow",),
        own_readable=(root / "crow" / "skills",),
    )
    closed = ("config.toml", "crow.db-wal", "CROW.DB", "copy", "crow", "crow/x/y", "Crow/skills.txt")
    assert [workspace.read_protection(root / path) for path in closed] == ["never"] * len(closed)
    assert workspace.read_protection(root / "crow" / "skills" / "a" / "SKILL.md") == "none"
    assert workspace.protection(root / "crow" / "skills" / "a" / "SKILL.md") == "never"
    assert workspace.read_protection(root / "crow-theme") == workspace.protection(root / "crow-theme") == "none"


def test_a_hard_link_to_a_key_is_as_secret_as_the_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = root / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("key")
    os.link(home / ".ssh" / "id", root / "plain")
    (root / "b.txt").write_text("b")
    os.link(root / "b.txt", root / "c.txt")
    monkeypatch.setenv("HOME", str(home))
    workspace = DiskWorkspace(root)
    assert workspace.read_protection(root / "plain") == "ask"
    assert workspace.read_protection(root / "c.txt") == "none"


async def test_all_names_of_a_file_are_found_or_known_to_be_missing(root: Path, tmp_path: Path) -> None:
    (root / "sub").mkdir()
    (root / "one").write_text("x")
    os.link(root / "one", root / "sub" / "two")
    (root / "three").write_text("x")
    (tmp_path / "far").mkdir()
    os.link(root / "three", tmp_path / "far" / "four")
    (root / "plain").write_text("x")
    workspace = DiskWorkspace(root)
    paths = [root / name for name in ("one", "three", "plain", "missing")]
    found = await workspace.find_names(paths)
    assert {path: (set(names), is_complete) for path, (names, is_complete) in found.items()} == {
        root / "one": ({str(root / "one"), str(root / "sub" / "two")}, True),
        root / "three": ({str(root / "three")}, False),
    }
    wider = await workspace.find_names(paths[1:2], [f"{tmp_path}/far/"])
    assert wider[root / "three"][1]

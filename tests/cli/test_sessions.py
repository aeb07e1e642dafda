"""`crow sessions` and its commands."""

from __future__ import annotations

import json
import os
import pty
import resource
import shlex
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from datetime import datetime
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import anyio
import pytest

from crow.cli import main
from crow.cli.output import age_text, unique_prefixes
from crow.cli.sessions import parse_age, parse_day
from crow.domain.entries import Assistant, Checkpoint, NewEntry, Reminder, TurnEnd
from crow.domain.errors import ArgumentError
from crow.domain.messages import Text, Usage
from crow.domain.text import on_one_line, plural, safe
from crow.store import NewSession, SessionChanges
from crow.store.codec import merged_metadata, tags_of, tags_patch
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, new_session, result, said
from tests.support import foreign_sessions as foreign
from tests.support.fork_server import command

EVIL = "\x1b]0;owned\x07 title\twith `ticks`"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "CROW_MODEL", "CROW_LOG", "CROW_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CROW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def stored_sessions(home: Path) -> Path:
    """Two sessions with a call and a compaction each, one with a title that would steer a terminal."""
    anyio.run(fill, home)
    return home


async def fill(home: Path) -> None:
    store = await SqliteStore.open(home / "crow.db")
    try:
        for name, cwd, title in (("aaaa1111-one", "/one", "First"), ("aaaa2222-two", "/two", EVIL)):
            await store.create_session(NewSession(id=name, cwd=cwd, model="m1", mode="ask", title=title))
            user = await begin(store, name, f"look for the needle in {cwd}")
            usage = Usage(input_tokens=1000, output_tokens=10, cached_tokens=500)
            (asked,) = await store.append(
                name,
                leaf=user.id,
                turn=1,
                entries=[NewEntry(body=said("I look.", calls=1), model="m1", usage=usage, cost=0.5)],
            )
            text = "\n".join(f"line {number} ```" for number in range(40))
            await add(
                store,
                name,
                result(asked.id, text),
                Reminder(text="secret reminder"),
                Checkpoint(compaction_id="k", summary="All was found.", first_kept=None),
                Assistant(text="Found.", message_id="a", thought="Hm."),
                TurnEnd(stop="end_turn"),
                release=True,
            )
        await store.update_session("aaaa2222-two", SessionChanges(alias="cli:default"))
    finally:
        await store.close()


def crow(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `crow sessions ...` prints when all is well."""
    assert main(["sessions", *arguments]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of `crow sessions ...` that a user can act on."""
    assert main(["sessions", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("crow: ")
    assert err.count("\n") == 1
    return err[len("crow: ") : -1]


def test_one_output_is_printed_whole(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"line {number} ```\n" for number in range(40))
    assert crow(capfd, "show", "aaaa1", "--call", "call_2_0") == text
    assert refused(capfd, "show", "aaaa2", "--call", "call_2_0") == "Session aaaa2222-two has no result of call_2_0."
    assert refused(capfd, "show", "aaaa1", "--call", "2") == (
        '--call is "2"; expected the id of a call, such as call_12_0.'
    )


def test_stats_of_the_disk_say_what_takes_the_room(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def share() -> None:
        store = await SqliteStore.open(stored_sessions / "crow.db")
        for name in ("aaaa1111-one", "aaaa2222-two"):
            await add(store, name, result(1, "x" * 50_000))
        await store.close()

    anyio.run(share)
    rows = {row["what"]: row for row in map(json.loads, crow(capfd, "stats", "--disk", "--json").splitlines())}
    assert rows["entries: user"]["number"] == 2
    assert rows["blobs: outputs, files, images, prompts"] == {
        "what": "blobs: outputs, files, images, prompts",
        "number": 1,
        "bytes": 50_000,
    }
    assert rows["  not stored again because it is equal"]["bytes"] == 50_000
    assert rows["the whole database"]["bytes"] == (stored_sessions / "crow.db").stat().st_size
    assert rows["free pages"]["bytes"] == rows["free pages"]["number"] * 4_096
    table = crow(capfd, "stats", "--disk").splitlines()
    assert len(table) == len(rows)
    assert table[-2].split("\t")[0] == "the whole database"


def on_terminal(*commands: tuple[str, ...], width: int, **variables: str) -> list[list[str]]:
    """The lines of each command that a person sees on a terminal of that width."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(width), **variables}
    lines = (f"{shlex.join([*command(), 'sessions', *arguments])} && printf '\\f\\n'" for arguments in commands)
    process = subprocess.Popen(["sh", "-c", " && ".join(lines)], stdin=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    data = b""
    try:
        while piece := os.read(ours, 65536):
            data += piece
    except OSError:  # the other end is closed: all was read
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    pages = data.decode().replace("\r\n", "\n").split("\f\n")[:-1]
    return [[line.rstrip() for line in page.splitlines()] for page in pages]


def test_commands_without_a_database_say_so_and_create_none(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("search", "x"), ("stats",), ("prune", "--older-than", "1d"), ("export", "--all")):
        assert crow(capfd, *arguments) == ""
    for arguments in (("show", "x"), ("delete", "x"), ("--continue",), ("backup", "x.db"), ("export", "x")):
        assert refused(capfd, *arguments) == f"There are no sessions yet: {home / 'crow.db'} does not exist."
    assert not home.exists()


def test_sessions_are_listed_with_their_number_of_messages(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = crow(capfd)
    rows = [line.split("\t") for line in listed.splitlines()]
    assert [(row[0], *row[2:4]) for row in rows] == [("aaaa2222-two", "3", "/two"), ("aaaa1111-one", "3", "/one")]
    assert crow(capfd, "list") == listed
    assert main(["session", "list"]) == 0
    assert capfd.readouterr().out == listed
    of_one = rows[1]
    assert crow(capfd, "list", "--cwd", "/one").split("\t") == crow(capfd, "--cwd", "/one", "list").split("\t")
    assert crow(capfd, "list", "--cwd", "/one").rstrip("\n").split("\t") == of_one
    assert crow(capfd, "list", "--archived") == ""
    assert crow(capfd, "list", "--continue", "--cwd", "/one") == "aaaa1111-one\n"
    (row,) = map(json.loads, crow(capfd, "list", "--json", "--cwd", "/one").splitlines())
    assert (row["id"], row["messages"], row["entries"]) == ("aaaa1111-one", 3, 7)
    (newest,) = map(json.loads, crow(capfd, "--continue", "--json", "--cwd", "/one").splitlines())
    assert newest == row


def test_search_prints_one_line_for_each_match_or_json(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split("\t") for line in crow(capfd, "search", "the", "NEEDLE").splitlines()]
    assert [(line[0], *line[2:]) for line in lines] == [
        ("aaaa2222-two", "user", "look for the needle in /two"),
        ("aaaa1111-one", "user", "look for the needle in /one"),
    ]
    (hit,) = map(
        json.loads, crow(capfd, "search", "needle", "--cwd", "/one", "--json", "--since", "2020-01-01").splitlines()
    )
    assert (hit["session"], hit["kind"], hit["snippet"]) == ("aaaa1111-one", "user", "look for the needle in /one")
    assert crow(capfd, "search", "needle", "--until", "2020-01-01") == ""
    assert crow(capfd, "search", "needle", "--model", "other") == ""


@pytest.fixture
def many_sessions(home: Path, tmp_path: Path) -> Path:
    """Sessions in a repository with a linked worktree and another repository inside, one with subagents."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(tmp_path / "app")]
    (tmp_path / "app" / "src").mkdir(parents=True)
    (tmp_path / "app" / "vendor").mkdir()
    subprocess.run([*git[:-1], str(tmp_path / "app" / "vendor"), "init", "-q"], check=True)
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    subprocess.run([*git, "worktree", "add", "-q", str(tmp_path / "fix")], check=True)
    anyio.run(fill_many, home, tmp_path)
    return tmp_path


async def fill_many(home: Path, root: Path) -> None:
    store = await SqliteStore.open(home / "crow.db")
    try:
        for name, folder, title, parent in (
            ("src", "app/src", "Übung", None),
            ("vendor", "app/vendor", "Vendored", None),
            ("fix", "fix", "The fix", None),
            *((f"task-{number}", "fix", f"Find {number}", "fix") for number in range(7)),
            ("gone", "app/gone", "Retry policy", None),
            ("elsewhere", "", "Elsewhere", None),
        ):
            new = NewSession(id=name, cwd=str(root / folder), model="m1", mode="ask", title=title, parent_id=parent)
            await store.create_session(new)
            await begin(store, name, f"The first line of {name} has nothing.\n{'retry ' * 20}needle {'budget ' * 20}")
            answer = NewEntry(body=said("Done."), model="Qwen3" if name == "gone" else "m1")
            leaf = (await store.session(name)).leaf
            await store.append(name, leaf=leaf, turn=1, entries=[answer, NewEntry(body=TurnEnd(stop="end_turn"))])
    finally:
        await store.close()


def ids(text: str) -> list[str]:
    return [line.split("\t")[0] for line in text.splitlines()]


def sessions_in(text: str) -> list[str]:
    return [name for name in ids(text) if not name.startswith("task-")]


def test_sessions_are_chosen_by_repository_title_model_and_time(
    many_sessions: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(many_sessions / "app" / "src")
    whole = ["gone", "fix", "src"]
    assert sessions_in(crow(capfd, "--repo")) == whole
    assert sessions_in(crow(capfd, "list", "--repo", str(many_sessions / "fix"))) == whole
    assert sessions_in(crow(capfd, "--repo", str(many_sessions / "app" / "vendor"))) == ["vendor"]
    assert crow(capfd, "--repo", "--continue") == "gone\n"
    assert sessions_in(crow(capfd, "--title", "ÜBUNG")) == ["src"]
    assert sessions_in(crow(capfd, "--model", "qwen")) == ["gone"]
    assert crow(capfd, "--continue", "--cwd", str(many_sessions), "--model", "m") == "elsewhere\n"
    every = ["elsewhere", "gone", "fix", "vendor", "src"]
    assert (
        sessions_in(crow(capfd, "list", "--since", "7d")) == sessions_in(crow(capfd, "--until", "2999-01-01")) == every
    )
    assert crow(capfd, "--since", "2999-01-01") == crow(capfd, "list", "--until", "1d") == ""
    monkeypatch.chdir("/")
    assert (
        refused(capfd, "--repo") == '--repo is ".", which is not in a Git repository. For other directories, use --cwd.'
    )
    assert refused(capfd, "--repo", "--cwd") == (
        "Give either --cwd (one directory) or --repo (a whole repository), not both."
    )
    assert refused(capfd, "--since", "soon").startswith('--since is "soon"; expected an age such as 12h, 30d, ')
    assert refused(capfd, "--continue", "--cwd", str(many_sessions), "--title", "nope") == (
        'No session matches. Run "crow sessions" to list the sessions of all directories.'
    )


def test_an_imported_session_is_listed_by_the_time_of_its_last_use(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crow(capfd, "import", str(foreign.pi(tmp_path)))
    assert ids(crow(capfd)) == ["aaaa2222-two", "aaaa1111-one", f"pi-{foreign.UUID}"]
    assert ids(crow(capfd, "--until", "1d")) == [f"pi-{foreign.UUID}"]


def test_subagents_stand_below_their_session(many_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line.split("\t") for line in crow(capfd, "--title", "fix").splitlines()]
    assert [(line[0], line[2], line[-1]) for line in lines] == [
        ("fix", "2", ""), *((f"task-{number}", "2", "fix") for number in range(7)),
    ]  # fmt: skip
    (row,) = map(json.loads, crow(capfd, "--title", "fix", "--json").splitlines())
    assert [one["id"] for one in row["subagents"]] == [f"task-{number}" for number in range(7)]
    limited, whole = on_terminal(("--title", "fix"), ("--title", "fix", "--all"), width=300, TERM="xterm")
    assert limited[3].split("  ")[0] == "└ …"
    assert "2 earlier subagents; --all shows them" in limited[3]
    assert [line.split()[:2] for line in limited[4:]] == [["└", f"task-{number}"] for number in range(2, 7)]
    assert limited[4].split() == ["└", "task-2", "now", "2", "Find", "2"]
    assert [line.split()[1] for line in whole[3:]] == [f"task-{number}" for number in range(7)]


def test_sessions_are_renamed_tagged_and_found_by_tag(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert crow(capfd, "rename", "aaaa1", "Retry ", " policy\x1b") == 'aaaa1111-one "Retry policy"\n'
    assert json.loads(crow(capfd, "rename", "aaaa2", "Other", "--json")) == {"id": "aaaa2222-two", "title": "Other"}
    assert refused(capfd, "rename", "aaaa1", " ") == "The new title is empty; expected at least one visible character."
    assert crow(capfd, "search", "policy").startswith("aaaa1111-one\t")
    assert crow(capfd, "tag") == ""
    assert crow(capfd, "tag", "aaaa1", "#HTTP", "work") == 'aaaa1111-one "Retry policy": #http #work\n'
    assert json.loads(crow(capfd, "tag", "aaaa2", "work", "--json"))["tags"] == ["work"]
    assert crow(capfd, "tag") == "http\t1\nwork\t2\n"
    assert ids(crow(capfd, "--tag", "work")) == ["aaaa2222-two", "aaaa1111-one"]
    assert ids(crow(capfd, "--tag", "WORK", "list", "--cwd", "/one")) == ["aaaa1111-one"]
    assert ids(crow(capfd, "--tag", "work", "--tag", "http")) == ["aaaa1111-one"]
    assert crow(capfd, "list", "--cwd", "/one").split("\t")[-2:] == ["http work", "\n"]
    assert "- tags: http, work\n" in crow(capfd, "show", "aaaa1")
    assert crow(capfd, "tag", "aaaa2", "--remove", "work") == 'aaaa2222-two "Other": no tags\n'
    assert refused(capfd, "tag", "--remove", "http") == (
        "Name the SESSION from which to remove tags: crow sessions tag SESSION --remove TAG."
    )
    assert refused(capfd, "tag", "aaaa2", "x", "--remove", "work") == 'aaaa2222-two has no tag "work"; it has none.'
    for wrong in ("two words", "a,b", "", "#", "x" * 51, "\u202ex"):
        assert "cannot be a tag; expected one word of at most 50 characters" in refused(capfd, "tag", "aaaa1", wrong)
    ((_, _, first, *_), (empty,)) = on_terminal(("--tag", "http"), ("--tag", "nope"), width=80)
    assert first.endswith("Retry policy #http #work")
    assert empty == "No sessions match."


def test_tags_of_a_program_are_read_and_kept() -> None:
    assert tags_of({"tags": ["b", "a", 1, "b"]}) == ("a", "b")
    assert tags_of({"tags": {"B": True, "off": False, "a": "x"}}) == ("a", "b")
    assert tags_of({"tags": "work"}) == tags_of({}) == ()
    old = {"tags": ["A", "b"], "other": 1}
    new = merged_metadata(old, tags_patch(old, add=["c"], remove=["a"]))
    assert new == {"tags": {"b": True, "c": True}, "other": 1}


def test_search_groups_by_session_and_highlights_the_words_in_the_line(stored_sessions: Path) -> None:
    (lines,) = on_terminal(("search", "needle", "found"), width=80)
    assert lines == ['No matches for "needle found".']
    anyio.run(fill_long, stored_sessions)
    commands = ("search", "needle"), ("search", "Long", "search", "--limit", "1")
    plain, titled = on_terminal(*commands, width=80)
    assert plain == [
        "long-ses  A long search  /long",
        "     now  assistant  …ETRY RETRY RETRY R NEEDLE BUDGET BUDGET BUDGET BUDGET BUD…",
        "     now  user       …etry retry retry r needle budget budget budget budget bud…",
        "     now  assistant  THE NEEDLE ITSELF",
        "     now  user       the needle itself",
        "",
        "aaaa2222  \\x1b]0;owned\\x07 title with `ticks`  /two",
        "     now  user       look for the needle in /two",
        "",
        "aaaa1111  First  /one",
        "     now  user       look for the needle in /one",
        "",
    ]
    assert titled == ["long-ses  A long search  /long", ""]
    (colored,) = on_terminal(("search", " look  NEEDLE", "--cwd", "/one"), width=80, TERM="xterm", NO_COLOR="")
    assert "\x1b[1;33mlook\x1b[0m for the \x1b[1;33mneedle\x1b[0m in /one" in colored[1]


async def fill_long(home: Path) -> None:
    store = await SqliteStore.open(home / "crow.db")
    try:
        await store.create_session(new_session("long-session", cwd="/long", title="A long search"))
        await converse(store, "long-session", "the needle itself", f"{'retry ' * 20}\nr needle {'budget ' * 20}")
    finally:
        await store.close()


def test_stats_are_summed_by_the_chosen_groups(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert crow(capfd, "stats", "--by", "model") == "m1\t2\t2000\t1000\t20\t1.0000\n"
    rows = [json.loads(line) for line in crow(capfd, "stats", "--json").splitlines()]
    assert sorted(row["session"] for row in rows) == ["aaaa1111-one", "aaaa2222-two"]
    assert {key: rows[0][key] for key in ("tokens_in", "tokens_out", "tokens_cached", "cost", "requests")} == {
        "tokens_in": 1000, "tokens_out": 10, "tokens_cached": 500, "cost": 0.5, "requests": 1,
    }  # fmt: skip
    assert refused(capfd, "stats", "--by", "week") == (
        '--by is "week"; expected session, model or day, or several of these, such as model,day.'
    )


def test_continue_prints_the_newest_session_of_a_directory(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert crow(capfd, "--continue", "--cwd", "/one") == "aaaa1111-one\n"
    assert refused(capfd, "--continue", "--cwd", "/three") == (
        'No session in /three. Run "crow sessions" to list the sessions of all directories.'
    )


def test_a_session_is_shown_as_a_transcript(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = crow(capfd, "show", "aaaa1")
    assert text.startswith("# First\n\n- session: aaaa1111-one\n- directory: /one\n")
    assert "\n\nlook for the needle in /one\n\n## m1\n\nI look.\n\n- **Read notes.txt** (done, 0.0 s)\n\n````\n" in text
    assert "> All was found.\n" in text
    assert text.endswith("## m1\n\nFound.\n\n")
    for hidden in ("secret reminder", "Hm.", "line 30"):
        assert hidden not in text
    full = crow(capfd, "show", "--full", "aaaa1")
    assert "> Hm.\n" in full
    assert "line 39" in full
    kinds = [json.loads(line)["kind"] for line in crow(capfd, "show", "aaaa1", "--json").splitlines()]
    assert kinds == ["user", "assistant", "tool", "reminder", "compaction (summary)", "assistant", "turn_end"]
    assert "\x1b" not in crow(capfd, "show", "cli:default")


@pytest.mark.long
def test_stored_text_cannot_steer_a_terminal_and_tables_fit_its_width(stored_sessions: Path) -> None:
    commands = ((), ("search", "needle"), ("stats",), ("stats", "--by", "model,day"), ("show", "cli:default"))
    for width in (80, 140):
        listed, _, stats, *_ = pages = on_terminal(*commands, width=width)
        for lines in pages:
            assert all(len(line) <= width for line in lines), lines
            assert not any("\x07" in line or "\x1b]" in line for line in lines)
        assert {line.split()[0] for line in listed[2:] if line[0] != " "} == {"aaaa1111", "aaaa2222"}
        assert [line.split() for line in (stats[0], stats[-1])] == [
            ["Session", "Title", "Requests", "In", "Cached", "Out", "Cost", "$"],
            ["Total", "2", "2,000", "1,000", "20", "1.0000"],
        ]


def test_archived_sessions_leave_the_list_and_come_back(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert crow(capfd, "archive", "aaaa1") == 'aaaa1111-one "First": archived\n'
    assert [line.split("\t")[0] for line in crow(capfd).splitlines()] == ["aaaa2222-two"]
    assert [line.split("\t")[0] for line in crow(capfd, "--archived").splitlines()] == ["aaaa1111-one"]
    assert json.loads(crow(capfd, "unarchive", "aaaa1", "--json")) == {
        "id": "aaaa1111-one", "title": "First", "archived": False,
    }  # fmt: skip
    assert len(crow(capfd).splitlines()) == 2


def test_an_export_is_imported_once(
    stored_sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.jsonl"
    assert crow(capfd, "export", "--all", "-o", str(file)) == f"Wrote {file} ({file.stat().st_size:,} bytes).\n"
    assert file.stat().st_mode & 0o777 == 0o600
    data = file.read_bytes()
    assert crow(capfd, "export", "aaaa1", "cli:default").encode() == data
    assert refused(capfd, "export", "--all", "-o", str(file)) == (
        f"{file} already exists. Choose another name, because crow does not overwrite files."
    )
    assert refused(capfd, "export") == "Name the sessions to export, or give --all."
    monkeypatch.setenv("CROW_HOME", str(tmp_path / "elsewhere"))
    assert crow(capfd, "import", str(file)) == (
        "aaaa1111-one: imported with 7 entries\n"
        "aaaa2222-two: imported with 7 entries; its title was shortened or cleaned\n"
    )
    assert crow(capfd, "import", str(file)) == (
        "aaaa1111-one: exists already; left unchanged\naaaa2222-two: exists already; left unchanged\n"
    )
    again = [json.loads(line) for line in crow(capfd, "export", "--all").splitlines()[:-1]]
    before = [json.loads(line) for line in data.splitlines()[:-1]]
    titles = {record["id"]: record.pop("title") for record in again if record["type"] == "session"}
    assert titles == {"aaaa1111-one": "First", "aaaa2222-two": "]0;owned title with `ticks`"}
    assert again == [{name: value for name, value in record.items() if name != "title"} for record in before]
    assert file.read_bytes() == data
    (row,) = map(json.loads, crow(capfd, "--cwd", "/two", "--json").splitlines())
    assert (row["mode"], row["alias"], row["model"]) == ("ask", None, "")
    (tmp_path / "notes.txt").write_text("# Notes\n")
    assert refused(capfd, "import", str(tmp_path / "notes.txt")) == (
        f"{tmp_path / 'notes.txt'} has no sessions; expected a crow export, or sessions of claude-code, codex, pi,"
        " opencode, goose, openai-json."
    )
    missing = tmp_path / "missing.jsonl"
    assert refused(capfd, "import", str(missing)) == f"{missing} cannot be read: No such file or directory."


def test_spans_of_a_subagent_are_exported_once(many_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    once = crow(capfd, "export", "fix", "--format", "otlp")
    assert len(once.splitlines()) == 8
    for names in (("fix", "task-1"), ("task-1", "fix"), ("task-1", "fix", "fix", "task-2")):
        assert crow(capfd, "export", *names, "--format", "otlp") == once


def test_sessions_are_exported_as_markdown(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.md"
    crow(capfd, "export", "--all", "--format", "markdown", "-o", str(file))
    text = file.read_text()
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# \\x1b]0;owned\\x07 title with `ticks`",
        "# First",
    ]
    assert "line 39" in text


def test_a_session_is_exported_as_one_html_file_and_opened_in_the_browser(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "needle")
    file = tmp_path / "x.html"
    crow(capfd, "export", "aaaa1", "--format", "html", "-o", str(file))
    html = file.read_text()
    assert html.startswith("<!doctype html>")
    assert "look for the [hidden] in /one" in html
    assert "<p>Found.</p>" in html
    assert (
        refused(capfd, "export", "--all", "--format", "html") == "--format html writes one session; name one SESSION."
    )
    assert "jsonl is always complete" in refused(capfd, "export", "aaaa1", "--redact")

    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = Path(crow(capfd, "view", "aaaa1").strip())
    assert (path.read_text(), path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (html, 0o600, 0o700)
    assert (tmp_path / "opened").read_text() == f"{path.as_uri()}\n"


def test_a_large_page_is_printed_whole_on_a_terminal(stored_sessions: Path) -> None:
    async def fill() -> None:
        store = await SqliteStore.open(stored_sessions / "crow.db")
        await store.create_session(new_session("large", cwd="/large"))
        await converse(store, "large", "€" * 800_000)  # each character has 3 bytes; pages are read in pieces of 1 MiB
        await store.close()

    anyio.run(fill)
    (lines,) = on_terminal(("export", "large", "--format", "html"), width=80)
    assert "".join(lines).count("€") >= 800_000
    assert lines[-1] == "</html>"


def test_an_export_that_cannot_be_written_says_which_file_failed(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 300)
    for arguments in (("export", "aaaa1", "-o"), ("share", "aaaa1", "--html", "-o")):
        assert refused(capfd, *arguments, str(long)) == f"{long} cannot be written: File name too long."
    assert refused(capfd, "backup", str(long)) == f"{long} cannot be created: File name too long."
    file, missing = tmp_path / "x.jsonl", tmp_path / "missing"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert refused(capfd, "export", "aaaa1", "-o", str(file)) == f"{file} cannot be written: File too large."
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with monkeypatch.context() as changed:
        changed.setattr("tempfile.tempdir", str(missing))
        told = refused(capfd, "export", "aaaa1", "--format", "case", "-o", str(file))
    assert told.startswith(f"{file} was not written, because another file failed: ")
    assert str(missing) in told
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("arguments", [("export", "aaaa1", "-o"), ("backup",)])
def test_a_file_that_appears_during_an_export_is_left_alone(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "x"

    def appear(event: str, values: tuple[object, ...]) -> None:
        if is_watched and event == "open" and str(values[0]).startswith(f"{file}.part"):
            file.write_text("of another export")

    is_watched = True
    sys.addaudithook(appear)  # a hook cannot be removed
    try:
        told = refused(capfd, *arguments, str(file))
    finally:
        is_watched = False
    assert told.startswith((f"{file} already exists.", f"{file} exists already."))
    assert file.read_text() == "of another export"
    assert [path.name for path in tmp_path.glob("x*")] == ["x"]


async def die_while_answering(home: Path) -> None:
    dead = await SqliteStore.open(home / "crow.db")
    user = await begin(dead, "aaaa1111-one", "count to ten")
    for text, thought in (("one two ", "counting"), ("thr", "")):
        await dead.save_draft(
            "aaaa1111-one", after_leaf=user.id, turn=user.turn, message_id="a9", text=text, thought=thought
        )
    await dead.enqueue("aaaa1111-one", (Text(text="and back"),), "u9")
    await dead.close()


def test_what_a_dead_process_left_is_shown_although_the_session_is_not_opened(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = len(crow(capfd, "show", "aaaa1", "--json").splitlines())
    anyio.run(die_while_answering, stored_sessions)
    for arguments in (("show", "aaaa1", "--full"), ("export", "aaaa1", "--format", "markdown")):
        _, _, end = crow(capfd, *arguments).partition("count to ten")
        assert "> counting" in end
        answer, queued = end.index("one two thr"), end.index("and back")
        assert (
            answer < end.index("> The turn ended: interrupted.") < queued < end.rindex("The turn ended: interrupted.")
        )
    page = crow(capfd, "export", "aaaa1", "--format", "html")
    assert page.index("count to ten") < page.rindex("one two thr") < page.rindex("and back")
    messages = json.loads(crow(capfd, "show", "aaaa1", "--format", "openai"))
    assert any(message["role"] == "assistant" and "one two thr" in message["content"] for message in messages)
    assert "one two thr" in crow(capfd, "show", "aaaa1", "--as-model")
    # Entries that are not stored are in no file of entries, and showing them stores nothing.
    assert len(crow(capfd, "show", "aaaa1", "--json").splitlines()) == lines + 1
    with closing(sqlite3.connect(stored_sessions / "crow.db")) as database:
        assert database.execute("SELECT count(*) FROM drafts").fetchone() == (2,)


def test_the_context_of_the_model_is_shown_and_written_as_chat_messages(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    messages = json.loads(crow(capfd, "show", "aaaa1", "--format", "openai"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert "All was found." in messages[1]["content"]
    assert messages[2]["content"] == "Found."
    text = crow(capfd, "show", "aaaa1", "--as-model")
    assert text.startswith("## system\n\n")
    assert "All was found." in text
    assert text.endswith("## assistant\n\n> Hm.\n\nFound.\n\n")


def test_delete_and_prune_remove_the_named_sessions_only(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(capfd, "delete", "a1b2") == 'No session "a1b2". Run "crow sessions" to list them.'
    assert refused(capfd, "delete", "aaaa") == (
        '"aaaa" may mean 2 sessions: aaaa2222-two ("\\x1b]0;owned\\x07 title with `ticks`"), aaaa1111-one ("First").'
        " Give more of the id."
    )
    assert crow(capfd, "delete", "aaaa1") == 'aaaa1111-one "First": deleted\n'
    assert crow(capfd, "prune", "--older-than", "30d", "--dry-run") == ""
    listed = crow(capfd, "prune", "--older-than", "2999-01-01", "--dry-run")
    assert listed.split("\t")[0] == "aaaa2222-two"
    assert len(crow(capfd).splitlines()) == 1
    assert crow(capfd, "prune", "--older-than", "2999-01-01") == listed
    assert crow(capfd) == ""
    assert refused(capfd, "prune", "--older-than", "soon") == (
        '--older-than is "soon"; expected an age such as 12h, 30d, 8w, 6m or 2y, or a date such as 2026-11-01.'
    )
    assert crow(capfd, "vacuum").endswith(" MB now.\n")


def test_vacuum_compresses_old_outputs_if_the_settings_say_so(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def add_output() -> None:
        store = await SqliteStore.open(stored_sessions / "crow.db")
        await add(store, "aaaa1111-one", result(2, "a line of output\n" * 3_000, index=1))
        await store.close()

    anyio.run(add_output)
    with closing(sqlite3.connect(stored_sessions / "crow.db")) as connection, connection:
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute("UPDATE entries SET checksum = NULL, created_ms = created_ms - 31 * 86400000")
        connection.execute(
            "CREATE TRIGGER entries_never_change BEFORE UPDATE ON entries\nBEGIN\n"
            "    SELECT RAISE(ABORT, 'entries never change');\nEND"
        )

    def compressed() -> int:
        rows = {row["what"]: row for row in map(json.loads, crow(capfd, "stats", "--disk", "--json").splitlines())}
        return int(rows["  saved because they are compressed"]["number"])

    crow(capfd, "vacuum")
    assert compressed() == 0
    (stored_sessions / "config.toml").write_text("[store]\ncompress_after_days = 30\n")
    crow(capfd, "vacuum")
    assert compressed() == 1
    assert crow(capfd, "show", "aaaa1", "--call", "call_2_1") == "a line of output\n" * 3_000 + "\n"


def test_a_backup_is_written_to_a_file_or_into_a_directory(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.db"
    assert crow(capfd, "backup", str(file)).startswith(f"Wrote {file} (0.")
    (tmp_path / "backups").mkdir()
    done = json.loads(crow(capfd, "backup", str(tmp_path / "backups"), "--json"))
    (made,) = (tmp_path / "backups").iterdir()
    assert done == {"path": str(made), "bytes": made.stat().st_size, "sessions": 2, "entries": 14}


NOW = datetime.fromisoformat("2026-03-31T12:00:00").astimezone()


def local_ms(moment: str) -> int:
    return round(datetime.fromisoformat(moment).astimezone().timestamp() * 1000)


@pytest.mark.parametrize(
    ("age", "moment"),
    [
        ("12h", "2026-03-31T00:00"),
        ("30d", "2026-03-01T12:00"),
        ("2w", "2026-03-17T12:00"),
        ("1m", "2026-02-28T12:00"),
        ("1y", "2025-03-31T12:00"),
        ("2026-01-02", "2026-01-02T00:00"),
    ],
)
def test_ages_are_counted_from_now(age: str, moment: str) -> None:
    off_ms = parse_age("--older-than", age, now=NOW) - local_ms(moment)
    assert abs(off_ms) <= 3_600_000, "a change to summer time is no matter"


@pytest.mark.parametrize("age", ["", "30", "d", "-3d", "3 d", "9999999y", "99999y", "2026-13-01", "٣d"])
def test_an_invalid_age_is_named(age: str) -> None:
    with pytest.raises(ArgumentError) as named:
        parse_age("--older-than", age, now=NOW)
    assert str(named.value).startswith(f'--older-than is "{age}"; expected an age such as 12h')


def test_an_age_has_one_unit() -> None:
    ages = (-5, 59, 60, 3_599, 3_600, 86_400, 29 * 86_400, 30 * 86_400, 364 * 86_400, 800 * 86_400)
    assert [age_text(age) for age in ages] == [
        "now", "now", "1 min", "59 min", "1 h", "1 d", "29 d", "1 mo", "12 mo", "2 y",
    ]  # fmt: skip


def test_a_day_lasts_from_local_midnight_to_the_next() -> None:
    begins, ends = parse_day("--since", "2026-11-01"), parse_day("--until", "2026-11-01", days_later=1)
    assert (begins, ends) == (local_ms("2026-11-01T00:00"), local_ms("2026-11-02T00:00"))
    assert parse_day("--until", "2026-11-01T10:00+00:00", days_later=1) == 1793527200000


def test_control_characters_become_escapes_and_ids_become_prefixes() -> None:
    assert safe("a\x1b[2J\nb\tc\r\x7f\x9b") == "a\\x1b[2J\nb\tc\\r\\x7f\\x9b"
    assert on_one_line(" a\n\tb \x00") == r"a b \x00"
    assert [plural(number, noun) for number, noun in ((1, "entry"), (2, "entry"), (1000, "session"))] == [
        "1 entry", "2 entries", "1,000 sessions",
    ]  # fmt: skip
    assert unique_prefixes(["abc", "abcdefghij", "abcdefghijk", "b" * 40]) == {
        "abc": "abc",
        "abcdefghij": "abcdefghij",
        "abcdefghijk": "abcdefghijk",
        "b" * 40: "b" * 8,
    }


def test_sessions_of_other_tools_are_imported_and_what_is_skipped_is_named(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_DATA_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "PI_CODING_AGENT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert "no other tool's sessions are at the usual places" in refused(capfd, "import")
    path = foreign.codex(tmp_path)
    foreign.pi(tmp_path)
    with path.open("a") as file:
        file.write("{damaged \x1b[2J\n")
    places = f"codex ({tmp_path}/.codex, 1 session); pi ({tmp_path}/.pi/agent/sessions, 1 session)"
    assert refused(capfd, "import") == f"Give a PATH, or --from with one of these: {places}."
    assert refused(capfd, "import", "--from", "cursor").startswith('--from is "cursor"; expected one of claude-code,')
    assert refused(capfd, "import", "--from", "goose").startswith("No sessions of goose at the usual place")
    assert refused(capfd, "import", str(tmp_path / "home"), "--from", "pi").endswith("expected sessions of pi.")
    assert main(["sessions", "import", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    assert set(out.splitlines()) == {
        f"codex-{foreign.UUID}: imported with 10 entries",
        f"pi-{foreign.UUID}: imported with 10 entries",
        "codex: 1 session imported",
        "pi: 1 session imported",
    }
    assert err == (
        f"skipped {path}, line 21: it is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)\n1 line and 0 files skipped in all; everything else was imported\n"
    )
    assert crow(capfd, "import", "--from", "pi") == "pi: 0 sessions imported, 1 session already there\n"
    assert "There are 7 eggs." in crow(capfd, "show", "codex-")


async def test_a_session_that_cannot_be_imported_now_does_not_stop_the_others(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign.pi(tmp_path)
    await anyio.to_thread.run_sync(crow, capfd, "import", str(tmp_path))
    foreign.codex(tmp_path)
    store = await SqliteStore.open(home / "crow.db")
    try:  # another process, which lives, is importing the same session
        hide = "UPDATE sessions SET deleted_ms = 1, state = 'running', owner = ?, lease_ms = ?"
        now_ms = round(datetime.now().astimezone().timestamp() * 1000)
        await store.database.write(lambda sql: sql.execute(hide, (store.owner, now_ms)))
        assert await anyio.to_thread.run_sync(main, ["sessions", "import", str(tmp_path)]) == 0
    finally:
        await store.close()
    out, err = capfd.readouterr()
    assert out == f"codex-{foreign.UUID}: imported with 10 entries\ncodex: 1 session imported\n"
    assert f'Session "pi-{foreign.UUID}" is being imported or removed by another process now.' in err
    assert "0 lines and 1 file skipped in all" in err


def test_a_breakdown_says_where_tokens_and_time_went(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = map(json.loads, crow(capfd, "stats", "--breakdown", "--json").splitlines())
    totals = [json.loads(line) for line in crow(capfd, "stats", "--json").splitlines()]
    for name in ("requests", "tokens_in", "tokens_cached", "tokens_out", "cost"):
        assert found[name] == sum(total[name] for total in totals)
    assert found["cached_share"] == 0.5
    assert [use["name"] for use in found["tools"]] == ["read_file"]
    text = crow(capfd, "stats", "--breakdown", "--session", totals[0]["session"])
    assert "50 % of the input tokens were read from the provider's cache." in text
    assert text.endswith("\n")
    for limit in (["--until", "2001-01-01"], ["--model", "nowhere"]):
        assert "0 requests" in crow(capfd, "stats", "--breakdown", "--session", totals[0]["session"], *limit)
    assert crow(capfd, "stats", "--breakdown", "--cwd", "/nowhere", "--json").startswith('{"requests": 0')


def publisher(home: Path, script: str) -> None:
    """Configures a program of these shell lines as `share.command`."""
    program = home / "publish"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (home / "config.toml").write_text('[share]\ncommand = ["./publish", "--public"]\n')


def test_a_page_is_written_and_published(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert crow(capfd, "share", "aaaa2", "--html", "-o", str(page)) == f"{page}\n"
    assert page.stat().st_mode & 0o777 == 0o600
    assert "\x1b" not in page.read_text()
    publisher(stored_sessions, 'echo "uploading $1"; test -s "$2" && echo https://pages.example/$(basename "$2")')
    second = tmp_path / "-second.html"
    told = crow(capfd, "share", "aaaa2", "--html", "-o", str(second))
    assert told == f"{second}\nhttps://pages.example/-second.html\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no", "share.command printed no http or https URL. The page is in "),
        ("echo 'javascript:alert(1)'", "share.command printed no http or https URL."),
        ("printf 'https://a\\033[31mb'", "share.command printed no http or https URL."),
        ("printf 'go \\033]0;owned away' >&2; exit 3", "share.command ended with code 3: go \\x1b]0;owned away."),
    ],
)
def test_a_publisher_that_fails_is_named_and_the_page_stays(
    stored_sessions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str, words: str
) -> None:
    publisher(stored_sessions, script)
    page = tmp_path / "page.html"
    assert main(["sessions", "share", "aaaa1", "--html", "-o", str(page)]) == 2
    assert words in capfd.readouterr().err
    assert page.exists()


def test_a_link_is_made_listed_and_revoked(stored_sessions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = json.loads(crow(capfd, "share", "aaaa2", "--html", "--link", "--expires", "12h", "--json"))
    assert made["url"].startswith(f"http://127.0.0.1:7431/share/{made['id']}")
    (listed,) = map(json.loads, crow(capfd, "links", "--json").splitlines())
    assert listed == {key: value for key, value in made.items() if key != "url"}
    assert "\x1b" not in crow(capfd, "links")
    assert crow(capfd, "links", "--revoke", made["id"]) == f"{made['id']}: revoked (aaaa2222-two)\n"
    assert crow(capfd, "links", "--json") == ""
    assert list((stored_sessions / "links").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("share", "aaaa1", "--read"), "Name the PRINCIPAL with whom to share the session, or give --html."),
        (("share", "aaaa1", "ann", "--html"), 'leave out the principal "ann"'),
        (("share", "aaaa1", "bob", "--read", "--redact"), "--redact works only with --html, because bob sees"),
        (("share", "aaaa1", "bob", "--write", "--expires", "1d"), "--expires works only with --html"),
        (("share", "aaaa1", "bob", "--read", "--link"), "--link works only with --html"),
        (("share", "aaaa1", "bob", "--read", "-o", "x"), "--output works only with --html"),
        (("share", "aaaa1", "--html", "--expires", "1d"), "--expires works only with --link"),
        (("share", "aaaa1", "--html", "--link", "-o", "x"), "leave out --output"),
        (("share", "aaaa1", "--html", "--link", "--expires", "never"), '"never" is not a lifetime'),
        (("links", "--revoke", "x"), 'There is no link "x"'),
    ],
)
def test_a_wrong_share_says_what_would_work(
    stored_sessions: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["sessions", *arguments]) == 2
    assert words in capfd.readouterr().err
    assert not (stored_sessions / "links").exists()

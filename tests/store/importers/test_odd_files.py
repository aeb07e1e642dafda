"""Files of other tools that are odd, hostile or in unusual places."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from glob import glob
from pathlib import Path

import pytest

from crow.domain.entries import Assistant, Checkpoint
from crow.store.importers import Batch, SessionScan
from crow.store.sqlite.store import SqliteStore
from tests.store.importers.test_importers import bring, only, rows, shown
from tests.store.scenes import history
from tests.support import foreign_sessions as foreign
from tests.support.foreign_sessions import CWD, NEXT, PROMPT, SUMMARY

_NOBODY = 65_534


async def test_odd_arguments_of_a_call_give_a_call_that_every_endpoint_accepts(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    calls = [
        {"id": "a", "function": {"name": "edit", "arguments": '{"path": "nest", "edits": 7}'}},
        {"id": "b", "function": {"name": "wait", "arguments": '{"seconds": 1e999}'}},
    ]
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": calls}]
    foreign.write_json(tmp_path / "one.json", messages)
    await bring(sqlite_store, tmp_path)
    answer = (await history(sqlite_store, (await only(sqlite_store)).id))[1].body
    assert isinstance(answer, Assistant)
    assert [call.arguments for call in answer.calls] == ['{"path": "nest", "edits": 7}', '{"seconds": null}']


async def test_the_log_of_a_database_must_be_a_file(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    path = foreign.goose_database(tmp_path / "home")
    os.symlink("/dev/zero", f"{path}-wal")
    with resource_limit(64 * 1024 * 1024):
        _, problems = await bring(sqlite_store, tmp_path / "home")
    assert [(one.place, one.words) for one in problems.named] == [
        (str(path), "cannot be copied with its write-ahead log: it is a symbolic link, which is not followed.")
    ]


@contextmanager
def resource_limit(file_bytes: int) -> Iterator[None]:
    """Let no file grow above this size: a copy without an end would fill the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


async def test_databases_of_other_programs_leave_no_copies(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as database, database:
        database.execute("CREATE TABLE birds (name TEXT)")
    before = set(glob(f"{tempfile.gettempdir()}/crow-*/copy.db"))
    with SessionScan(tmp_path) as scan:
        assert scan.groups == []
        assert set(glob(f"{tempfile.gettempdir()}/crow-*/copy.db")) <= before


async def test_a_compaction_keeps_the_tail_from_an_entry_without_messages_on(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    lines = [
        {"type": "session", "version": 3, "id": "tail", "timestamp": foreign.iso(0), "cwd": CWD},
        foreign.pi_user("e1", None, 0, PROMPT),
        foreign.pi_line("model_change", "e2", "e1", 1, provider="nest", modelId="egg-2"),
        foreign.pi_user("e3", "e2", 1, NEXT),
        foreign.pi_user("e4", "e2", 2, "another branch"),
        foreign.pi_line("compaction", "e5", "e3", 3, summary=SUMMARY, firstKeptEntryId="e2"),
    ]
    foreign.write_lines(tmp_path / "pi/tail.jsonl", lines)
    shell = {"type": "text", "synthetic": True, "text": "The user ran a command."}
    messages = [
        foreign.opencode_user("m1", 0, foreign.opencode_text(PROMPT)),
        foreign.opencode_user("m2", 1, shell),
        foreign.opencode_user("m3", 2, {"type": "compaction", "tail_start_id": "m2"}),
        foreign.opencode_answer("m4", 2, foreign.opencode_text(SUMMARY), summary=True),
    ]
    path = foreign.opencode_database(tmp_path)
    with closing(sqlite3.connect(path)) as database, database:
        for table in ("session", "message", "part"):
            database.execute(f"DELETE FROM {table}")
        foreign.opencode_rows(database, {"id": "ses_1"}, messages)
    await bring(sqlite_store, tmp_path)
    for name, text in (("pi-tail", NEXT), ("opencode-ses_1", "The user ran a command.")):
        entries = await history(sqlite_store, name)
        (checkpoint,) = [entry.body for entry in entries if isinstance(entry.body, Checkpoint)]
        assert [shown(entry.body)[1] for entry in entries if entry.id == checkpoint.first_kept] == [text]


async def test_problems_name_the_message_and_count_as_lines(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    stray = {"type": "toolResponse", "id": "no", "toolResult": {"status": "error", "error": ""}}
    goose = foreign.write_lines(
        tmp_path / "goose.jsonl",
        [foreign.goose_message("user", 0, foreign.goose_text(PROMPT)), foreign.goose_message("user", 1, stray)],
    )
    tool = {"role": "tool", "tool_call_id": "no", "content": "x"}
    one, two = ([{"role": "user", "content": text}, tool] for text in (PROMPT, NEXT))
    lines = foreign.write_lines(tmp_path / "lines.jsonl", [{"messages": one}, {"messages": two}])
    _, problems = await bring(sqlite_store, tmp_path)
    assert sorted(map(str, problems.named)) == [
        f"{place}: a tool result without its call"
        for place in (f"{goose}, line 2", f"{lines}, line 1, message 2", f"{lines}, line 2, message 2")
    ]
    assert (problems.lines, problems.files) == (3, 0)


async def test_a_named_file_is_recognised_however_far_its_first_role_is(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    messages = [{"content": "long " * 2_000_000, "role": "user"}]
    document = foreign.write_json(tmp_path / "one.json", messages)
    lines = foreign.write_lines(tmp_path / "two.jsonl", [{"messages": [*messages, {"content": "", "role": "user"}]}])
    for path in (document, lines):
        imported, problems = await bring(sqlite_store, path)
        assert (len(imported), problems.named) == (1, [])


async def test_titles_come_from_the_index_beside_each_session(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    for name in ("one", "two"):
        foreign.write_lines(tmp_path / name / "session_index.jsonl", [{"id": name, "thread_name": f"Title of {name}"}])
        meta = {"id": name, "cwd": CWD}
        lines = [foreign.codex_line("session_meta", 0, **meta), foreign.codex_message(1, "user", PROMPT)]
        foreign.write_lines(tmp_path / name / "sessions/2026/01/01/rollout-1.jsonl", lines)
    await bring(sqlite_store, tmp_path)
    assert {row.title for row in (await rows(sqlite_store)).values()} == {"Title of one", "Title of two"}


@pytest.mark.parametrize(
    ("folder", "mode", "named"),
    [
        ("opencode/storage/session", 0o311, "opencode/storage/session"),
        ("opencode/storage/session/birds", 0o000, "opencode/storage/session/birds"),
        ("opencode/storage/message", 0o600, f"opencode/storage/message/{foreign.OPENCODE_SESSION}"),
        ("opencode/storage/part/msg_2", 0o000, "opencode/storage/part/msg_2"),
        ("locked", 0o000, "locked"),
        ("locked", 0o444, None),
    ],
)
def test_a_folder_that_cannot_be_read_is_named_and_the_others_are_imported(
    folder: str, mode: int, named: str | None
) -> None:
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as export:
        data = foreign.opencode_files(Path(home)).parent.parent
        (data / "locked").mkdir()
        foreign.write_json(data / "chat.json", [{"role": "user", "content": PROMPT}])
        with as_ordinary_user(Path(home)):
            (data / folder).chmod(mode)
            try:
                with SessionScan(data) as scan:
                    batch = Batch(export, cwd="/here")
                    for group in scan.groups:
                        batch.add(group, scan.problems)
            finally:
                (data / folder).chmod(0o700)
    assert "openai-json" in batch.tools.values()
    expected = [] if named is None else [(str(data / named), "Permission denied")]
    assert [(one.place, one.words) for one in scan.problems.named] == expected


@contextmanager
def as_ordinary_user(home: Path) -> Iterator[None]:
    """Give everything in `home` to another user, and act as this user, because root can read any folder. A user other
    than root stays the same."""
    if os.geteuid() != 0:
        yield
        return
    for path in (home, *home.rglob("*")):
        os.chown(path, _NOBODY, -1)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)

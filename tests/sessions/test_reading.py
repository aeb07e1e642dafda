"""The Python API for reading stored sessions, and the examples of its page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from crow import Sessions
from crow.domain.entries import Checkpoint, NewEntry, ToolResult
from crow.domain.errors import ArgumentError, NoSuchSession, StoreTooNew, StoreUnavailable
from crow.domain.messages import Usage
from crow.store import SessionChanges
from crow.store.admin import ImportDefaults
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.sessions.loop import keys, loop_replies
from tests.store.scenes import add, begin, converse, make_older, new_session, result, said
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.fork_server import command

PROJECT = Path(__file__).parents[2]
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$", (PROJECT / "docs" / "python-api.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)


@pytest.fixture
async def writer(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """A store that stays open and has a session with a tool call."""
    store = await SqliteStore.open(tmp_path / "crow.db")
    await store.create_session(
        new_session("s1", title="Mend the nest", alias="work", metadata={"task": "42", "tags": {"nest": True}})
    )
    await begin(store, "s1", "mend the nest")
    row = await store.session("s1")
    answer = NewEntry(body=said("look", calls=1), model="m1", usage=Usage(input_tokens=10), cost=0.5)
    (asked,) = await store.append("s1", leaf=row.leaf, turn=1, entries=[answer])
    await add(store, "s1", result(asked.id, "found"), said("mended"))
    await store.create_session(new_session("s2", cwd="/other"))
    await converse(store, "s2", "hello")
    yield store
    await store.close()


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith("-shm")}


async def test_sessions_are_listed_found_and_searched(writer: SqliteStore, tmp_path: Path) -> None:
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        assert [one.id for one in await sessions.list()] == ["s2", "s1"]
        assert [one.id for one in await sessions.list(limit=1)] == ["s2"]
        assert [one.id for one in await sessions.list(workspace="/repo")] == ["s1"]
        assert await sessions.list(archived=True) == ()
        found = await sessions.get("work")
        assert found == await sessions.get("s1")
        facts = (found.title, found.workspace_path, found.message_count, found.tokens_in, found.cost, found.metadata)
        assert facts == ("Mend the nest", "/repo", 3, 10, 0.5, {"task": "42", "tags": {"nest": True}})
        assert found.tags == ("nest",)
        assert found.created_at.tzinfo is UTC
        hits = await sessions.search("nest")
        assert [(hit.session_id, hit.kind) for hit in hits] == [("s1", "title"), ("s1", "user")]
        assert await sessions.search("nest", until=datetime.now(UTC) - timedelta(days=1)) == ()
        assert [hit.session_id for hit in await sessions.search("hello", workspace="/other")] == ["s2", "s2"]


async def test_messages_have_the_form_of_chat_completions(writer: SqliteStore, tmp_path: Path) -> None:
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        messages = await (await sessions.get("s1")).messages()
    call = {"id": "c0", "type": "function", "function": {"name": "read_file", "arguments": '{"path":"x"}'}}
    assert messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "mend the nest"},
        {"role": "assistant", "content": "look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "found"},
        {"role": "assistant", "content": "mended"},
    ]


async def test_messages_ignore_a_compaction_that_the_context_shows(writer: SqliteStore, tmp_path: Path) -> None:
    await add(writer, "s1", Checkpoint(compaction_id="c", summary="SUMMARY", first_kept=None), said("after"))
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        session = await sessions.get("s1")
        messages, context = await session.messages(), await session.context()
    assert [one["content"] for one in messages if one["role"] == "assistant"] == ["look", "mended", "after"]
    assert "SUMMARY" not in json.dumps(messages)
    assert "SUMMARY" in context[1]["content"]
    assert context[-1] == {"role": "assistant", "content": "after"}
    assert len(context) == 3


async def test_what_another_process_writes_is_seen_and_nothing_is_written(writer: SqliteStore, tmp_path: Path) -> None:
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        session = await sessions.get("s1")
        before = len([entry async for entry in session.entries()])
        await add(writer, "s1", said("later"))
        entries = [entry async for entry in session.entries()]
        assert len(entries) == before + 1
        assert isinstance(entries[2].body, ToolResult)
        kept = files_in(tmp_path)
        await sessions.list()
        await session.messages()
        assert "".join([part async for part in session.markdown()]).startswith("# Mend the nest\n")
        assert [part async for part in sessions.export()]
        assert files_in(tmp_path) == kept
    assert files_in(tmp_path) == kept
    await converse(writer, "s2", "and again")  # the writer is not disturbed


async def test_an_open_turn_of_a_dead_process_is_not_repaired(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db", owner="nobody")
    await store.create_session(new_session("s1"))
    await begin(store, "s1", "unanswered")
    await store.close()
    kept = (tmp_path / "crow.db").read_bytes()
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        session = await sessions.get("s1")
        assert [part async for part in session.export()]
        assert (await session.context())[-1] == {"role": "user", "content": "unanswered"}
    assert (tmp_path / "crow.db").read_bytes() == kept


async def test_an_exported_session_can_be_imported(writer: SqliteStore, tmp_path: Path) -> None:
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        exported = b"".join([part async for part in (await sessions.get("s1")).export()])
    (tmp_path / "s1.jsonl").write_bytes(exported)
    other = await SqliteStore.open(tmp_path / "other" / "crow.db")
    (imported,) = await SessionAdmin(other).import_file(tmp_path / "s1.jsonl", ImportDefaults(model="m", mode="ask"))
    await other.close()
    assert imported.sessions == ("s1",)


async def test_errors_say_what_is_wrong(writer: SqliteStore, tmp_path: Path) -> None:
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        with pytest.raises(ArgumentError, match='No session "nobody"'):
            await sessions.get("nobody")
        with pytest.raises(ArgumentError, match="limit is 0; expected 1 or more"):
            await sessions.list(limit=0)
        session = await sessions.get("s1")
        await writer.delete_session("s1")
        with pytest.raises(NoSuchSession):
            await session.messages()
    with pytest.raises(StoreUnavailable, match="is closed"):
        await session.messages()
    with pytest.raises(StoreUnavailable, match=re.escape(f"There is no database at {tmp_path / 'nothing.db'}.")):
        async with Sessions.open(tmp_path / "nothing.db"):
            pass
    assert not (tmp_path / "nothing.db").exists()
    (tmp_path / "text.db").write_text("no database at all" * 100)
    with pytest.raises(StoreUnavailable, match=r"text\.db"):
        async with Sessions.open(tmp_path / "text.db"):
            pass


@pytest.mark.parametrize("version", [4, 99])
async def test_a_database_of_another_version_is_named_and_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    await store.create_session(new_session("s1"))
    await store.close()
    if version == 4:
        make_older(path, version)
    else:
        content = bytearray(path.read_bytes())
        content[60:64] = version.to_bytes(4, "big")  # user_version in the header
        path.write_bytes(bytes(content))
    kept = path.read_bytes()
    error, words = (StoreUnavailable, "Run crow sessions once") if version == 4 else (StoreTooNew, "newer crow")
    with pytest.raises(error, match=words):
        async with Sessions.open(path):
            pass
    assert path.read_bytes() == kept


async def test_a_reading_store_refuses_to_write(writer: SqliteStore, tmp_path: Path) -> None:
    reading = await SqliteStore.open_to_read(tmp_path / "crow.db")
    with pytest.raises(StoreUnavailable, match="opened only for reading"):
        await reading.update_session("s1", SessionChanges(title="changed"))
    assert (await writer.session("s1")).title == "Mend the nest"
    await reading.close()


async def test_messages_of_a_damaged_entry_say_so(writer: SqliteStore, tmp_path: Path) -> None:
    await writer.database.write(lambda sql: sql.execute("DROP TRIGGER entries_never_change") and None)
    change = "UPDATE entries SET body = '{' WHERE kind = 'tool'"
    await writer.database.write(lambda sql: sql.execute(change) and None)
    async with Sessions.open(tmp_path / "crow.db") as sessions:
        messages = await (await sessions.get("s1")).messages()
    assert "could not be read" in messages[3]["content"]
    assert messages[3]["role"] == "tool"


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import crow; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['__future__', 'crow']", "['crow']")


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
async def test_an_example_of_the_page_runs(writer: SqliteStore, tmp_path: Path, example: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    async with FakeEndpoint() as endpoint:
        endpoint.script(*loop_replies())
        env = {**os.environ, "CROW_HOME": str(tmp_path), "PYTHONPATH": str(PROJECT), **keys(endpoint)}
        with anyio.fail_after(600):
            # one of them starts a new interpreter, which imports all that crow needs
            line = [sys.executable, "-W", "error", "-c", example]
            if "AsyncOpenAI" not in example:
                line = command(f"import warnings\nwarnings.simplefilter('error')\n{example}")
            done = await anyio.run_process(line, cwd=work, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip() or [path.name for path in work.iterdir()] == ["session.jsonl"]


def test_the_loop_with_crows_log_as_its_store_is_short() -> None:
    (loop,) = (example for example in EXAMPLES if "AsyncOpenAI" in example)
    code = [line for line in loop.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(code) <= 30

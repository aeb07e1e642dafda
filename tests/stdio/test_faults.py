"""Database faults in the real process: a clear error, an unchanged file, a session that continues."""

# ruff: noqa: ASYNC240  # these tests look at files while nothing else waits

from __future__ import annotations

import hashlib
import os
import resource
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.domain.entries import Assistant, TurnEnd
from crow.store.sqlite.migrations import VERSION
from crow.store.sqlite.store import SqliteStore
from tests.stdio.conftest import ROOT, StartCrow
from tests.stdio.test_turns import opened, reloaded, wait_for_draft
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.disks import WITHOUT_PRIVILEGE, FullDisk, full_disk
from tests.support.fake_endpoint import FakeEndpoint, Gate
from tests.support.fork_server import command

KEPT = "and kept " + " ".join(map(str, range(16_000)))
"""Enough to fill the disk of a test."""


def waits(seconds: float) -> str:
    """Code that gives the process another limit on waiting for locks (default: 10 s)."""
    return f"""
from crow.store.sqlite.store import SqliteStore
SqliteStore.open.__func__.__kwdefaults__["busy_timeout_s"] = {seconds}
"""


def fingerprint(directory: Path) -> dict[str, str]:
    """The hash of every file below the directory except the log."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.suffix != ".log")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def refused(agent: CrowProcess, place: Path) -> str:
    """The error message of a refused new session."""
    with pytest.raises(RpcError) as raised:
        await agent.new_session(place)
    assert raised.value.code == -32603
    assert raised.value.data["details"] == raised.value.message
    return raised.value.message


async def made(crow: StartCrow, place: Path, prompt: str = "say hello") -> str:
    """Create a session and close the database; returns the session's id."""
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, prompt)
    return session


@contextmanager
def held(database: Path) -> Iterator[None]:
    """Another program holds the write lock in the block."""
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


# files that are refused and left unchanged


async def test_a_file_that_is_not_a_database_is_named_and_left_unchanged(
    crow: StartCrow, home: Path, place: Path
) -> None:
    home.mkdir()
    (home / "crow.db").write_bytes(b"My thesis. " * 1000)
    before = fingerprint(home)
    async with crow() as agent:
        await agent.initialize()
        assert (await refused(agent, place)).startswith(f"{home / 'crow.db'} is not a crow database")
        (home / "crow.db").rename(home / "thesis")
        await agent.prompt(await agent.new_session(place), "say hello")
    assert fingerprint(home)["thesis"] == before["crow.db"]


async def test_a_newer_schema_is_named_and_left_unchanged(crow: StartCrow, home: Path, place: Path) -> None:
    await made(crow, place)
    with closing(sqlite3.connect(home / "crow.db")) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = fingerprint(home)
    async with crow() as agent:
        await agent.initialize()
        words = await refused(agent, place)
    assert words.startswith(f"{home / 'crow.db'} was written by a newer crow: its schema is version {VERSION + 1}, ")
    assert fingerprint(home) == before


async def test_a_damaged_page_is_reported_where_it_is_needed_and_left_unchanged(
    crow: StartCrow, home: Path, place: Path
) -> None:
    session = await made(crow, place)
    destroy(home / "crow.db", "entries")
    before = fingerprint(home)
    async with crow() as agent:
        await agent.initialize()
        with pytest.raises(RpcError) as raised:
            await agent.load_session(session, place)
        assert raised.value.message.startswith(f"{home / 'crow.db'} is damaged (database disk image is malformed).")
        assert [row["sessionId"] for row in (await agent.request("session/list", {}))["sessions"]] == [session]
    assert fingerprint(home)["crow.db"] == before["crow.db"]


async def test_a_damaged_index_is_reported_with_a_remedy_that_works(crow: StartCrow, home: Path, place: Path) -> None:
    session = await made(crow, place)
    destroy(home / "crow.db", "entries_fts_data")
    async with crow() as agent:
        await reloaded(agent, session, place)
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "say again")
        assert raised.value.message.startswith(f"{home / 'crow.db'} is damaged (")
        assert "Quit every crow, then run crow doctor --repair" in raised.value.message
        open_still = await repairing(home)
    assert (open_still.returncode, b"is open in another process" in open_still.stderr) == (2, True)
    repaired = await repairing(home)
    assert (repaired.returncode, repaired.stderr) == (0, b"")
    async with crow() as agent:
        await reloaded(agent, session, place)
        assert agent.text(session) == "hello"
        assert await agent.prompt(session, "say again") == {"stopReason": "end_turn"}
        found = await agent.prompt(session, "/search hello")
        assert found == {"stopReason": "end_turn"}
        assert "hello" in agent.text(session).partition("again")[2]


def destroy(database: Path, table: str) -> None:
    """Overwrite the root page of a table or an index."""
    with closing(sqlite3.connect(database)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with database.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


async def repairing(home: Path) -> subprocess.CompletedProcess[bytes]:
    """Run `crow doctor --repair`."""
    env = {"CROW_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    return await anyio.run_process([*command(), "doctor", "--repair"], env=env, check=False)


async def test_a_result_changed_on_disk_is_reported_and_the_session_continues(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    (place / "number.txt").write_text("the number is seventeen\n")
    endpoint.script(fake.calls(("read_file", {"path": "number.txt"})), fake.text("seen"), fake.text("again"))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "look")
    database = home / "crow.db"
    content = database.read_bytes()
    changed = content.replace(b"the number is seventeen", b"the number is seventy-1")
    assert changed != content
    database.write_bytes(changed)
    async with crow(endpoint=endpoint) as agent:
        since = len(agent.log)
        await reloaded(agent, session, place)
        (update,) = agent.updates(session, "tool_call", since=since)
        assert "could not be read: it is damaged: its checksum is wrong" in str(update["content"])
        assert await agent.prompt(session, "go on") == {"stopReason": "end_turn"}
        (told,) = [message["content"] for message in endpoint.asked[-1].body["messages"] if message["role"] == "tool"]
        assert "could not be read: it is damaged: its checksum is wrong" in told
        assert "seventy" not in str([logged.message for logged in agent.log[since:]])


@pytest.mark.parametrize("mode", [0o500, 0o700])
async def test_a_read_only_database_is_readable_and_prompts_say_that_nothing_can_be_stored(
    crow: StartCrow, home: Path, place: Path, tmp_path: Path, mode: int
) -> None:
    session = await made(crow, place)
    (home / "crow.db").chmod(0o400 if mode == 0o700 else 0o600)
    home.chmod(mode)
    before = fingerprint(home)
    try:
        async with crow(before=WITHOUT_PRIVILEGE) as agent:
            await agent.initialize()
            assert [row["sessionId"] for row in (await agent.request("session/list", {}))["sessions"]] == [session]
            for cwd in (tmp_path, place):
                since = len(agent.log)
                await agent.load_session(session, cwd)
                assert agent.text(session, since=since) == "hello"
            brief = {"mode": "append", "content": [{"type": "text", "text": "Be brief."}]}
            opening = {"sessionId": session, "cwd": str(place), "mcpServers": [], "systemPrompt": brief}
            with pytest.raises(RpcError, match="is not writable"):
                await agent.request("session/load", opening)
            with pytest.raises(RpcError) as raised:
                await agent.prompt(session, "say lost")
            for words in (raised.value.message, await refused(agent, place)):
                assert words.startswith(f"{home / 'crow.db'} is not writable")
                assert "CROW_HOME" in words
                assert words.endswith("nothing can be stored; stored sessions can be read.")
            assert fingerprint(home) == before
            home.chmod(0o700)
            (home / "crow.db").chmod(0o600)
            assert await agent.prompt(session, "say again") == {"stopReason": "end_turn"}
    finally:
        home.chmod(0o700)
    async with crow() as agent:
        await reloaded(agent, session, place)
        assert agent.text(session) == "helloagain"


# the file disappears


@pytest.mark.long
@pytest.mark.parametrize("asks", ["session/prompt", "session/list", "session/load", "session/new"])
async def test_a_deleted_database_is_reported_and_restored_completely(
    crow: StartCrow, home: Path, place: Path, asks: str
) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "say hello")
        for file in home.glob("crow.db*"):
            file.unlink()
        params: dict[str, dict[str, Any]] = {
            "session/prompt": {"sessionId": session, "prompt": [{"type": "text", "text": "say lost"}]},
            "session/list": {},
            "session/load": {"sessionId": session, "cwd": str(place), "mcpServers": []},
            "session/new": {"cwd": str(place), "mcpServers": []},
        }
        with pytest.raises(RpcError) as raised:
            await agent.request(asks, params[asks])
        assert raised.value.code == -32603
        assert raised.value.message.startswith(
            f"{home / 'crow.db'} was deleted while crow was running. Crow still had it open"
        )
        if asks in ("session/list", "session/load"):  # an editor may hide that error
            with pytest.raises(RpcError, match="was deleted while crow was running"):
                await agent.prompt(session, "say lost")
        assert await agent.prompt(session, "say again") == {"stopReason": "end_turn"}
    async with crow() as agent:
        await reloaded(agent, session, place)
        assert agent.text(session, "user_message_chunk") == "say hellosay again"
        assert agent.text(session) == "helloagain"


async def test_a_database_deleted_during_an_answer_keeps_the_whole_answer(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("shown", " and kept", between=[gate]), fake.text("second"))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "first")
        await agent.wait_for_text(session, "shown")
        await wait_for_draft(home / "crow.db", "shown")
        for file in home.glob("crow.db*"):
            file.unlink()
        gate.open()
        assert await call.result() == {"stopReason": "end_turn"}
        with pytest.raises(RpcError, match="was deleted while crow was running"):
            await agent.prompt(session, "second")
        assert await agent.prompt(session, "second") == {"stopReason": "end_turn"}
    async with crow() as agent:
        await reloaded(agent, session, place)
        assert agent.text(session) == "shown and keptsecond"


async def test_a_database_that_replaces_the_open_one_is_left_alone(
    crow: StartCrow, home: Path, place: Path, tmp_path: Path
) -> None:
    other = await made(crow, place, "say other words")
    (home / "crow.db").rename(tmp_path / "other.db")
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "say hello")
        (tmp_path / "other.db").rename(home / "crow.db")
        before = fingerprint(home)["crow.db"]
        for asks, params in (
            ("session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": "say lost"}]}),
            ("session/list", {}),
            ("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []}),
        ):
            with pytest.raises(RpcError) as raised:
                await agent.request(asks, params)
            assert raised.value.message.startswith(f"{home / 'crow.db'} was replaced by another file while crow was")
    assert fingerprint(home)["crow.db"] == before
    (copy,) = home.glob("crow-rescued-*.db")
    assert str(copy) in raised.value.message
    for database, known, said in ((home / "crow.db", other, "other words"), (copy, session, "hello")):
        database.rename(home / "crow.db")
        async with crow() as agent:
            await agent.initialize()
            assert [row["sessionId"] for row in (await agent.request("session/list", {}))["sessions"]] == [known]
            await reloaded(agent, known, place)
            assert agent.text(known) == said


# faults that pass


async def test_a_locked_database_is_reported_and_the_session_continues_when_it_is_free(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(
        fake.text("shown", " and kept", between=[gate]), fake.text("second"), fake.text("third", "", between=[Gate()])
    )
    async with crow(endpoint=endpoint, before=waits(0.2)) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "first")
        await agent.wait_for_text(session, "shown")
        await wait_for_draft(home / "crow.db", "shown")
        locked = f"{home / 'crow.db'} is locked by another program (waited 0.2 s). End that program, then try again."
        with held(home / "crow.db"):
            gate.open()
            for result in (call.result(), agent.prompt(session, "too early")):
                with pytest.raises(RpcError) as raised:
                    await result
                assert raised.value.message == locked
            shown = agent.text(session)
        assert await agent.prompt(session, "second") == {"stopReason": "end_turn"}
        assert [message["role"] for message in endpoint.asked[-1].body["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
    async with crow(endpoint=endpoint, before=waits(600)) as agent:
        await reloaded(agent, session, place)
        assert agent.text(session, "user_message_chunk") == "firstsecond"
        assert shown == "shown and kept"
        assert agent.text(session).startswith(shown)
        await agent.start_prompt(session, "third")
        await wait_for_draft(home / "crow.db", "third")
        with held(home / "crow.db"):  # a process that exits does not wait for locks
            assert await agent.close_stdin_and_wait() == 0
    store = await SqliteStore.open(home / "crow.db")
    *_, answer, end = (await store.open_session(session)).entries
    await store.close()
    assert isinstance(answer.body, Assistant)
    assert isinstance(end.body, TurnEnd)
    assert (answer.body.text, end.body.stop) == ("third", "interrupted")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FullDisk]:
    with full_disk(tmp_path) as made:
        yield made


async def test_a_full_disk_is_reported_and_the_session_continues_when_there_is_room(
    crow: StartCrow, disk: FullDisk, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("shown ", KEPT, between=[gate]))
    async with crow(endpoint=endpoint, env={"CROW_HOME": str(disk.directory)}) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "first")
        await agent.wait_for_text(session, "shown")
        await wait_for_draft(disk.directory / "crow.db", "shown ")
        disk.fill(agent.pid)
        gate.open()
        for answer in (call.result(), agent.prompt(session, "too early " * 10_000)):
            with pytest.raises(RpcError) as raised:
                await answer
            assert raised.value.message.startswith(f"{disk.directory / 'crow.db'} {disk.words}")
        shown = agent.text(session)
        disk.free(agent.pid)
        assert await agent.prompt(session, "second") == {"stopReason": "end_turn"}
    async with crow(endpoint=endpoint, env={"CROW_HOME": str(disk.directory)}) as agent:
        await reloaded(agent, session, place)
        assert agent.text(session, "user_message_chunk") == "firstsecond"
        assert shown == "shown " + KEPT
        assert agent.text(session).startswith(shown)
    with closing(sqlite3.connect(disk.directory / "crow.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_load_on_a_full_disk_shows_and_keeps_the_unstored_answer(
    crow: StartCrow, disk: FullDisk, place: Path, tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("shown ", KEPT, between=[gate]), fake.text("went on"))
    whole = "shown " + KEPT
    async with crow(endpoint=endpoint, env={"CROW_HOME": str(disk.directory)}) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "first")
        await agent.wait_for_text(session, "shown")
        await wait_for_draft(disk.directory / "crow.db", "shown ")
        disk.fill(agent.pid)
        gate.open()
        with pytest.raises(RpcError):
            await call.result()
        for cwd in (place, tmp_path):
            since = len(agent.log)
            await agent.load_session(session, cwd)
            assert agent.text(session, "user_message_chunk", since=since) == "first"
            assert agent.text(session, since=since).startswith(whole)
        disk.free(agent.pid)
        since = len(agent.log)
        assert await agent.prompt(session, "second") == {"stopReason": "end_turn"}
        assert agent.text(session, since=since) == "went on"
        assert any(whole in str(message["content"]) for message in endpoint.asked[-1].body["messages"])
    async with crow(endpoint=endpoint, env={"CROW_HOME": str(disk.directory)}) as agent:
        await reloaded(agent, session, place)
        assert agent.text(session, "user_message_chunk") == "firstsecond"
        assert agent.text(session).startswith(whole)


async def test_sessions_can_be_listed_loaded_and_shown_on_a_full_disk(
    crow: StartCrow, disk: FullDisk, place: Path
) -> None:
    home = {"CROW_HOME": str(disk.directory)}
    async with crow(env=home) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "say hello")
    async with crow(env=home) as agent:
        await agent.initialize()
        disk.fill(agent.pid)
        assert [row["sessionId"] for row in (await agent.request("session/list", {}))["sessions"]] == [session]
        await agent.load_session(session, place)
        assert agent.text(session) == "hello"
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "say lost")
        assert raised.value.message.startswith(str(disk.directory / "crow.db"))
        disk.free(agent.pid)
        assert await agent.prompt(session, "say again") == {"stopReason": "end_turn"}
    async with crow(env=home) as agent:
        await reloaded(agent, session, place)
        assert agent.text(session) == "helloagain"


async def test_a_process_without_descriptors_recovers_when_they_are_back(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        assert await agent.prompt(session, "say hello") == {"stopReason": "end_turn"}
        has_failed = set()
        limit = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
        for spare in range(6):  # with a few descriptors, the tools cannot be loaded
            used = len(os.listdir(f"/proc/{agent.pid}/fd"))
            resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (used + spare, limit[1]))
            try:
                await agent.prompt(session, "run echo first")
            except RpcError as error:
                has_failed.add(error.message)
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, limit)
        assert any("Too many files are open. Close sessions or other programs" in words for words in has_failed)
        assert not any("Make its directory writable" in words for words in has_failed)
        assert await agent.prompt(session, "run echo then-again") == {"stopReason": "end_turn"}
        assert "then-again" in str(agent.updates(session)[-12:])

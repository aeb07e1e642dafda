"""Edits are made again, and never outside of the scratch directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from crow.adapters import open_scratch_toolbox
from crow.domain.entries import Announcement, Assistant, CallRef, File, Prompt, ToolResult
from crow.domain.messages import ToolCall
from crow.replay.edits import replayed_edits
from crow.store.sqlite.store import SqliteStore
from tests.store.conftest import sqlite_store
from tests.store.scenes import add, begin, new_session

__all__ = ["sqlite_store"]

CWD = "/repo/nest"


class Session:
    """A session with edits, as a session stores them."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store

    async def begin(self) -> None:
        await self.store.create_session(new_session("s", cwd=CWD))
        await begin(self.store, "s", "Build it.")
        await add(self.store, "s", Prompt(system="s", tools=(), cwd=CWD, model="m1", recorded_here=True))

    async def edit(self, tool: str, arguments: dict[str, str], path: str, before: bytes | None, after: bytes) -> None:
        call = ToolCall(id="c", name=tool, arguments=json.dumps(arguments))
        (answer,) = await add(self.store, "s", Assistant(text="", message_id="m", calls=(call,)))
        ref, digest = CallRef(assistant=answer.id, index=0), hashlib.sha256(after).hexdigest()
        changed = File(call=ref, path=path, before=before, after_hash=digest, recorded_here=True)
        result = ToolResult(call=ref, name=tool, text="done", announcement=Announcement(title=tool))
        await add(self.store, "s", changed, result)

    async def outcomes(self) -> list[tuple[str, str]]:
        return [(each.outcome, each.words) async for each in replayed_edits(self.store, "s", open_scratch_toolbox)]


async def test_edits_are_compared_with_the_log(sqlite_store: SqliteStore) -> None:
    session = Session(sqlite_store)
    await session.begin()
    edit = {"path": "a.txt", "old_text": "twigs", "new_text": "moss"}
    await session.edit("edit_file", edit, f"{CWD}/a.txt", b"twigs\n", b"moss\n")
    await session.edit("edit_file", edit, f"{CWD}/a.txt", b"twigs\n", b"string\n")
    await session.edit("edit_file", edit, f"{CWD}/a.txt", b"string\n", b"moss\n")
    absolute = {"path": f"{CWD}/deep/b.txt", "content": f"# {CWD}\n"}
    await session.edit("write_file", absolute, f"{CWD}/deep/b.txt", None, f"# {CWD}\n".encode())
    identical, other, failed, written = await session.outcomes()
    assert identical == written == ("identical", "")
    assert other == ("different", "today it writes something else to a.txt")
    assert failed[0] == "different"
    assert failed[1].startswith("today it fails: edit_file: ")


async def test_a_long_file_that_the_model_had_read_is_replaced_again(sqlite_store: SqliteStore) -> None:
    session = Session(sqlite_store)
    await session.begin()
    arguments, before = {"path": "a.txt", "content": "short\n"}, b"line\n" * 500
    await session.edit("write_file", arguments, f"{CWD}/a.txt", before, b"short\n")
    assert await session.outcomes() == [("identical", "")]


async def test_a_hostile_log_changes_nothing_elsewhere(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    session, victim = Session(sqlite_store), tmp_path / "victim.txt"
    victim.write_text("safe\n")
    up = "../" * 20 + str(victim).lstrip("/")
    await session.begin()
    for path in (str(victim), up):
        arguments = {"path": path, "content": "gone\n"}
        for named in (str(victim), f"{CWD}/{up}", f"{CWD}/a.txt"):
            await session.edit("write_file", arguments, named, b"gone\n", b"gone\n")
    assert {outcome for outcome, _ in await session.outcomes()} <= {"unproven", "different"}
    assert victim.read_text() == "safe\n"

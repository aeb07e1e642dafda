"""A client opens a session that it had opened before on the same connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import pytest

from crow.adapters import open_admin
from crow.domain.entries import Entry
from crow.frontend.requester import Requester
from crow.protocol.frames import RequestError
from crow.store import Store
from crow.store.admin import ImportDefaults
from crow.store.principals import PrincipalStore
from tests.support.scripted_model import Say, call
from tests.support.shared_host import shared

pytestmark = pytest.mark.anyio


async def test_a_session_that_another_client_closed_for_all_can_be_renamed_and_opened_again(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("Hi.",)), Say(text=("Yes.",))) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await ann.prompt(session, "hello")
        await bob.open("session/resume", session)
        await ann.call("session/archive", sessionId=session)
        assert await bob.call("session/set_title", sessionId=session, title="Ours") == {"title": "Ours"}
        await ann.open("session/resume", session)
        await bob.open("session/load", session)
        assert bob.text() == "Hi."
        assert (await bob.prompt(session, "really?"))["stopReason"] == "end_turn"


async def test_a_watcher_that_loads_the_session_without_watching_may_prompt(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("Hi.",)), Say(text=("Yes.",))) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await ann.prompt(session, "hello")
        watch = {"crow": {"watch": True}}
        await bob.open("session/load", session, _meta=watch)
        await bob.open("session/load", session)
        assert (await bob.prompt(session, "really?"))["stopReason"] == "end_turn"
        await bob.open("session/load", session, _meta=watch)
        with pytest.raises(RequestError, match="only watches"):
            await bob.prompt(session, "really?")


class Halting(PrincipalStore):
    """A store whose histories stop after the first entry."""

    def __init__(self, store: Store, on_stop: Callable[[], object]) -> None:
        super().__init__(store, None)
        self._on_stop = on_stop

    async def history(
        self, session_id: str, *, result_bytes: Callable[[int], int | None] | None = None
    ) -> AsyncIterator[Sequence[Entry]]:
        async for batch in super().history(session_id, result_bytes=result_bytes):
            yield batch[:1]
            self._on_stop()
            await anyio.sleep_forever()


async def test_calls_are_announced_as_usual_after_a_load_that_was_cancelled(tmp_path: Path) -> None:
    stopped = anyio.Event()
    write = Say(calls=(call("write_file", path="a.txt", content="x"),))
    async with shared(tmp_path, Say(text=("Hi.",)), write, Say(text=("Done.",))) as host:
        ann = await host.client(requester=Requester(view=partial(Halting, on_stop=stopped.set)))
        session = await ann.new()
        await ann.prompt(session, "hello")
        load = asyncio.create_task(ann.open("session/load", session))
        await stopped.wait()
        load.cancel()
        await asyncio.wait([load])
        await ann.prompt(session, "write")
        statuses = [each["status"] for each in ann.kinds_and_texts() if "toolCallId" in each]
        assert statuses == ["pending", "in_progress", "completed"]


async def test_a_session_keeps_the_client_that_created_it_if_another_one_opens_it_by_its_alias(tmp_path: Path) -> None:
    async with shared(tmp_path) as host:
        ann, bob = await host.client(), await host.client()
        for client, name in ((ann, "ann"), (bob, "bob")):
            await client.call("initialize", protocolVersion=1, clientInfo={"name": name, "version": "1"})
        alias = {"crow": {"alias": "ours"}}
        session = await ann.new(_meta=alias)
        assert await bob.new(_meta=alias) == session
        assert host.host.open[session].session.branch.row.config["client"] == {"name": "ann", "version": "1"}


async def test_an_imported_session_that_is_its_own_subagent_is_loaded(tmp_path: Path) -> None:
    times = {"created_ms": 1, "updated_ms": 1}
    session = {"id": "loop", "parent_id": "loop", "forked_from": None, "cwd": "/", "title": "", "title_by_user": False}
    entry = {"id": 1, "parent": None, "session": "loop", "turn": 1, "model": "", "usage": None, "cost": None}
    body = {"parts": [{"type": "text", "text": "hello"}], "message_id": "m", "cut": None, "name": None}
    lines: Sequence[dict[str, object]] = (
        {"type": "crow", "format": 1},
        {"type": "conversation", "created_ms": 1},
        {"type": "session", "leaf": 1, "turn": 1, "listed": True, "archived": False} | session | times,
        {"type": "entry", "kind": "user", "body": body, "estimate": 6, "created_ms": 1} | entry,
        {"type": "end", "lines": 4, "sha256": None},
    )
    file = tmp_path / "loop.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    async with shared(tmp_path) as host:
        ann = await host.client(capabilities={"subagents": {}})
        await open_admin(await host.host.store()).import_file(file, ImportDefaults(model="", mode="ask"))
        await ann.open("session/load", "loop")
        assert {each["sessionId"] for each in ann.updates} == {"loop"}


async def test_a_watcher_whose_load_is_cancelled_still_gets_updates(tmp_path: Path) -> None:
    stopped = anyio.Event()
    async with shared(tmp_path, Say(text=("Hi.",)), Say(text=("Yes.",))) as host:
        ann = await host.client()
        bob = await host.client(requester=Requester(view=partial(Halting, on_stop=stopped.set)))
        session = await ann.new()
        await ann.prompt(session, "hello")
        await bob.open("session/resume", session, _meta={"crow": {"watch": True}})
        load = asyncio.create_task(bob.open("session/load", session))
        await stopped.wait()
        load.cancel()
        await asyncio.wait([load])
        await ann.prompt(session, "really?")
        await bob.until_kind("agent_message_chunk", "Yes.")

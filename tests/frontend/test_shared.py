"""Several clients on one session of a shared host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.frontend.frames import RequestError
from tests.support.scripted_model import Say, call
from tests.support.shared_host import Shared, Watcher, shared, transcript

pytestmark = pytest.mark.anyio


async def test_a_client_that_joins_a_running_turn_sees_everything_once_and_in_order(tmp_path: Path) -> None:
    hold = anyio.Event()
    first, second = Say(text=("one ", "two ")), Say(text=("three ", "four "), hold=hold)
    async with shared(tmp_path, first, second) as host:
        writer = await host.client()
        session = await writer.new()
        await writer.prompt(session, "count")
        turn = asyncio.create_task(writer.prompt(session, "more"))
        await second.reached.wait()
        await writer.until_kind("agent_message_chunk", "four")
        watcher = await host.client()
        await watcher.open("session/load", session)
        assert watcher.text() == "one two three four "
        assert watcher.text("user_message_chunk") == "countmore"
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        await watcher.until_kind("session_info_update", "end_turn")
        assert watcher.text() == writer.text() == "one two three four "


async def test_each_client_sees_the_prompts_and_answers_of_the_others(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("Hi.",)), Say(text=("Yes.",))) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        await ann.prompt(session, "hello")
        await bob.until_kind("session_info_update", "end_turn")
        await bob.prompt(session, "really?")
        await ann.until_kind("session_info_update", "end_turn")
        assert (ann.text("user_message_chunk"), bob.text("user_message_chunk")) == ("really?", "hello")
        assert ann.text() == bob.text() == "Hi.Yes."


async def test_a_dropped_connection_cancels_nothing(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("on ", "and on"), hold=hold)
    async with shared(tmp_path, say) as host:
        writer = await host.client()
        session = await writer.new()
        turn = asyncio.create_task(writer.prompt(session, "go"))
        await say.reached.wait()
        await writer.drop()
        with pytest.raises(ConnectionError):
            await turn
        assert host.host.open[session].session.has_turn
        again = await host.client()
        await again.open("session/load", session)
        hold.set()
        await again.until_kind("session_info_update", "end_turn")
        assert again.text() == "on and on"


async def test_closing_a_session_leaves_it_to_the_other_client_and_the_last_one_closes_it(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("Hi.",))) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        await ann.call("session/close", sessionId=session)
        with pytest.raises(RequestError, match="Session not found"):
            await ann.prompt(session, "hello")
        assert (await bob.prompt(session, "hello"))["stopReason"] == "end_turn"
        await bob.call("session/close", sessionId=session)
        assert host.host.open == {}


async def test_a_client_that_has_not_opened_a_session_can_do_nothing_with_it(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("Hi.",))) as host:
        ann, eve = await host.client(), await host.client()
        session = await ann.new()
        for method, params in (
            ("session/prompt", {"prompt": [{"type": "text", "text": "hi"}]}),
            ("session/set_mode", {"modeId": "auto"}),
            ("session/close", {}),
        ):
            with pytest.raises(RequestError, match="Session not found"):
                await eve.call(method, sessionId=session, **params)
        await eve.connection.cancel(session)
        assert (await ann.prompt(session, "hello"))["stopReason"] == "end_turn"


async def test_a_change_of_the_mode_reaches_all_clients(tmp_path: Path) -> None:
    async with shared(tmp_path) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        await ann.call("session/set_mode", sessionId=session, modeId="plan")
        await bob.until_kind("current_mode_update", "plan")
        await bob.call("session/set_title", sessionId=session, title="Ours")
        await ann.until_kind("session_info_update", "Ours")


async def test_one_client_that_does_not_read_slows_no_other(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=tuple(f"{number} " for number in range(200)))) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        await ann.until_kind("available_commands_update")
        bob.blocked = anyio.Event()
        before = len(bob.updates)
        assert (await ann.prompt(session, "count"))["stopReason"] == "end_turn"
        assert ann.text() == "".join(f"{number} " for number in range(200))
        assert len(bob.updates) == before
        bob.blocked.set()
        await bob.until_kind("session_info_update", "end_turn")
        assert bob.text() == ann.text()


async def test_many_clients_see_the_same(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("a ", "b ", "c"))) as host:
        clients = [await host.client() for _ in range(64)]
        session = await clients[0].new()
        for client in clients[1:]:
            await client.open("session/resume", session)
        await clients[0].prompt(session, "go")
        for client in clients[1:]:
            await client.until_kind("session_info_update", "end_turn")
        assert {client.text() for client in clients} == {"a b c"}


_ = (Any, Shared, Watcher, call, transcript)

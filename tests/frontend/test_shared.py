"""Several clients on one session of a shared host."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.domain.events import FormQuestion
from crow.frontend.frames import RequestError
from crow.frontend.host import ServerDependencies
from crow.frontend.sessions import Requester
from tests.support.scripted_model import Say, call
from tests.support.shared_host import shared, transcript

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


def write(name: str) -> Say:
    return Say(calls=(call("write_file", path=name, content="x"),))


ALLOW = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
REJECT = {"outcome": {"outcome": "selected", "optionId": "reject_once"}}


async def never(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep_forever()
    raise AssertionError


async def test_a_permission_is_asked_of_all_and_the_first_answer_counts(tmp_path: Path) -> None:
    async with shared(tmp_path, write("a.txt"), Say(text=("Done.",))) as host:
        ann, bob, watcher = await host.client(), await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        await watcher.open("session/resume", session, _meta={"crow": {"watch": True}})
        ann.on_request = never

        async def answer(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            await ann.asked.wait()
            return ALLOW

        bob.on_request = answer
        assert (await ann.prompt(session, "write"))["stopReason"] == "end_turn"
        assert (host.cwd / "a.txt").read_text() == "x"
        assert [len(client.requests) for client in (ann, bob, watcher)] == [1, 1, 0]
        assert (ann.withdrawn, bob.withdrawn) == (1, 0)
        await watcher.until_kind("session_info_update", "end_turn")
        for client in (ann, bob, watcher):
            assert [value for kind, _, value in transcript(client.updates) if kind == "call"] == ["completed"]


async def test_a_question_waits_for_a_client_that_comes(tmp_path: Path) -> None:
    async with shared(tmp_path, write("a.txt"), Say(text=("Done.",))) as host:
        ann = await host.client()
        session = await ann.new()
        ann.on_request = never
        turn = asyncio.create_task(ann.prompt(session, "write"))
        await ann.asked.wait()
        await ann.drop()
        with pytest.raises(ConnectionError):
            await turn
        bob = await host.client()
        await bob.open("session/load", session)
        await bob.until_kind("session_info_update", "end_turn")
        assert len(bob.requests) == 1
        kinds = [each["sessionUpdate"] for each in bob.kinds_and_texts()]
        assert kinds.index("tool_call") < kinds.index("tool_call_update")
        assert (host.cwd / "a.txt").read_text() == "x"


async def test_a_client_that_drops_or_fails_while_it_is_asked_counts_as_not_asked(tmp_path: Path) -> None:
    async with shared(tmp_path, write("a.txt"), Say(text=("Done.",))) as host:
        ann, bob, eve = await host.client(), await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        await eve.open("session/resume", session)
        ann.on_request = never

        async def fail(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            raise RequestError(-32603, "No dialog.")

        eve.on_request = fail

        async def answer(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            await ann.asked.wait()
            await eve.asked.wait()
            await ann.drop()
            return REJECT

        bob.on_request = answer
        with pytest.raises(ConnectionError):
            await ann.prompt(session, "write")
        await bob.until_kind("session_info_update", "end_turn")
        assert [value for kind, _, value in transcript(bob.updates) if kind == "call"] == ["failed"]
        assert not (host.cwd / "a.txt").exists()


async def test_a_question_that_nobody_can_answer_ends_after_the_time_for_answers(tmp_path: Path) -> None:
    def impatient(dependencies: ServerDependencies) -> ServerDependencies:
        return replace(dependencies, user_timeout_s=0.01)

    async with shared(tmp_path, write("a.txt"), Say(text=("Nobody.",)), change=impatient) as host:
        ann = await host.client()
        session = await ann.new()
        ann.on_request = never
        assert (await ann.prompt(session, "write"))["stopReason"] == "end_turn"
        assert ann.text() == "Nobody."
        turn = host.host.open[session].clients.elicit(FormQuestion(message="Which?", schema={"properties": {}}))
        assert (await turn).action == "cancel"


async def test_a_form_is_asked_of_all_that_show_forms(tmp_path: Path) -> None:
    forms: dict[str, Any] = {"elicitation": {"form": {}}}
    async with shared(tmp_path) as host:
        ann, bob, eve = (
            await host.client(capabilities=forms),
            await host.client(capabilities=forms),
            await host.client(),
        )
        session = await ann.new()
        await bob.open("session/resume", session)
        await eve.open("session/resume", session)
        ann.on_request = never

        async def answer(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            await ann.asked.wait()
            return {"action": "accept", "content": {"branch": "main"}}

        bob.on_request = answer
        question = FormQuestion(message="Which?", schema={"properties": {"branch": {"type": "string"}}})
        answered = await host.host.open[session].clients.elicit(question)
        assert (answered.action, answered.content) == ("accept", {"branch": "main"})
        assert [len(client.requests) for client in (ann, bob, eve)] == [1, 1, 0]


async def test_cancelling_the_turn_withdraws_the_question_from_all(tmp_path: Path) -> None:
    async with shared(tmp_path, write("a.txt")) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        ann.on_request = bob.on_request = never
        turn = asyncio.create_task(ann.prompt(session, "write"))
        await ann.asked.wait()
        await bob.asked.wait()
        await bob.connection.cancel(session)
        assert (await turn)["stopReason"] == "cancelled"
        await ann.until_kind("tool_call_update", "failed")
        await bob.until_kind("session_info_update", "cancelled")
        assert (ann.withdrawn, bob.withdrawn) == (1, 1)


async def test_a_watcher_can_change_nothing(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("Hi.",))) as host:
        ann, eve = await host.client(), await host.client()
        session = await ann.new()
        await eve.open("session/load", session, _meta={"crow": {"watch": True}})
        for method, params in (
            ("session/prompt", {"prompt": [{"type": "text", "text": "hi"}]}),
            ("session/set_mode", {"modeId": "auto"}),
            ("session/set_config_option", {"configId": "mode", "value": "auto"}),
            ("session/set_title", {"title": "Mine"}),
            ("_session/steering", {"prompt": [{"type": "text", "text": "hi"}]}),
        ):
            with pytest.raises(RequestError, match="only watches"):
                await eve.call(method, sessionId=session, **params)
        await eve.connection.cancel(session)
        await eve.call("session/close", sessionId=session)
        assert (await ann.prompt(session, "hello"))["stopReason"] == "end_turn"


async def test_a_prompt_that_is_sent_again_after_a_broken_connection_runs_once(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("Once.",), hold=hold)
    async with shared(tmp_path, say) as host:
        ann = await host.client(requester=Requester(connection_id="c1"))
        session = await ann.new()
        turn = asyncio.create_task(ann.prompt(session, "go"))
        await say.reached.wait()
        await ann.drop()
        with pytest.raises(ConnectionError):
            await turn
        again = await host.client(requester=Requester(connection_id="c1"))
        await again.open("session/resume", session)  # request 2; the next one has the id of the first prompt, 3
        turn = asyncio.create_task(again.prompt(session, "go"))
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        assert len(host.model.requests) == 1


async def test_a_session_that_nobody_has_open_is_closed_after_its_turn(tmp_path: Path) -> None:
    def hasty(dependencies: ServerDependencies) -> ServerDependencies:
        return replace(dependencies, unattended_s=0.0)

    hold = anyio.Event()
    say = Say(text=("Hi.",), hold=hold)
    async with shared(tmp_path, say, Say(text=("Again.",)), change=hasty) as host:
        ann = await host.client()
        session = await ann.new()
        turn = asyncio.create_task(ann.prompt(session, "go"))
        await say.reached.wait()
        await ann.drop()
        with pytest.raises(ConnectionError):
            await turn
        assert session in host.host.open
        hold.set()
        while host.host.open:  # noqa: ASYNC110 - the host has no event for it
            await anyio.sleep(0.001)
        bob = await host.client()
        await bob.open("session/load", session)
        assert bob.text() == "Hi."

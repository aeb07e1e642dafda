"""Several clients on one session of a shared host."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from crow.domain.errors import StoreError
from crow.domain.events import FormQuestion
from crow.frontend import prompts as prompts_module
from crow.frontend import queue
from crow.frontend.host import ServerDependencies
from crow.frontend.requester import Requester
from crow.frontend.v2 import VersionTwo
from crow.protocol.frames import RequestError
from crow.store import Access, Store
from crow.store.principals import PrincipalStore
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
        assert host.host.open[session].session.queue
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


async def test_a_refusal_of_a_client_that_only_lingers_leaves_the_question_to_the_person(tmp_path: Path) -> None:
    async with shared(tmp_path, write("a.txt"), Say(text=("Done.",)), write("b.txt"), Say(text=("Done.",))) as host:
        ann, lingering = await host.client(), await host.client()
        session = await ann.new()
        await lingering.open("session/resume", session)

        async def refuse(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            return REJECT

        async def think(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            await lingering.asked.wait()
            await anyio.lowlevel.checkpoint()
            return ALLOW

        ann.on_request, lingering.on_request = think, refuse
        assert (await ann.prompt(session, "write"))["stopReason"] == "end_turn"
        assert (host.cwd / "a.txt").read_text() == "x"
        ann.on_request = refuse  # the person's own refusal counts, and so does that of the last one asked
        assert (await ann.prompt(session, "write"))["stopReason"] == "end_turn"
        assert not (host.cwd / "b.txt").exists()


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


@pytest.mark.parametrize("version", [1, 2])
async def test_a_prompt_to_another_session_is_not_taken_for_the_original_prompt(tmp_path: Path, version: int) -> None:
    async with shared(tmp_path, Say(text=("First.",)), Say(text=("Other.",))) as host:
        kind = VersionTwo if version == 2 else None
        ann = await host.client(requester=Requester(connection_id="c1"), version=version, negotiate=kind)
        session, other = await ann.new(), await ann.new()
        await ann.prompt(session, "go")  # request 4
        await ann.drop()
        again = await host.client(requester=Requester(connection_id="c1"), version=version, negotiate=kind)
        await again.open("session/resume", session)
        await again.open("session/resume", other)
        await again.prompt(other, "go")  # request 4
        await again.until_kind("agent_message_chunk", "Other.")


async def test_another_prompt_with_the_id_of_an_earlier_request_runs(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("First.",)), Say(text=("Second.",))) as host:
        ann = await host.client(requester=Requester(connection_id="c1"))
        session = await ann.new()
        await ann.prompt(session, "go")  # request 3
        await ann.drop()
        again = await host.client(requester=Requester(connection_id="c1"))
        await again.open("session/resume", session)
        await again.prompt(session, "go on")  # request 3
        await again.until_kind("agent_message_chunk", "Second.")


async def test_only_the_oldest_results_are_dropped_if_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "MAX_KEPT", 2)
    async with shared(tmp_path, *(Say(text=("Hi.",)) for _ in range(4))) as host:
        ann = await host.client(requester=Requester(connection_id="c1"))
        session = await ann.new()
        for _ in range(4):  # requests 3 to 6
            await ann.prompt(session, "go")
        await ann.drop()
        again = await host.client(requester=Requester(connection_id="c1"))
        await again.open("session/resume", session)
        await again.call("session/list")  # request 3
        assert (await again.prompt(session, "go"))["stopReason"] == "end_turn"  # request 4 again
        assert len(host.model.requests) == 4


async def test_a_session_stays_open_for_the_next_client_if_the_connection_of_the_first_one_breaks(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path, Say(text=("One.",)), Say(text=("Two.",))) as host:
        ann = await host.client()
        session = await ann.new()
        await ann.prompt(session, "go")
        await ann.call("session/close", sessionId=session)
        eve, bob = await host.client(), await host.client()
        eve.blocked = anyio.Event()
        first = asyncio.create_task(eve.open("session/load", session))
        while not host.host.open:
            await anyio.lowlevel.checkpoint()
        second = asyncio.create_task(bob.open("session/load", session))
        await anyio.wait_all_tasks_blocked()
        await eve.drop()
        await asyncio.gather(first, return_exceptions=True)
        await second
        await anyio.wait_all_tasks_blocked()
        assert (await bob.prompt(session, "go on"))["stopReason"] == "end_turn"


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


FILES: dict[str, Any] = {"fs": {"readTextFile": True, "writeTextFile": True}}


async def test_only_the_client_whose_prompt_runs_serves_files(tmp_path: Path) -> None:
    def read() -> Say:
        return Say(calls=(call("read_file", path="a.txt"),))

    async with shared(tmp_path, read(), Say(text=("1",)), read(), Say(text=("2",))) as host:
        (host.cwd / "a.txt").write_text("on disk\n")
        ann, bob = await host.client(capabilities=FILES), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)

        async def serve_file(method: str, _params: dict[str, Any]) -> dict[str, Any]:
            assert method == "fs/read_text_file"
            return {"content": "in the editor\n"}

        ann.on_request = serve_file
        await ann.prompt(session, "read")
        await bob.prompt(session, "read")
        texts = [
            str(each) for request in host.model.requests for each in request.messages if "ToolMessage" in str(each)
        ]
        assert "in the editor" in texts[0]
        assert "on disk" in texts[-1]
        assert [method for method, _ in ann.requests] == ["fs/read_text_file"]
        assert bob.requests == []


async def test_a_file_is_written_to_the_disk_if_its_editor_drops_meanwhile(tmp_path: Path) -> None:
    async with shared(tmp_path, write("a.txt"), Say(text=("Done.",))) as host:
        ann, bob = await host.client(capabilities=FILES), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)

        async def drop(method: str, _params: dict[str, Any]) -> dict[str, Any]:
            if method == "session/request_permission":
                return ALLOW
            assert method == "fs/write_text_file"
            await ann.drop()
            raise ConnectionError

        ann.on_request = drop
        with pytest.raises(ConnectionError):
            await ann.prompt(session, "write")
        await bob.until_kind("session_info_update", "end_turn")
        assert (host.cwd / "a.txt").read_text() == "x"


async def test_clients_of_both_versions_share_a_session(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("Hello ", "you."), hold=hold)
    async with shared(tmp_path, say, Say(text=("Bye.",))) as host:
        old = await host.client()
        session = await old.new()
        turn = asyncio.create_task(old.prompt(session, "hi"))
        await say.reached.wait()
        await old.until_kind("agent_message_chunk", "you.")
        new = await host.client(negotiate=VersionTwo, version=2)
        await new.open("session/resume", session, replayFrom={"type": "start"})
        states = [each["state"] for each in new.kinds_and_texts() if each["sessionUpdate"] == "state_update"]
        assert states[-1] == "running"
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        await new.until_kind("state_update", "idle")
        answer = await new.prompt(session, "bye")
        assert answer["messageId"]
        await old.until_kind("session_info_update", "end_turn")
        assert old.text("user_message_chunk") == "bye"
        assert old.text() == "Hello you.Bye."
        kinds = [each["sessionUpdate"] for each in new.kinds_and_texts()]
        assert kinds.count("user_message") == 2


async def test_a_client_that_comes_back_finds_its_session_as_it_was(tmp_path: Path) -> None:
    async with shared(tmp_path) as host:
        ann = await host.client()
        session = await ann.new()
        before = host.host.open[session]
        await ann.drop()
        again = await host.client()
        await again.open("session/resume", session)
        assert host.host.open[session] is before
        (host.cwd / "below").mkdir()
        await again.call("session/resume", sessionId=session, cwd=str(host.cwd / "below"), mcpServers=[])
        assert host.host.open[session] is not before
        assert host.host.open[session].session.branch.row.cwd == str(host.cwd / "below")


async def test_subagents_are_shown_to_all_clients_also_to_one_that_joins(tmp_path: Path) -> None:
    capabilities: dict[str, Any] = {"subagents": {}}
    hold = anyio.Event()
    order = call("task", description="Look", prompt="Look around.")
    work = Say(text=("Look", "ing."), hold=hold)
    async with shared(tmp_path, Say(calls=(order,)), work, Say(text=("Done.",))) as host:
        ann, bob = await host.client(capabilities=capabilities), await host.client(capabilities=capabilities)
        session = await ann.new()
        await bob.open("session/resume", session)
        turn = asyncio.create_task(ann.prompt(session, "go"))
        await work.reached.wait()
        eve = await host.client(capabilities=capabilities)
        await eve.open("session/load", session)
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        for client in (bob, eve):
            await client.until_kind("session_info_update", "end_turn")
        for client in (ann, bob, eve):
            (own,) = {each["sessionId"] for each in client.updates} - {session}
            texts = [each["update"] for each in client.updates if each["sessionId"] == own]
            assert transcript(texts)[0][2] == "Looking."
            states = [each for each in client.kinds_and_texts() if each["sessionUpdate"] == "subagent_update"]
            assert states[-1]["state"]["state"] == "idle"


@pytest.mark.parametrize("seed", range(3))
async def test_clients_that_come_and_go_in_any_order_leave_the_session_in_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    says = [Say(text=(f"answer {number} ", "and ", "more")) for number in range(200)]
    async with shared(tmp_path, *says) as host:
        first = await host.client()
        session = await first.new()
        clients, pending = [first], []
        for number in range(60):
            client = chance.choice(clients)
            match chance.randrange(7):
                case 0 | 1:
                    pending.append(asyncio.create_task(client.prompt(session, f"prompt {number}")))
                case 2:
                    clients.append(await host.client())
                    method = chance.choice(("session/load", "session/resume"))
                    pending.append(asyncio.create_task(clients[-1].open(method, session)))
                case 3 if len(clients) > 1:
                    clients.remove(client)
                    pending.append(asyncio.create_task(client.drop()))
                case 4:
                    await client.connection.cancel(session)
                case 5:
                    pending.append(asyncio.create_task(client.open("session/load", session)))
                case 6:
                    pending.append(asyncio.create_task(client.call("session/close", sessionId=session)))
            for _ in range(chance.randrange(20)):
                await anyio.lowlevel.checkpoint()
        for answered in await asyncio.gather(*pending, return_exceptions=True):
            assert not isinstance(answered, BaseException) or isinstance(answered, RequestError | ConnectionError)
        last, other = await host.client(), await host.client()
        await last.open("session/load", session)
        await other.open("session/load", session)
        assert transcript(last.updates) == transcript(other.updates)
        assert (await last.prompt(session, "the end"))["stopReason"] == "end_turn"
        await other.until_kind("session_info_update", "end_turn")
        assert other.text().endswith("and more")
        assert len({name for kind, name, _ in transcript(other.updates) if kind == "user_message_chunk"}) == len(
            [name for kind, name, _ in transcript(other.updates) if kind == "user_message_chunk"]
        )


async def test_a_client_for_which_too_much_waits_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_WAITING_BYTES", 12_000)
    async with shared(tmp_path, *(Say(text=("word " * 1_000,)) for _ in range(3))) as host:
        ann, bob = await host.client(), await host.client()
        session = await ann.new()
        await bob.open("session/resume", session)
        bob.blocked = anyio.Event()
        for _ in range(3):
            assert (await ann.prompt(session, "go"))["stopReason"] == "end_turn"
        assert [attachment.client is not None for attachment in host.host.open[session].clients.queues] == [True]
        assert len(ann.text()) == 15_000
        bob.blocked.set()
        with pytest.raises(ConnectionError):
            await bob.prompt(session, "too late")


class Revocable(PrincipalStore):
    """The store, as a user sees it whose access can be taken away."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, None)
        self.is_revoked = False

    async def access(self, session_id: str) -> Access | None:
        return None if self.is_revoked else await super().access(session_id)


async def test_a_client_whose_access_is_taken_away_sees_and_answers_nothing_more(tmp_path: Path) -> None:
    views: list[Revocable] = []

    def view(store: Store) -> Revocable:
        views.append(Revocable(store))
        return views[-1]

    async with shared(tmp_path, write("a.txt"), Say(text=("Secret.",))) as host:
        ann, eve = await host.client(), await host.client(requester=Requester(view=view))
        session = await ann.new()
        await eve.open("session/resume", session)

        async def answer(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            views[0].is_revoked = True
            return ALLOW

        eve.on_request = answer

        async def later(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            await eve.asked.wait()
            while len(host.host.open[session].clients.queues) > 1:
                await anyio.lowlevel.checkpoint()
            return REJECT

        ann.on_request = later
        await ann.prompt(session, "write")
        assert not (host.cwd / "a.txt").exists()
        assert "Secret." not in str(eve.updates)
        with pytest.raises(RequestError, match="Session not found"):
            await eve.prompt(session, "hello")


class Unreadable(PrincipalStore):
    """A store that cannot be read while `is_broken` is set."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, None)
        self.is_broken = False

    async def access(self, session_id: str) -> Access | None:
        if self.is_broken:
            raise StoreError("The database is locked.")
        return await super().access(session_id)


async def test_an_answer_counts_for_nothing_if_the_access_of_its_client_cannot_be_checked(tmp_path: Path) -> None:
    views: list[Unreadable] = []

    def view(store: Store) -> Unreadable:
        views.append(Unreadable(store))
        return views[-1]

    async def answer(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
        views[0].is_broken = True
        return ALLOW

    async with shared(tmp_path, write("a.txt"), Say(text=("Done.",))) as host:
        ann, eve = await host.client(), await host.client(requester=Requester(view=view))
        session = await ann.new()
        await eve.open("session/resume", session)
        eve.on_request = answer

        async def later(_method: str, _params: dict[str, Any]) -> dict[str, Any]:
            await eve.asked.wait()
            return REJECT

        ann.on_request = later
        assert (await ann.prompt(session, "write"))["stopReason"] == "end_turn"
        assert not (host.cwd / "a.txt").exists()

"""Clients repeat prompts with `_meta.crow.promptId`: on the same host, on another node, and at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from crow.domain.errors import NetworkError
from crow.domain.messages import Text, Usage
from crow.frontend.v2 import VersionTwo
from crow.protocol.frames import RequestError
from crow.protocol.params import prompt_name
from crow.store import Store
from crow.store.postgres.store import PostgresStore
from tests.frontend.test_cursors import CURSORS, cursor_of, reload, seen
from tests.frontend.test_nodes import follows, nodes, with_waiting_prompt
from tests.support.postgres import new_database
from tests.support.scripted_model import Say
from tests.support.shared_host import Shared, Watcher, shared

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The module's database and its tests share an event loop."""
    return "asyncio"


@pytest.fixture(scope="module")
async def database() -> AsyncIterator[str]:
    """A database for the tests of this module."""
    async with new_database() as url:
        yield url


async def named(client: Watcher, session: str, text: str, name: object = "p1", **crow: Any) -> Any:
    """Send a prompt with a name."""
    prompt, meta = [{"type": "text", "text": text}], {"crow": {"promptId": name, **crow}}
    return await client.call("session/prompt", sessionId=session, prompt=prompt, _meta=meta)


async def both(host: Shared, version: int = 1) -> Watcher:
    return await host.client(version=version, negotiate=VersionTwo if version == 2 else None)


async def prompts_in(host: Shared, session: str) -> list[str]:
    """The prompts and answers that a new client is shown."""
    return [text for _, _, text in await reload(host, session)]


async def until_waiting(store: Store, session: str, count: int = 1) -> None:
    while len(await store.queued(session)) < count:  # noqa: ASYNC110
        await anyio.sleep(0.01)


async def test_a_repeat_on_another_node_joins_the_running_turn(tmp_path: Path, database: str) -> None:
    say = Say(text=("One.",), usage=Usage(input_tokens=10, output_tokens=2), hold=anyio.Event())
    async with nodes(tmp_path, database, (say,)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        first = asyncio.create_task(named(ann, session, "go"))
        await say.reached.wait()
        await bob.open("session/load", session)
        second = asyncio.create_task(named(bob, session, "go"))
        third = asyncio.create_task(named(bob, session, "go"))
        assert say.hold is not None
        say.hold.set()
        answers = [await each for each in (first, second, third)]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0]["usage"]["inputTokens"] == 10
        assert await prompts_in(other, session) == ["go", "One."]
        assert bob.text() == "One."
        assert not other.model.requests
        # After the end, on both nodes, over the old and over a new connection.
        for client in (ann, bob, await other.client()):
            shown = len(client.updates)
            if client not in (ann, bob):
                await client.open("session/resume", session)
            assert await named(client, session, "go") == answers[0]
            assert not [each for each in client.updates[shown:] if "chunk" in each["update"]["sessionUpdate"]]
        assert len(one.model.requests) == 1


async def test_a_repeat_joins_a_prompt_that_waits_on_another_node(tmp_path: Path, database: str) -> None:
    first = Say(text=("One.",), hold=anyio.Event())
    async with nodes(tmp_path, database, (first,), (Say(text=("Two.",)),)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        turn = asyncio.create_task(ann.prompt(session, "a"))
        await first.reached.wait()
        waiting = asyncio.create_task(named(bob, session, "b"))
        await until_waiting(await one.host.store(), session)
        repeat = asyncio.create_task(named(ann, session, "b"))
        again = asyncio.create_task(named(bob, session, "b"))
        assert first.hold is not None
        first.hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        assert await waiting == await repeat == await again
        await follows(one, ann, session)
        assert await prompts_in(one, session) == ["a", "One.", "b", "Two."]
        assert [text for _, _, text in seen(ann.updates)] == ["One.", "Two."]
        assert len(other.model.requests) == 1


async def test_two_nodes_at_once_run_a_prompt_once(tmp_path: Path, database: str) -> None:
    says = tuple(Say(text=(f"{number}.",)) for number in range(10))
    async with nodes(tmp_path, database, says, says) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        for number in range(10):
            requests = [named(client, session, f"go {number}", f"p{number}") for client in (ann, bob)]
            answers = await asyncio.gather(*requests)
            assert answers[0] == answers[1]
        assert len(one.model.requests) + len(other.model.requests) == 10
        shown = [text for text in await prompts_in(one, session) if text.startswith("go")]
        assert shown == [f"go {number}" for number in range(10)]


@pytest.mark.parametrize("command", ["/undo", "/context"])
async def test_a_repeated_command_runs_once(tmp_path: Path, database: str, command: str) -> None:
    says = (Say(text=("One.",)), Say(text=("Two.",)))
    async with nodes(tmp_path, database, says) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await ann.prompt(session, "a")
        await ann.prompt(session, "b")
        await bob.open("session/load", session)
        assert await named(ann, session, command) == await named(bob, session, command)
        assert await named(ann, session, command) == {"stopReason": "end_turn"}
        store = await one.host.store()
        kinds = [type(entry.body).__name__ async for batch in store.history(session) for entry in batch]
        assert kinds.count("Command") == 1
        assert kinds.count("User") == (1 if command == "/undo" else 2)


async def test_a_repeat_of_a_cancelled_prompt_is_cancelled_too(tmp_path: Path, database: str) -> None:
    first = Say(text=("One.",), hold=anyio.Event())
    async with nodes(tmp_path, database, (first,), ()) as (one, other):
        _, bob, session, turn, waiting = await with_waiting_prompt(one, other, first)
        named_one = asyncio.create_task(named(bob, session, "c"))
        await until_waiting(await other.host.store(), session, 2)
        await follows(other, bob, session)
        opened = other.host.open[session].session
        for prompt in (*opened.queue.waiting, opened.queue[0]):
            opened.withdraw(prompt)  # what $/cancel_request does
        assert (await waiting)["stopReason"] == (await named_one)["stopReason"] == "cancelled"
        assert first.hold is not None
        first.hold.set()
        await turn
        assert (await named(bob, session, "c"))["stopReason"] == "cancelled"
        ann = await one.client()
        await ann.open("session/resume", session)
        assert (await named(ann, session, "c"))["stopReason"] == "cancelled"
        assert not other.model.requests


async def test_a_cancelled_repeat_cancels_the_turn_of_the_other_node(tmp_path: Path, database: str) -> None:
    say = Say(text=("One.",), hold=anyio.Event())
    async with nodes(tmp_path, database, (say,)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        first = asyncio.create_task(named(ann, session, "go"))
        await say.reached.wait()
        await bob.open("session/load", session)
        hosted, blocks = other.host.open[session].session, [{"type": "text", "text": "go"}]
        name = prompt_name({"prompt": blocks, "_meta": {"crow": {"promptId": "p1"}}})
        joined = anyio.Event()
        repeat = hosted.submit((Text(text="go"),), None, name)
        repeat.repeat.on_joined = lambda _known: joined.set()
        second = asyncio.create_task(hosted.answer(repeat))
        await joined.wait()
        await anyio.lowlevel.checkpoint()
        hosted.withdraw(repeat)  # what $/cancel_request does
        assert await second == "cancelled"
        assert (await first)["stopReason"] == "cancelled"


async def test_a_repeat_has_the_error_of_the_first_prompt(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(error=NetworkError("gone")), Say(text=("Two.",))) as host:
        client = await host.client()
        session = await client.new()
        errors = []
        for _ in range(2):
            with pytest.raises(RequestError) as failed:
                await named(client, session, "go")
            errors.append(str(failed.value))
        assert errors[0] == errors[1]
        assert len(host.model.requests) == 1


async def test_a_repeat_of_an_interrupted_prompt_says_so_and_does_not_run(tmp_path: Path, database: str) -> None:
    async with nodes(tmp_path, database, (), ()) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        dead = await PostgresStore.open(database)
        blocks = [{"type": "text", "text": "go"}]
        name = prompt_name({"prompt": blocks, "_meta": {"crow": {"promptId": "p1"}}})
        await dead.take_turn(session, "u1", leaf=None, parts=(Text(text="go"),), name=name)
        await bob.open("session/load", session)
        repeat = asyncio.create_task(named(bob, session, "go"))
        await anyio.lowlevel.checkpoint()
        await dead.close()
        for answer in (repeat, named(bob, session, "go"), named(ann, session, "go")):
            with pytest.raises(RequestError, match=r"was interrupted.*another prompt to continue"):
                await answer


async def test_the_same_name_with_other_content_is_an_error(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("One.",), hold=hold)
    async with shared(tmp_path, say) as host:
        client = await host.client()
        session = await client.new()
        first = asyncio.create_task(named(client, session, "go"))
        await say.reached.wait()
        with pytest.raises(RequestError, match='"p1", the id of an earlier prompt of this session with other content'):
            await named(client, session, "stop")
        hold.set()
        await first
        with pytest.raises(RequestError, match="other content"):
            await named(client, session, "stop")
        assert await prompts_in(host, session) == ["go", "One."]


async def test_a_repeat_after_undo_and_in_a_reopened_session_does_not_run(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("One.",)), Say(text=("Two.",))) as host:
        client = await host.client()
        session = await client.new()
        answer = await named(client, session, "go", metadata={"a": 1})
        await client.prompt(session, "/undo")
        await client.call("session/close", sessionId=session)
        await client.open("session/load", session, _meta={"crow": {"metadata": {"a": 2}}})
        assert await named(client, session, "go", metadata={"a": 1}) == answer
        assert (await (await host.host.store()).session(session)).metadata == {"a": 2}
        fork = await client.open("session/fork", session)
        assert (await named(client, fork["sessionId"], "go"))["stopReason"] == "end_turn"
        assert len(host.model.requests) == 2


async def test_a_repeated_steering_prompt_is_added_once(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("One.",), hold=hold)
    async with shared(tmp_path, say, Say(text=("Two.",))) as host:
        client = await host.client()
        session = await client.new()
        turn = asyncio.create_task(client.prompt(session, "go"))
        await say.reached.wait()
        params = {"sessionId": session, "prompt": [{"type": "text", "text": "and"}]}
        meta = {"crow": {"promptId": "s1"}}
        for _ in range(2):
            assert await client.call("_session/steering", **params, _meta=meta) == {"outcome": "injected"}
        hold.set()
        await turn
        assert await client.call("session/prompt", **params, _meta=meta) | {"usage": None} == {
            "stopReason": "end_turn",
            "usage": None,
        }
        assert (await prompts_in(host, session)).count("and") == 1
        assert len(host.model.requests) == 2


@pytest.mark.parametrize("name", [5, "", "x" * 201, "a\nb", "\x00", ["p"], True])
async def test_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: object) -> None:
    async with shared(tmp_path, Say(text=("One.",))) as host:
        client = await host.client()
        session = await client.new()
        with pytest.raises(RequestError, match=r"_meta.crow.promptId is .*; expected a string"):
            await named(client, session, "go", name)
        assert not host.model.requests


async def test_in_version_2_a_repeat_answers_with_the_first_message(tmp_path: Path, database: str) -> None:
    say = Say(text=("One.",), hold=anyio.Event())
    async with nodes(tmp_path, database, (say,)) as (one, other):
        ann, bob = await both(one, 2), await both(other, 2)
        session = await ann.new()
        first = await named(ann, session, "go")
        await say.reached.wait()
        await bob.open("session/resume", session, replayFrom={"type": "start"})
        assert await named(bob, session, "go") == await named(ann, session, "go") == first
        assert say.hold is not None
        say.hold.set()
        await bob.until_kind("state_update", "end_turn")
        await ann.until_kind("state_update", "end_turn")
        assert await named(bob, session, "go") == await named(ann, session, "go") == first
        for client in (ann, bob):
            shown = [each["messageId"] for each in client.kinds_and_texts() if each["sessionUpdate"] == "user_message"]
            assert shown == [first["messageId"]]
        assert len(one.model.requests) == 1


@pytest.mark.parametrize("text", ["go", "/context"])
async def test_a_client_that_comes_back_to_repeat_its_prompt_does_not_get_it_back(tmp_path: Path, text: str) -> None:
    """Another server does not know that it is the same client."""
    async with shared(tmp_path, Say(text=("One.",))) as host:
        ann = await host.client(capabilities=CURSORS)
        opened = await ann.call("session/new", cwd=str(host.cwd), mcpServers=[])
        session, answer = opened["sessionId"], await named(ann, opened["sessionId"], text)
        await ann.drop()
    async with shared(tmp_path) as host:
        at = {"acp/cursor": cursor_of(opened)}
        again, other = await host.client(capabilities=CURSORS), await host.client(capabilities=CURSORS)
        await again.open("session/resume", session, _meta=at | {"crow": {"promptIds": ["p0", "p1"]}})
        await other.open("session/resume", session, _meta=at | {"crow": {"promptIds": ["p0"]}})
        assert await named(again, session, text) == answer
        assert (again.text("user_message_chunk"), other.text("user_message_chunk")) == ("", text)
        assert again.text() == other.text() != ""
        wrong: list[object] = ["p1", 5, {}, ["p1", 5]]
        for ids in wrong:
            with pytest.raises(RequestError, match=r"_meta\.crow\.promptIds is .*; expected a list"):
                await other.open("session/resume", session, _meta=at | {"crow": {"promptIds": ids}})

"""Models and endpoints that would cost money for ever: each turn ends, with words, after a few requests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import anyio.lowlevel
import pytest

from crow.domain.entries import Assistant, Remark, Reminder
from crow.domain.errors import AnswerTooLong, NetworkError, ProtocolError
from crow.llm.client import EndpointClient
from crow.llm.endpoint import Endpoint
from crow.llm.stream import RetryTiming
from tests.agent.harness import Opened, Tool, opened, text
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, chunk, sse
from tests.support.fake_endpoint import text as fake_text
from tests.support.scripted_model import Say, ScriptedModel, call


@asynccontextmanager
async def asked(directory: Path, reply: Callable[[Recorded], Reply]) -> AsyncIterator[tuple[Opened, FakeEndpoint]]:
    """A session with an endpoint that gives this reply to every request."""

    async def sleep(_: float) -> None:
        await anyio.lowlevel.checkpoint()

    async with FakeEndpoint(otherwise=reply) as endpoint:
        where = Endpoint(base_url=endpoint.base_url, model="fake-model", context_window=128_000)
        model = EndpointClient(where, timing=RetryTiming(sleep=sleep, chance=lambda: 0.5))
        async with opened(directory, model) as run:
            yield run, endpoint
        await model.close()


def looks(*steps: str) -> ScriptedModel:
    return ScriptedModel(
        *(Say(calls=(call(name, f"c{index}"),)) for index, name in enumerate(steps)), Say(text=["done"])
    )


async def same() -> str:
    return "nothing new"


def pointed_out(log: list[object]) -> list[str]:
    return [body.text for body in log if isinstance(body, Reminder) and "the same result" in body.text]


async def test_the_model_is_reminded_at_the_third_same_call_with_the_same_result(tmp_path: Path) -> None:
    async with opened(tmp_path, looks(*["look"] * 3), tools={"look": Tool("read", same)}) as run:
        assert await run.session.prompt(text("go")) == "end_turn"
        words = pointed_out([entry.body for entry in await run.log()])
    assert len(words) == 1
    assert "You have called look 3 times with the same arguments and the same result." in words[0]


async def test_the_turn_ends_with_a_reason_after_thirty_repetitions(tmp_path: Path) -> None:
    async with opened(tmp_path, looks(*["look"] * 40), tools={"look": Tool("read", same)}) as run:
        assert await run.session.prompt(text("go")) == "max_turn_requests"
        (told,) = run.client.stored(Remark)
        assert len(run.tools.order) == 2 * 30
    assert told.text == (
        "Stopped: look was called 30 times with the same arguments and the same result. "
        "Say what should be done differently."
    )


async def test_twenty_calls_with_different_results_are_no_repetition(tmp_path: Path) -> None:
    numbers = count()

    async def differs() -> str:
        return f"{next(numbers)}"

    async with opened(tmp_path, looks(*["look"] * 20), tools={"look": Tool("read", differs)}) as run:
        assert await run.session.prompt(text("go")) == "end_turn"
        assert pointed_out([entry.body for entry in await run.log()]) == []


async def test_two_alternating_calls_are_a_repetition_and_a_call_between_changes_is_not(tmp_path: Path) -> None:
    numbers = count()

    async def differs() -> str:
        return f"{next(numbers)}"

    tools = {"a": Tool("read", same), "b": Tool("read", same), "new": Tool("read", differs)}
    async with opened(tmp_path / "1", looks(*["a", "b"] * 4), tools=tools) as run:
        await run.session.prompt(text("go"))
        assert len(pointed_out([entry.body for entry in await run.log()])) >= 1
    async with opened(tmp_path / "2", looks(*["a", "new"] * 6), tools=tools) as run:
        await run.session.prompt(text("go"))
        assert pointed_out([entry.body for entry in await run.log()]) == []


async def test_a_turn_ends_when_four_answers_in_a_row_break_off(tmp_path: Path) -> None:
    def step(number: int) -> list[Say]:
        return [
            Say(text=[f"Looking {number}"], error=NetworkError("The connection broke.")),
            Say(text=["."], calls=(call("look", f"c{number}", at=number),)),
        ]

    async def look(at: int) -> str:
        return f"{at}"

    whole = Say(text=["Whole."], calls=(call("look", "c", at=9),))
    model = ScriptedModel(*step(0), *step(1), whole, *step(2), *step(3), *step(4), step(5)[0])
    async with opened(tmp_path, model, tools={"look": Tool("read", look)}) as run:
        with pytest.raises(NetworkError, match="The connection broke"):
            await run.session.prompt(text("go"))
        (told,) = run.client.stored(Remark)
        assert run.client.shown().endswith("Looking 4.Looking 5")
    assert told.text == (
        "Stopped: each of the last 4 answers broke off before its end. What was shown is kept. Check the connection, "
        "then send another prompt to continue."
    )


async def test_an_answer_that_is_only_thought_is_asked_for_twice_and_then_fails_with_words(tmp_path: Path) -> None:
    def thought(request: Recorded) -> Reply:
        return Reply(steps=(sse(chunk({"reasoning_content": "Hm."}), chunk(finish="stop")),))

    async with asked(tmp_path, thought) as (run, endpoint):
        with pytest.raises(ProtocolError, match=r"sent reasoning but no answer\. Ask again, or try another model"):
            await run.session.prompt(text("go"))
        assert len(endpoint.asked) == 2


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "odd"])
async def test_an_empty_answer_is_asked_for_twice_and_then_fails_with_words(tmp_path: Path, finish: str) -> None:
    async with asked(tmp_path, lambda _: Reply(steps=(sse(chunk(finish=finish)),))) as (run, endpoint):
        with pytest.raises(ProtocolError, match="sent an empty answer"):
            await run.session.prompt(text("go"))
        assert len(endpoint.asked) == 2


async def test_an_answer_whose_limit_was_used_up_by_thought_ends_with_a_remark(tmp_path: Path) -> None:
    model = ScriptedModel(Say(thought="Hm.", finish="length"))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("go")) == "max_tokens"
        (told,) = run.client.stored(Remark)
    assert told.text.startswith("The model reached its output limit before it gave an answer. Raise max_output_tokens")


@pytest.mark.parametrize("member", ["content", "reasoning_content"])
async def test_an_answer_that_repeats_its_own_text_is_cut_off_and_not_asked_for_again(
    tmp_path: Path, member: str
) -> None:
    again = sse(chunk({member: "I will look at it again. "}), done=False)
    async with asked(tmp_path, lambda _: Reply(steps=itertools.repeat(again))) as (run, endpoint):
        with pytest.raises(AnswerTooLong, match="characters repeat the same 25 characters"):
            await run.session.prompt(text("go"))
        assert len(endpoint.asked) == 1
        stored = [entry.body for entry in await run.log() if isinstance(entry.body, Assistant)]
        assert [len(body.text + body.thought) >= 16_384 for body in stored] == [True]
        endpoint.script(fake_text("Done."))
        assert await run.session.prompt(text("Again")) == "end_turn"

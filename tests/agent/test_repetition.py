"""A model that repeats itself is reminded and finally stopped."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from crow.domain.entries import Remark, Reminder
from tests.agent.harness import Tool, opened, text
from tests.support.scripted_model import Say, ScriptedModel, call


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

"""Tests titles that a small model writes, on a real store. tests/stdio/test_economy.py drives the real process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from crow.domain.entries import ModelRequest, TurnEnd
from crow.domain.messages import Usage
from crow.llm import ModelInfo
from tests.agent.harness import Opened, opened, text
from tests.support.scripted_model import Say, ScriptedModel

USED = Usage(input_tokens=100, output_tokens=10)
YES = Say(text=["Yes."], usage=USED)
INFO = ModelInfo(name="scripted", endpoint="test scripted", input_price=1.0, output_price=1.0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request for a title does not wait."""
    monkeypatch.setattr("crow.agent.history.titles.REST_S", 0)


@asynccontextmanager
async def titled(directory: Path, small: ScriptedModel, **limits: float) -> AsyncIterator[Opened]:
    """A session whose titles `small` writes, after its first turn."""
    settings = {"title_model": "small", **limits}
    model = ScriptedModel(YES, info=INFO)
    async with opened(directory, model, others={"small": small}, limits=settings) as run:
        await run.session.prompt(text("Build a nest"))
        yield run


async def test_closing_the_session_cancels_the_title_and_stores_its_usage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = Say(text=["A title"], usage=USED, hold=anyio.Event())
    small = ScriptedModel(held)
    with caplog.at_level(logging.WARNING):
        async with titled(tmp_path, small) as run:
            await held.reached.wait()
            await run.session.close()
            assert small.closed_streams == 1
            newest = (await run.log())[-1]
    assert (type(newest.body), newest.usage) == (ModelRequest, USED)
    assert caplog.messages == []  # the request did not run into its time limit


async def test_closing_the_session_before_the_title_is_requested_saves_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.agent.history.titles.REST_S", 10)
    small = ScriptedModel(Say(text=["A title"]))
    async with titled(tmp_path, small) as run:
        await run.session.close()
    assert small.requests == []


async def test_usage_of_a_title_is_stored_at_the_end_even_if_another_process_has_used_the_session(
    tmp_path: Path,
) -> None:
    held = Say(text=["A title"], usage=USED, hold=anyio.Event())
    async with titled(tmp_path, ScriptedModel(held)) as run:
        await held.reached.wait()
        async with opened(tmp_path, ScriptedModel(YES), session_id="s1") as other:
            await other.session.prompt(text("From elsewhere."))
        await run.session.close()
        assert [type(entry.body) for entry in (await run.log())[-2:]] == [TurnEnd, ModelRequest]
        (total,) = await run.store.usage_by_model("s1")
        assert total.requests == 3


@pytest.mark.parametrize("limit", ["cost_per_turn", "cost_per_session"])
async def test_no_title_is_requested_when_a_limit_on_cost_is_reached(tmp_path: Path, limit: str) -> None:
    small = ScriptedModel()
    async with titled(tmp_path, small, **{limit: 1e-9}) as run:
        for _ in range(20):  # a title would be requested meanwhile
            await run.store.session("s1")
        await run.session.close()
    assert small.requests == []

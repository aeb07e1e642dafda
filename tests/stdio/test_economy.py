"""Fallback models, titles by a small model and limits on cost, in the real process."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply

DOWN = fake.failing(503, "down", headers={"Retry-After": "100"})
"""Crow gives up at once, because it does not wait that long."""


@pytest.fixture
async def other() -> AsyncIterator[FakeEndpoint]:
    """The endpoint of the second model."""
    async with FakeEndpoint() as server:
        yield server


def configure(home: Path, toml: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(toml, "utf-8")


def with_fallback(home: Path, other: FakeEndpoint, more: str = "") -> None:
    configure(
        home,
        f'[models.fake-model]\nfallback = "spare"\ninput_price = 1.0\noutput_price = 1.0\n[models.spare]\n'
        f'provider = "other"\ninput_price = 100.0\noutput_price = 100.0\n{more}'
        f'[providers.other]\nbase_url = "{other.base_url}"\n',
    )


def stored(home: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(home / "crow.db")) as sql:
        return sql.execute(query).fetchall()


async def test_the_fallback_answers_while_the_endpoint_is_down_and_the_model_when_it_is_back(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, other: FakeEndpoint
) -> None:
    with_fallback(home, other)
    read = ("read_file", {"path": str(place / "README.md")})
    endpoint.script(fake.text("One."), DOWN, DOWN, fake.text("Four."))
    other.script(fake.calls(read), fake.text("Two."), fake.text("Three."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for prompt in ("first", "second", "third", "fourth"):
            assert await agent.prompt(session, prompt) == {"stopReason": "end_turn"}
        said = agent.text(session)
    assert said.count("fake-model does not answer; spare answers for the rest of this turn: ") == 2
    assert said.count("fake-model answers again") == 1
    places = [said.index(words) for words in ("One.", "Two.", "Three.", "Four.", "answers again")]
    assert places == sorted(places)
    assert (len(endpoint.asked), len(other.asked)) == (4, 3)
    before, after = endpoint.asked[1].body["messages"], other.asked[0].body["messages"]
    assert after == before  # the other model gets the same conversation
    models = stored(home, "SELECT model, round(cost * 1e6) FROM entries WHERE kind = 'assistant' ORDER BY id")
    assert models == [("fake-model", 15), ("spare", 1500), ("spare", 1500), ("spare", 1500), ("fake-model", 15)]


async def test_without_a_fallback_that_works_the_first_error_ends_the_turn(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, other: FakeEndpoint
) -> None:
    with_fallback(home, other)
    endpoint.script(DOWN, fake.text("Back."))
    other.script(DOWN)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        with pytest.raises(RpcError, match="down"):
            await agent.prompt(session, "first")
        assert await agent.prompt(session, "again") == {"stopReason": "end_turn"}
        assert "Back." in agent.text(session)


async def test_a_conversation_that_is_too_long_for_the_fallback_is_compacted_for_it(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, other: FakeEndpoint
) -> None:
    with_fallback(home, other, "context_window = 24000\n")
    long = fake.text(" ".join(map(str, range(5_000))))
    endpoint.script(long, long, long, DOWN)

    def small(request: Recorded) -> Reply:
        if "will replace the conversation" in str(request.body["messages"][-1]):
            return fake.text("## Goal\nBuild a nest.")
        return fake.text("Done.")

    other.answer_with(small)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(4):
            await agent.prompt(session, "q" * 24_000)
        assert agent.text(session).endswith("Done.")
    assert "Build a nest." in str(other.asked[-1].body["messages"][1])
    assert len(other.asked[-1].raw) < len(endpoint.asked[-1].raw) / 2


async def test_a_small_model_writes_the_title_after_the_first_turn_only(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, '[titles]\nmodel = "small"\n[models.small]\ninput_price = 1.0\noutput_price = 1.0\n')
    endpoint.script(fake.text("Twigs."), fake.text('"Building a nest"\n'), fake.text("More twigs."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        first = await agent.start_prompt(session, "How do I build\na nest?")
        await first.result()
        await agent.wait_for_update("session_info_update", title="Building a nest")
        usage = agent.usage(first)
        await agent.prompt(session, "More.")
    titled = endpoint.asked[1].body
    assert (titled["model"], len(titled["messages"])) == ("small", 2)
    assert "a nest?" in str(titled["messages"][1])
    assert "Twigs." in str(titled["messages"][1])
    assert [each.body["model"] for each in endpoint.asked] == ["fake-model", "small", "fake-model"]
    assert usage == {"totalTokens": 15, "inputTokens": 10, "outputTokens": 5}  # the title is no part of the turn
    rows = stored(home, "SELECT model, json_extract(body, '$.purpose'), cost FROM entries WHERE kind = 'request'")
    assert rows == [("small", "title", 15e-6)]
    assert stored(home, "SELECT title FROM sessions") == [("Building a nest",)]


@pytest.mark.long
@pytest.mark.parametrize(
    "reply",
    [fake.failing(400, "no"), DOWN, fake.text(""), fake.text("word " * 50, finish="length"), fake.calls(("shell", {}))],
)
async def test_a_failed_title_request_is_only_logged(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, reply: Reply
) -> None:
    configure(home, '[titles]\nmodel = "small"\n')
    endpoint.answer_with(lambda request: reply if request.body["model"] == "small" else fake.text("Yes."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "Build a nest")
        with anyio.fail_after(120):
            while "keeps its default title" not in log_of(home):
                await agent.prompt(session, "/mode")
        shown = agent.text(session)
    assert "title" not in shown
    assert stored(home, "SELECT title FROM sessions") == [("Build a nest",)]
    assert len([each for each in endpoint.asked if each.body["model"] == "small"]) == 1


def log_of(home: Path) -> str:
    log = home / "crow.log"
    return log.read_text("utf-8") if log.exists() else ""


async def test_a_prompt_does_not_wait_for_a_title_and_the_users_own_title_stays(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, '[titles]\nmodel = "small"\n')
    gate = Gate()
    slow = fake.text("A title", " too late", between=(gate,))
    held = Gate()
    last = fake.text("Yes", ".", between=(held,))

    def reply(request: Recorded) -> Reply:
        if request.body["model"] == "small":
            return slow
        return last if "Last." in str(request.body["messages"][-1]) else fake.text("Yes.")

    endpoint.answer_with(reply)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "Build a nest")
        await gate.reached()
        assert await agent.prompt(session, "And now?") == {"stopReason": "end_turn"}
        await agent.prompt(session, "/title Mine")
        call = await agent.start_prompt(session, "Last.")
        await held.reached()
        gate.open()
        with anyio.fail_after(120):
            while not stored(home, "SELECT 1 FROM entries WHERE kind = 'request'"):
                await anyio.lowlevel.checkpoint()
        held.open()
        await call.result()
        assert agent.usage(call) == {"totalTokens": 15, "inputTokens": 10, "outputTokens": 5}  # without the title's
    assert stored(home, "SELECT title, title_by_user FROM sessions") == [("Mine", 1)]


async def test_an_exit_ends_the_title_request_and_its_cost_is_kept(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, '[titles]\nmodel = "small"\n')
    gate = Gate()
    slow = fake.text("A title", " too late", between=(gate,))
    endpoint.answer_with(lambda request: slow if request.body["model"] == "small" else fake.text("Yes."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "Build a nest")
        await gate.reached()
        assert await agent.close_stdin_and_wait() == 0
    assert stored(home, "SELECT json_extract(body, '$.purpose') FROM entries WHERE kind = 'request'") == [("title",)]
    assert stored(home, "SELECT title, state FROM sessions") == [("Build a nest", "idle")]


PRICES = "[models.fake-model]\ninput_price = 100000.0\noutput_price = 0.0\n"
"""Each request of the fake endpoint reports 10 input tokens, so it costs 1 USD."""


async def test_a_turn_stops_at_its_limit_and_the_next_prompt_goes_on(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, f"{PRICES}[limits]\ncost_per_turn = 2\n")
    read = fake.calls(("read_file", {"path": str(place / "README.md")}))
    endpoint.script(read, read, read, fake.text("Done."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert await agent.prompt(session, "go") == {"stopReason": "max_turn_requests"}
        assert "Stopped: this turn has cost $2.00, and limits.cost_per_turn is 2. Send another" in agent.text(session)
        assert len(endpoint.asked) == 2
        assert await agent.prompt(session, "go on") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("Done.")
    assert [each["role"] for each in endpoint.asked[2].body["messages"][1:]] == [
        "user", "assistant", "tool", "assistant", "tool", "user",
    ]  # fmt: skip


async def test_a_session_stops_at_its_limit_and_may_then_spend_as_much_again(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, f"{PRICES}[limits]\ncost_per_session = 2\n")
    read = fake.calls(("read_file", {"path": str(place / "README.md")}))
    endpoint.script(fake.text("One."), read, fake.text("Two."), read, read)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        stops = [(await agent.prompt(session, "go"))["stopReason"] for _ in range(4)]
        said = agent.text(session)
    assert stops == ["end_turn", "max_turn_requests", "end_turn", "max_turn_requests"]
    assert "this session has cost $2.00, and limits.cost_per_session is 2. Send another prompt to spend up to" in said
    assert "this session has cost $4.00" in said
    assert len(endpoint.asked) == 4


async def test_a_limit_that_the_last_answer_of_a_turn_reaches_is_told(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, f"{PRICES}[limits]\ncost_per_session = 2\n")
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(5):
            assert await agent.prompt(session, "go") == {"stopReason": "end_turn"}
        assert agent.text(session).count("This session has cost") == 2


async def test_a_subagent_spends_from_the_budget_of_its_session(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, f"{PRICES}[limits]\ncost_per_turn = 3\n")
    read = fake.calls(("read_file", {"path": str(place / "README.md")}))
    endpoint.script(fake.calls(("task", {"description": "Look", "prompt": "look around"})), read, read, read, read)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert await agent.prompt(session, "go") == {"stopReason": "max_turn_requests"}
        assert "this turn has cost $3.00" in agent.text(session)
    assert len(endpoint.asked) == 3
    spent = stored(home, "SELECT round(cost) FROM sessions ORDER BY parent_id IS NULL")
    assert spent == [(2,), (3,)]  # the subagent stopped before its third request


async def test_unknown_prices_are_told_once_if_there_is_a_limit(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, "[limits]\ncost_per_turn = 1\n")
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(3):
            assert await agent.prompt(session, "go") == {"stopReason": "end_turn"}
        assert agent.text(session).count("The prices of fake-model are unknown") == 1


@pytest.mark.long
async def test_a_summary_written_while_the_session_rests_outlives_a_turn_that_its_cost_stops(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(  # a proxy makes the endpoint one that is not local
        home,
        f'[model]\nname = "far/fake-model"\n[models."far/fake-model"]\ncontext_window = 32000\n'
        f"input_price = 100000.0\noutput_price = 0.0\n[limits]\ncost_per_session = 5\n[providers.far]\n"
        f'base_url = "http://far.example/v1"\nproxy = "{endpoint.base_url.removesuffix("/v1")}"\napi_key = "sk-1"\n',
    )
    (home / "config.toml").chmod(0o600)
    long = " ".join(f"word{number}" for number in range(900))
    summary = fake.text("## Goal\nBuild a nest.")

    def reply(request: Recorded) -> Reply:
        wants_summary = "will replace the conversation" in str(request.body["messages"][-1])
        return summary if wants_summary else fake.text(long)

    endpoint.answer_with(reply)
    async with crow(env={"CROW_MODEL": None}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(4):
            assert await agent.prompt(session, long) == {"stopReason": "end_turn"}
        with anyio.fail_after(60):
            while not stored(home, "SELECT 1 FROM entries WHERE kind = 'request'"):  # noqa: ASYNC110 - nothing tells it
                await anyio.sleep(0.01)
        assert await agent.prompt(session, "go on") == {"stopReason": "max_turn_requests"}
        assert "this session has cost $5.00" in agent.text(session)
        assert await agent.prompt(session, "go on now") == {"stopReason": "end_turn"}
    assert len(endpoint.asked) == 6
    assert "Build a nest." in str(endpoint.asked[-1].body["messages"][1])
    kinds = [kind for (kind,) in stored(home, "SELECT kind FROM entries ORDER BY id")]
    assert kinds[-9:] == [
        "request", "user", "remark", "turn_end", "user", "prompt", "checkpoint", "assistant", "turn_end",
    ]  # fmt: skip

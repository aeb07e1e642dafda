"""Tests what is learned of an endpoint: by which session, from which words, and when it is tested again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.errors import BadRequest, ContextOverflow, StoreError
from crow.domain.messages import Image, Text, UserMessage
from crow.llm.client import EndpointClient
from crow.llm.endpoint import Endpoint
from crow.llm.facts import describe_facts, learned_refusals, learned_usage, learned_window
from crow.llm.learning import EndpointFacts
from tests.llm.chat.test_chat_completions import ASK, Memory, ask, asking, failure_of, refusals
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, body, chunk, failing, sse, text, usage

DAY = timedelta(days=1)
NO_OPTIONS = "Unknown parameter: 'stream_options'"


class Choosy(FakeEndpoint):
    """Refuses requests with the members `refuses`, in these words, and counts these refusals."""

    def __init__(self, **refuses: str) -> None:
        super().__init__(otherwise=self.answer)
        self.refuses = refuses
        self.refused = 0

    def answer(self, request: Recorded) -> Reply:
        for name, words in self.refuses.items():
            if name in request.body:
                self.refused += 1
                return failing(400, words)
        return text("Hello.")


class Days:
    """A date that the test changes."""

    def __init__(self) -> None:
        self.today = date(2026, 1, 1)

    def __call__(self) -> date:
        return self.today


@asynccontextmanager
async def choosy(memory: Memory, days: Days, **refuses: str) -> AsyncIterator[tuple[Choosy, EndpointClient]]:
    async with Choosy(**refuses) as endpoint, asking(endpoint, memory=memory, today=days) as model:
        yield endpoint, model


async def sent_by(model: EndpointClient, endpoint: FakeEndpoint, session: str) -> list[dict[str, Any]]:
    """The bodies of the requests that one question of a session takes."""
    before = len(endpoint.asked)
    await ask(model, replace(ASK, cache_key=session))
    return [request.body for request in endpoint.asked[before:]]


async def test_a_part_refused_once_is_left_out_by_its_session_and_twice_by_all() -> None:
    memory = Memory()
    async with choosy(memory, Days(), stream_options=NO_OPTIONS) as (endpoint, model):
        for session, requests in (("one", 2), ("one", 1), ("two", 2), ("two", 1), ("three", 1), ("one", 1)):
            assert len(await sent_by(model, endpoint, session)) == requests
    assert refusals(memory) == {"stream_options": (2, True)}


async def test_a_refusal_is_forgotten_if_leaving_the_part_out_did_not_help() -> None:
    memory = Memory()
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory) as model:
        endpoint.script(failing(400, NO_OPTIONS), failing(400, "The moon is full."))
        error, _, _ = await failure_of(model)
        assert isinstance(error, BadRequest)
        assert "The moon is full" in str(error)
        assert "stream_options" in (await sent_by(model, endpoint, "session-1"))[0]
    assert refusals(memory) == {}


async def test_a_refusal_is_remembered_if_the_request_is_then_only_too_long() -> None:
    memory, days = Memory(), Days()
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory, today=days) as model:
        endpoint.script(failing(400, NO_OPTIONS), failing(400, "prompt is too long: 9001 tokens > 8192 maximum"))
        error, _, _ = await failure_of(model)
        assert isinstance(error, ContextOverflow)
        assert refusals(memory) == {"stream_options": (1, True)}
        days.today += DAY
        endpoint.script(failing(400, "prompt is too long: 9001 tokens > 8192 maximum"))
        await failure_of(model)
        assert "stream_options" in endpoint.asked[-1].body
    assert refusals(memory) == {"stream_options": (1, True)}


@pytest.mark.long
async def test_a_refused_part_is_tested_after_a_day_and_later_if_it_is_refused_again() -> None:
    memory, days = Memory(), Days()
    async with choosy(memory, days, stream_options=NO_OPTIONS) as (endpoint, model):
        tested = []
        for day in range(100):
            days.today = date(2026, 1, 1) + day * DAY
            requests = [len(await sent_by(model, endpoint, "s")) for _ in range(3)]
            assert requests[1:] == [1, 1]
            tested += [day] if requests[0] == 2 else []
    assert tested == [0, 1, 3, 7, 15, 31, 63, 95]
    (fact,) = describe_facts(memory.facts, "s", today=days.today)[:1]
    assert fact.about == "usage while streaming (stream_options)"
    assert fact.words == (
        "Crow leaves this out of requests (since 2026-04-06), for every session (seen 8 times), because of a "
        f'refused request: "{NO_OPTIONS} (HTTP 400)". Crow tests this again on 2026-05-08.'
    )


async def test_a_part_that_is_accepted_again_is_sent_and_known_when_it_is_refused_once_more() -> None:
    memory, days = Memory(), Days()
    async with choosy(memory, days, stream_options=NO_OPTIONS) as (endpoint, model):
        await sent_by(model, endpoint, "one")
        words, endpoint.refuses = endpoint.refuses, {}
        assert "stream_options" not in (await sent_by(model, endpoint, "one"))[0]
        days.today += DAY
        for _ in range(2):
            assert ["stream_options" in sent for sent in await sent_by(model, endpoint, "one")] == [True]
        assert refusals(memory) == {"stream_options": (1, False)}
        assert describe_facts(memory.facts, "one")[0].about == "usage"
        endpoint.refuses = words
        assert [len(await sent_by(model, endpoint, session)) for session in ("one", "two")] == [2, 1]
    assert learned_refusals(memory.facts)["stream_options"].patience == 2


async def test_a_part_that_the_endpoint_requires_by_now_is_sent_again() -> None:
    memory, days = Memory(), Days()

    def only_streams(request: Recorded) -> Reply:
        return text("Hello.") if request.body["stream"] else failing(400, "Only stream mode is supported.")

    async with FakeEndpoint(otherwise=only_streams) as endpoint, asking(endpoint, memory=memory, today=days) as model:
        whole = {"choices": [{"index": 0, "message": {"content": "Whole."}, "finish_reason": "stop"}]}
        endpoint.script(failing(400, "Unsupported value: 'stream' does not support true with this model."))
        endpoint.script(body(json.dumps(whole).encode()))
        assert [sent["stream"] for sent in await sent_by(model, endpoint, "s")] == [True, False]
        assert [sent["stream"] for sent in await sent_by(model, endpoint, "s")] == [False, True]
        assert [sent["stream"] for sent in await sent_by(model, endpoint, "s")] == [True]
    assert refusals(memory) == {"stream": (1, False)}


async def test_a_test_that_is_refused_without_a_reason_does_not_fail_the_request() -> None:
    memory, days = Memory(), Days()
    async with choosy(memory, days, stream_options=NO_OPTIONS) as (endpoint, model):
        await sent_by(model, endpoint, "s")
        endpoint.refuses = {"stream_options": "Bad Request"}
        days.today += DAY
        assert [len(await sent_by(model, endpoint, "s")) for _ in range(2)] == [2, 1]
    assert refusals(memory) == {"stream_options": (2, True)}


async def test_a_part_of_messages_is_tested_only_where_it_shows_and_with_a_first_request() -> None:
    memory, days = Memory(), Days()
    picture = UserMessage(parts=(Text(text="See"), Image(data="eA==", mime_type="image/png")))
    with_image = replace(ASK, messages=(ASK.messages[0], picture))
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory, today=days) as model:
        for session in ("one", "two"):
            endpoint.script(failing(400, "This model does not support image input"))
            await ask(model, replace(with_image, cache_key=session))
        assert refusals(memory) == {"images": (2, True)}
        days.today += 2 * DAY
        count = len(endpoint.asked)
        await ask(model, replace(with_image, cache_key="one"))  # not its first request
        await ask(model, replace(ASK, cache_key="three"))  # no image
        assert refusals(memory) == {"images": (2, True)}
        await ask(model, replace(with_image, cache_key="four"))
        assert ["image_url" in request.raw.decode() for request in endpoint.asked[count:]] == [False, False, True]
    assert refusals(memory) == {"images": (2, False)}


async def test_facts_dropped_by_someone_else_are_not_used_any_more() -> None:
    memory = Memory()
    async with choosy(memory, Days(), stream_options=NO_OPTIONS) as (endpoint, model):
        await sent_by(model, endpoint, "s")
        memory.facts["refused"] = None
        assert [len(await sent_by(model, endpoint, "s")) for _ in range(2)] == [2, 1]


async def test_facts_that_cannot_be_stored_are_used_by_this_process() -> None:
    class Full(Memory):
        async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
            raise StoreError("The disk is full.")

    async with choosy(Full(), Days(), stream_options=NO_OPTIONS) as (endpoint, model):
        assert [len(await sent_by(model, endpoint, "s")) for _ in range(3)] == [2, 1, 1]


async def test_the_reported_counts_are_learned_and_their_absence_after_three_answers() -> None:
    memory = Memory()
    cached = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    silent = Reply(steps=(sse(chunk({"content": "ok"}), chunk(finish="stop")),))
    async with FakeEndpoint(otherwise=silent) as endpoint, asking(endpoint, memory=memory) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "ok"}), chunk(finish="stop"), usage()),)))
        endpoint.script(Reply(steps=(sse(chunk({"content": "ok"}), chunk(finish="stop"), {"usage": cached}),)))
        endpoint.script(Reply(steps=(sse(chunk({"content": "ok"}), chunk(finish="stop"), usage()),)))
        seen = []
        for _ in range(7):
            await ask(model)
            shape = learned_usage(memory.facts)
            assert shape is not None
            seen.append((shape.counts, shape.times))
    both = "input output cached"
    assert seen == [("input output", 1), (both, 1), (both, 2), (both, 2), (both, 2), ("", 1), ("", 2)]
    words = describe_facts(memory.facts)[0].words
    assert words.startswith("The endpoint reports no token counts (after several answers, ")


@pytest.mark.parametrize("checked_on", ["2026-01-02", "2027-01-01", "soon", "9999-12-31", ""])
def test_a_refusal_that_is_due_is_tested_with_the_next_request(checked_on: str) -> None:
    stored = {"part": "stream", "source": "a refusal", "learned_on": "2026-01-01", "session": "s", "patience": 2}
    facts = {"refused": [{**stored, "checked_on": checked_on}]}
    (due,) = describe_facts(facts, today=date(2026, 1, 4))
    assert due.words.endswith(". Crow tests this again with the next request.")
    if checked_on == "2026-01-02":
        (waiting,) = describe_facts(facts, today=date(2026, 1, 3))
        assert waiting.words.endswith(". Crow tests this again on 2026-01-04.")


@pytest.mark.parametrize(("answers", "checked_on"), [(8, "2026-01-04"), (3, "2026-01-03"), (3, "soon")])
def test_a_window_that_is_due_is_tested_when_the_context_is_full(answers: int, checked_on: str) -> None:
    window = {"tokens": 9_000, "source": "a refusal", "learned_on": "2026-01-01", "session": "s", "answers": answers}
    (fact,) = describe_facts({"window": {**window, "checked_on": checked_on}}, today=date(2026, 1, 4))
    assert fact.words.endswith(". When the context is full, crow tests whether the endpoint accepts more.")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
REFUSAL = st.fixed_dictionaries(
    {"part": st.sampled_from(["stream", "images", "x"]) | JSON, "source": st.text() | JSON},
    optional={"learned_on": JSON, "session": JSON, "times": JSON, "limit": JSON, "checked_on": JSON, "patience": JSON},
)


@given(facts=st.fixed_dictionaries({}, optional={
    "window": JSON, "refused": st.lists(REFUSAL | JSON, max_size=3) | JSON, "max_output_tokens": JSON, "usage": JSON,
    "listed": JSON,
}))  # fmt: skip
def test_any_stored_facts_are_read_without_an_error(facts: dict[str, object]) -> None:
    assert all(fact.words for fact in describe_facts(facts))
    known = EndpointFacts(Endpoint(base_url="http://localhost:1/v1", model="m"), None, facts)
    form = known.form("s")
    assert form.left_out() is not None
    assert form.dialect.limit_field in {"max_tokens", "max_completion_tokens", None}


@pytest.mark.parametrize("part", ["stream", "stream_options", "max_output_tokens"])
def test_facts_with_wrong_types_are_ignored(part: str) -> None:
    good = {"part": part, "source": "s", "learned_on": "2026-01-01", "session": "s", "checked_on": "2026-01-01"}
    assert list(learned_refusals({"refused": [good]})) == [part]
    for change in ({"times": True}, {"times": "2"}, {"limit": "9"}, {"patience": 0}, {"part": 3}, {"holds": 1}):
        assert learned_refusals({"refused": [good | change]}) == {}
    assert learned_window({"window": {"tokens": 1e30, "source": "s", "learned_on": "d", "session": "s"}}) is None

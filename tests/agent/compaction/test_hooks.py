"""Tests compaction hooks, and that none can break or block a compaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crow.agent.compaction import Advice, Done, Proposal
from crow.agent.compaction.compactor import CompactionResult
from crow.agent.compaction.hooks import Hooks, NamedHook
from crow.domain.entries import Body, Checkpoint, NewEntry, Prompt, TurnEnd
from crow.domain.events import NoticeShown, SummaryShown
from crow.llm import ModelInfo
from tests.support.compaction import SUMMARY, AnsweringModel, Notes, branch_of, compactor_on, summariser
from tests.support.memory_store import MemoryStore
from tests.support.paths import result_of, said, user
from tests.tools.conftest import skip_time

TALK: list[Body] = [user("q" * 8_000), said("a" * 8_000), TurnEnd(stop="end_turn")] * 4
INFO = ModelInfo(name="tiny", endpoint="test tiny", context_window=16_000)


def registered(before: tuple[Callable[..., Any], ...] = (), after: tuple[Callable[..., Any], ...] = ()) -> Hooks:
    """Hooks as entry points provide them: names and loaders."""
    groups = {"crow.before_compact": before, "crow.after_compact": after}

    def find(group: str) -> list[NamedHook]:
        return [(hook.__name__, lambda hook=hook: hook) for hook in groups[group]]  # type: ignore[misc]

    return Hooks(find, timeout_s=300)


class Place:
    """A conversation that is due for a summary."""

    def __init__(self, hooks: Hooks) -> None:
        self.store, self.client, self.model = MemoryStore(), Notes(), summariser("good", info=INFO)
        self.branch = branch_of(self.store, self.client)
        self.compactor = compactor_on(self.branch, self.model, hooks=hooks)

    async def compact(self, *bodies: Any) -> CompactionResult:
        for body in (Prompt(system="s", tools=(), cwd="/", model="m"), *(bodies or TALK)):
            await self.branch.record([NewEntry(body=body)])
        return await self.compactor.compact("threshold", "the parser")

    def notices(self) -> list[str]:
        return [event.title for event in self.client.events if isinstance(event, NoticeShown)]


async def compacted_with(hooks: Hooks) -> tuple[CompactionResult, AnsweringModel]:
    place = Place(hooks)
    return await place.compact(), place.model


def checkpoint(result: CompactionResult) -> Checkpoint:
    assert result.entry is not None
    assert isinstance(result.entry.body, Checkpoint)
    return result.entry.body


async def test_hooks_receive_the_proposal_and_the_result() -> None:
    heard: list[Any] = []
    result, _ = await compacted_with(registered((heard.append,), (heard.append,)))
    body = checkpoint(result)
    proposal, done = heard
    assert proposal == Proposal(
        session_id="s",
        cwd="/repo",
        model="tiny",
        kind="summary",
        reason="threshold",
        focus="the parser",
        tokens=body.tokens_before,
        threshold=12_800,
        window=16_000,
    )
    assert done == Done(
        session_id="s",
        cwd="/repo",
        model="tiny",
        kind="summary",
        reason="threshold",
        entry=result.entry.id if result.entry else 0,
        tokens_before=body.tokens_before,
        tokens_after=body.tokens_after,
        summary=SUMMARY,
        method="prefix",
    )


async def test_veto_prevents_the_compaction() -> None:
    place = Place(registered((lambda _: Advice(veto="Not while the tests run."),)))
    result = await place.compact()
    assert (result.outcome, result.entry) == ("noop", None)
    assert result.words == "A hook prevented the compaction: Not while the tests run."
    assert (place.model.requests, place.client.compactions()) == ([], [])


async def test_mask_can_be_vetoed_too() -> None:
    kinds: list[str] = []

    def before_compact(proposal: Proposal) -> Advice:
        kinds.append(proposal.kind)
        return Advice(veto="No.")

    result = await Place(registered((before_compact,))).compact(
        user("go"), said("", "a"), result_of(3, 0, "x" * 56_000), said("well"), user("next")
    )
    assert (result.outcome, kinds) == ("noop", ["mask"])


async def test_context_of_all_hooks_goes_into_the_prompt() -> None:
    hooks = registered((lambda _: Advice(context="The ticket is 17."), lambda _: Advice(context="Ship on Friday.")))
    _, model = await compacted_with(hooks)
    assert "Take into account:\\nThe ticket is 17.\\n\\nShip on Friday." in repr(model.requests[0].messages[-1])


async def test_summary_of_an_async_hook_is_used_without_asking_the_model() -> None:
    async def before_compact(_: Proposal) -> Advice:
        return Advice(summary="## Goal\nMine.")

    result, model = await compacted_with(registered((before_compact,)))
    body = checkpoint(result)
    assert (body.summary, body.method, body.model_calls, model.requests) == ("## Goal\nMine.", "hook", 0, [])


async def test_too_long_summary_of_a_hook_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    result, _ = await compacted_with(registered((lambda _: Advice(summary="word " * 30_000),)))
    assert checkpoint(result).summary == SUMMARY
    assert "Ignored a hook's summary of" in caplog.text


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_hook_that_fails_hangs_or_returns_nonsense_is_reported_and_skipped(
    caplog: pytest.LogCaptureFixture, released: threading.Event
) -> None:
    def fails(_: object) -> None:
        raise LookupError("no such ticket")

    loop = asyncio.get_running_loop()

    def hangs(_: object) -> None:
        loop.call_soon_threadsafe(skip_time, 300)
        released.wait()

    def babbles(_: object) -> str:
        return "yes"

    good = lambda _: Advice(context="Still heard.")  # noqa: E731
    place = Place(registered((fails, hangs, babbles, good), (fails, hangs)))
    result = await place.compact()
    assert checkpoint(result).summary == SUMMARY
    assert "Still heard." in repr(place.model.requests[0].messages[-1])
    failed = "failed (LookupError: no such ticket) and is skipped."
    told = [
        f"The hook fails of crow.before_compact {failed}",
        "The hook hangs of crow.before_compact took longer than 300 s and is skipped.",
        "The hook babbles of crow.before_compact returned str instead of Advice and is skipped.",
        f"The hook fails of crow.after_compact {failed}",
        "The hook hangs of crow.after_compact took longer than 300 s and is skipped.",
    ]
    assert place.notices() == told
    assert [record.getMessage() for record in caplog.records] == told


async def test_hook_failure_is_reported_once_a_turn() -> None:
    def fails(_: object) -> None:
        raise LookupError("no such ticket")

    place = Place(registered((fails,)))
    await place.compact()
    await place.branch.record([NewEntry(body=body) for body in TALK])
    assert (await place.compactor.compact("command")).outcome == "compacted"
    assert len(place.notices()) == 1


async def test_hook_that_cannot_be_loaded_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Callable[..., object]:
        raise ImportError("no module named ours")

    result, _ = await compacted_with(Hooks(lambda _: [("ours", load)]))
    assert checkpoint(result).summary == SUMMARY
    words = "The hook ours of crow.before_compact failed (ImportError: no module named ours) and is skipped."
    assert words in caplog.text


async def test_failing_search_for_hooks_means_no_hooks(caplog: pytest.LogCaptureFixture) -> None:
    def find(_: str) -> list[NamedHook]:
        raise OSError("unreadable metadata")

    result, _ = await compacted_with(Hooks(find))
    assert checkpoint(result).summary == SUMMARY
    assert "The search for hooks of crow.before_compact failed (OSError: unreadable metadata)" in caplog.text


async def test_summary_is_shown_as_it_arrives_and_retracted_if_it_is_unusable() -> None:
    place = Place(Hooks())
    place.model = summariser("cut", "good", info=INFO)
    place.compactor = compactor_on(place.branch, place.model)
    await place.compact()
    shown = [event.text for event in place.client.events if isinstance(event, SummaryShown)]
    assert shown == [SUMMARY, "", SUMMARY]

"""Tests compaction hooks, and that none can break or block a compaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from crow.agent.compaction.compactor import CompactionResult
from crow.agent.compaction.wish import CompactionWish
from crow.agent.hook_answers import HookEvent
from crow.agent.hooks import Hooks, NamedHook
from crow.domain.entries import Body, Checkpoint, NewEntry, Prompt, TurnEnd
from crow.domain.events import NoticeShown, SummaryShown
from crow.llm import ModelInfo
from tests.support.compaction import SUMMARY, AnsweringModel, Notes, branch_of, compactor_on, summariser
from tests.support.hooks import HookFunction, hooks_on, python_hooks
from tests.support.memory_store import MemoryStore
from tests.support.paths import result_of, said, user
from tests.tools.conftest import skip_time

TALK: list[Body] = [user("q" * 8_000), said("a" * 8_000), TurnEnd(stop="end_turn")] * 4
INFO = ModelInfo(name="tiny", endpoint="test tiny", context_window=16_000)


def registered(before: Sequence[HookFunction] = (), after: Sequence[HookFunction] = ()) -> Hooks:
    return python_hooks({"before_compact": before, "after_compact": after})


class Place:
    """A conversation that is due for a summary."""

    def __init__(self, hooks: Hooks) -> None:
        self.store, self.client, self.model = MemoryStore(), Notes(), summariser("good", info=INFO)
        self.branch = branch_of(self.store, self.client)
        self.compactor = compactor_on(self.branch, self.model, hooks=hooks_on(self.branch, hooks))

    async def compact(self, *bodies: Any) -> CompactionResult:
        for body in (Prompt(system="s", tools=(), cwd="/", model="m"), *(bodies or TALK)):
            await self.branch.record([NewEntry(body=body)])
        return await self.compactor.compact("threshold", CompactionWish(focus="the parser"))

    def notices(self) -> list[str]:
        return [event.title for event in self.client.events if isinstance(event, NoticeShown)]


async def compacted_with(hooks: Hooks) -> tuple[CompactionResult, AnsweringModel]:
    place = Place(hooks)
    return await place.compact(), place.model


def checkpoint(result: CompactionResult) -> Checkpoint:
    assert result.entry is not None
    assert isinstance(result.entry.body, Checkpoint)
    return result.entry.body


async def test_hooks_learn_what_is_compacted_and_the_result() -> None:
    heard: list[dict[str, Any]] = []
    result, _ = await compacted_with(registered([heard.append], [heard.append]))
    body = checkpoint(result)
    before, after = heard
    session = {"session_id": "s", "parent_id": None, "cwd": "/repo", "model": before["model"], "mode": before["mode"]}
    assert before == {
        "event": "before_compact",
        **session,
        "kind": "summary",
        "reason": "threshold",
        "focus": "the parser",
        "tokens": body.tokens_before,
        "threshold": 12_800,
        "window": 16_000,
        "previous_summary": "",
    }
    assert after == {
        "event": "after_compact",
        **session,
        "kind": "summary",
        "reason": "threshold",
        "entry": result.entry.id if result.entry else 0,
        "tokens_before": body.tokens_before,
        "tokens_after": body.tokens_after,
        "summary": SUMMARY,
        "method": "prefix",
        "files_modified": [],
    }


async def test_a_denial_prevents_the_compaction() -> None:
    place = Place(registered([lambda _: {"deny": "Not while the tests run."}]))
    result = await place.compact()
    assert (result.outcome, result.entry) == ("noop", None)
    assert result.words == "The before_compact hook <lambda> denied this: Not while the tests run."
    assert (place.model.requests, place.client.compactions()) == ([], [])


async def test_a_mask_can_be_denied_too() -> None:
    kinds: list[str] = []

    def before_compact(event: dict[str, Any]) -> dict[str, str]:
        kinds.append(event["kind"])
        return {"deny": "No."}

    result = await Place(registered([before_compact])).compact(
        user("go"), said("", "a"), result_of(3, 0, "x" * 56_000), said("well"), user("next")
    )
    assert (result.outcome, kinds) == ("noop", ["mask"])


async def test_context_of_all_hooks_goes_into_the_prompt() -> None:
    hooks = registered([lambda _: {"context": "The ticket is 17."}, lambda _: {"context": "Ship on Friday."}])
    _, model = await compacted_with(hooks)
    assert "Take into account:\\nThe ticket is 17.\\n\\nShip on Friday." in repr(model.requests[0].messages[-1])


async def test_summary_of_an_async_hook_is_used_without_asking_the_model() -> None:
    async def before_compact(_: object) -> dict[str, str]:
        return {"summary": "## Goal\nMine."}

    result, model = await compacted_with(registered([before_compact]))
    body = checkpoint(result)
    assert (body.summary, body.method, body.model_calls, model.requests) == ("## Goal\nMine.", "hook", 0, [])


async def test_too_long_summary_of_a_hook_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    result, _ = await compacted_with(registered([lambda _: {"summary": "word " * 30_000}]))
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

    def mistypes(_: object) -> dict[str, object]:
        return {"context": 5}

    def overreaches(_: object) -> dict[str, object]:
        return {"context": "Heard first.", "arguments": {}}

    good = lambda _: {"context": "Still heard."}  # noqa: E731
    place = Place(registered([fails, hangs, babbles, mistypes, overreaches, good], [fails, hangs]))
    result = await place.compact()
    assert checkpoint(result).summary == SUMMARY
    assert "Heard first.\\n\\nStill heard." in repr(place.model.requests[0].messages[-1])
    known = "before_compact accepts context, deny, entries, metadata, summary"
    failed = "failed (LookupError: no such ticket) and is skipped."
    assert place.notices() == [
        f"The before_compact hook fails {failed}",
        "The before_compact hook hangs took longer than 300 s and is skipped.",
        "The before_compact hook babbles answered with str instead of an object and is skipped.",
        "The before_compact hook mistypes answered with context = 5 instead of text and is skipped.",
        f"The before_compact hook overreaches answered with unknown keys: arguments; {known}.",
        f"The after_compact hook fails {failed}",
        "The after_compact hook hangs took longer than 300 s and is skipped.",
    ]
    assert set(place.notices()) <= {record.getMessage() for record in caplog.records}


async def test_hook_failure_is_reported_once_a_turn() -> None:
    def fails(_: object) -> None:
        raise LookupError("no such ticket")

    place = Place(registered([fails]))
    await place.compact()
    await place.branch.record([NewEntry(body=body) for body in TALK])
    assert (await place.compactor.compact("command")).outcome == "compacted"
    assert len(place.notices()) == 1


async def test_hook_that_cannot_be_loaded_is_skipped() -> None:
    def load() -> Callable[..., object]:
        raise ImportError("no module named ours")

    found: dict[HookEvent, list[NamedHook]] = {"before_compact": [("ours", load)]}
    place = Place(Hooks(lambda: found))
    assert checkpoint(await place.compact()).summary == SUMMARY
    (told,) = place.notices()
    assert told == "The before_compact hook ours failed (ImportError: no module named ours) and is skipped."


async def test_failing_search_for_hooks_means_no_hooks() -> None:
    def find() -> dict[HookEvent, list[NamedHook]]:
        raise OSError("unreadable metadata")

    place = Place(Hooks(find))
    assert checkpoint(await place.compact()).summary == SUMMARY
    assert place.notices() == ["The search for hooks failed (OSError: unreadable metadata) and is skipped."]


async def test_summary_is_shown_as_it_arrives_and_retracted_if_it_is_unusable() -> None:
    place = Place(Hooks())
    place.model = summariser("cut", "good", info=INFO)
    place.compactor = compactor_on(place.branch, place.model)
    await place.compact()
    shown = [event.text for event in place.client.events if isinstance(event, SummaryShown)]
    assert shown == [SUMMARY, "", SUMMARY]

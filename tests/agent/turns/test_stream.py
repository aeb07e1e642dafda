"""How a streamed answer is shown and saved."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from crow.agent.turns import stream as drafts
from crow.agent.turns.stream import AnswerDraft, merged
from crow.domain.errors import NetworkError, StoreUnavailable
from crow.domain.events import Event, NoticeShown, TextShown, ThoughtShown
from crow.llm import Delta, Retrying, TextDelta, ThoughtDelta
from tests.support.scripted_model import Say, ScriptedStream


class Branch:
    """What a draft needs of a branch: it notes what is published and saved."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.saved: list[tuple[str, str]] = []
        self.gate: anyio.Event | None = None
        self.disk: anyio.Event | None = None
        self.failure: Exception | None = None

    async def publish(self, event: Event) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self.events.append(event)

    async def save_draft(self, *, message_id: str, text: str, thought: str) -> None:
        assert message_id == "m"
        if self.failure is not None:
            raise self.failure
        if self.disk is not None:
            await self.disk.wait()
        self.saved.append((text, thought))

    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextShown))


def draft_on(branch: Branch) -> AnswerDraft:
    return AnswerDraft(branch, "m")  # type: ignore[arg-type]


async def test_everything_is_shown_in_order_and_the_answer_is_complete() -> None:
    branch = Branch()
    pieces = [f"t{n} " for n in range(500)]
    answer = await draft_on(branch).follow(ScriptedStream(Say(text=pieces, thought="hm")))
    assert answer.text == "".join(pieces)
    assert branch.text() == "".join(pieces)
    assert branch.events[0] == ThoughtShown(message_id="m", offset=0, text="hm")


async def test_the_first_piece_is_shown_and_saved_while_the_stream_still_runs() -> None:
    branch, hold = Branch(), anyio.Event()
    draft = draft_on(branch)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(Say(text=["first"], hold=hold)))
            while not branch.saved:
                await anyio.lowlevel.checkpoint()
            assert branch.text() == "first"
            assert branch.saved == [("first", "")]
            hold.set()


async def test_pieces_that_wait_for_a_slow_client_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_PIECE_WAIT_S", 3_600)  # behind the first piece, only the end makes one due
    branch = Branch()
    branch.gate = anyio.Event()
    draft = draft_on(branch)
    say = Say(text=["a"] * 1000)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(say))
            await anyio.wait_all_tasks_blocked()
            assert branch.events == []
            branch.gate.set()
    assert branch.events == [
        TextShown(message_id="m", offset=0, text="a"),
        TextShown(message_id="m", offset=1, text="a" * 999),
    ]


async def test_pieces_are_shown_while_a_save_is_running() -> None:
    branch, disk = Branch(), anyio.Event()
    branch.disk = disk
    draft = draft_on(branch)
    say = Say(text=["a", "b", "c"])
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(say))
            await say.reached.wait()
            while branch.text() != "abc" and not branch.saved:
                await anyio.lowlevel.checkpoint()
            assert branch.saved == []
            disk.set()
    assert branch.text() == "abc"
    assert branch.saved == [("a", "")]


async def test_text_is_saved_even_if_the_client_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_PIECE_WAIT_S", 0)
    monkeypatch.setattr(drafts, "_SAVE_EVERY_S", 0.01)
    branch, say = Branch(), Say(text=["a", "b"], hold=anyio.Event())
    draft = draft_on(branch)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(say))
            while branch.text() != "a":
                await anyio.lowlevel.checkpoint()
            branch.gate = anyio.Event()
            while "".join(text for text, _ in branch.saved) != "ab":
                await anyio.lowlevel.checkpoint()
            assert branch.text() == "a"
            tasks.cancel_scope.cancel()


async def test_nothing_is_shown_while_a_save_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_LATE_SAVE_S", 0)
    monkeypatch.setattr(drafts, "_PIECE_WAIT_S", 0)
    branch, disk = Branch(), anyio.Event()
    branch.disk = disk
    draft = draft_on(branch)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(Say(text=["a", "b", "c"], hold=anyio.Event())))
            await anyio.wait_all_tasks_blocked()
            assert branch.text() == "a"
            disk.set()
            while branch.text() != "abc":
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()


async def test_text_shown_during_a_save_is_saved_later_even_if_no_text_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "_SAVE_EVERY_S", 0.01)
    branch = Branch()
    draft = draft_on(branch)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(Say(text=["a", "b", "c"], hold=anyio.Event())))
            while "".join(text for text, _ in branch.saved) != "abc":
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()


async def test_the_reader_waits_for_a_client_that_does_not_read() -> None:
    branch = Branch()
    branch.gate = anyio.Event()
    draft = draft_on(branch)
    say = Say(text=["x" * 300_000] * 10)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draft.follow, ScriptedStream(say))
            await anyio.wait_all_tasks_blocked()
            assert not say.reached.is_set()
            branch.gate.set()
    assert len(branch.text()) == 3_000_000


async def test_text_read_before_a_break_is_shown_before_the_error_is_raised() -> None:
    branch = Branch()
    draft = draft_on(branch)
    with pytest.raises(NetworkError, match="gone"):
        await draft.follow(ScriptedStream(Say(text=["so ", "far"], error=NetworkError("gone"))))
    assert branch.text() == draft.text == "so far"


async def test_a_draft_that_cannot_be_saved_fails_the_stream_with_its_own_error() -> None:
    branch = Branch()
    branch.failure = StoreUnavailable("disk full")
    with anyio.fail_after(60), pytest.raises(StoreUnavailable, match="disk full"):
        await draft_on(branch).follow(ScriptedStream(Say(text=["a"], hold=anyio.Event())))


async def test_a_retry_is_reported_before_the_text_that_follows_it() -> None:
    branch = Branch()

    class Stream(ScriptedStream):
        async def __aiter__(self) -> AsyncIterator[Delta]:
            yield Retrying(reason="Busy.", wait_s=2.0)
            async for delta in super().__aiter__():
                yield delta

    await draft_on(branch).follow(Stream(Say(text=["ok"])))
    assert branch.events == [
        NoticeShown(severity="warning", title="Busy. Trying again in 2 s."),
        TextShown(message_id="m", offset=0, text="ok"),
    ]


def test_neighbouring_deltas_of_one_kind_are_merged_in_order() -> None:
    retry = Retrying(reason="r", wait_s=0)
    given: list[Delta] = [TextDelta(text="a"), TextDelta(text="b"), ThoughtDelta(text="c"), retry, TextDelta(text="d")]
    assert list(merged(given)) == [TextDelta(text="ab"), ThoughtDelta(text="c"), retry, TextDelta(text="d")]


async def test_retries_of_one_answer_are_reported_once() -> None:
    branch = Branch()

    class Stream(ScriptedStream):
        async def __aiter__(self) -> AsyncIterator[Delta]:
            yield Retrying(reason="Busy.", wait_s=2.0)
            yield Retrying(reason="Still busy.", wait_s=4.0)
            async for delta in super().__aiter__():
                yield delta

    await draft_on(branch).follow(Stream(Say(text=["ok"])))
    assert [event for event in branch.events if isinstance(event, NoticeShown)] == [
        NoticeShown(severity="warning", title="Busy. Trying again in 2 s.")
    ]

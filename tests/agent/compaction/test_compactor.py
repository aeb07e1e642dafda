"""Tests compaction passes on a branch: what is stored, published and answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import pytest

from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.window import ContextWindow
from crow.agent.history.branch import Branch
from crow.domain.entries import (
    Announcement,
    Checkpoint,
    Entry,
    Location,
    Mask,
    ModelRequest,
    NewEntry,
    PlanItem,
    Prompt,
    Reminder,
    Restore,
    ShownFile,
    TurnEnd,
)
from crow.domain.errors import ContextOverflow, LeafMoved, TurnError
from crow.domain.events import CompactionChanged, ContextMeasured
from crow.domain.messages import Text, Usage, UserMessage
from crow.domain.rendering import parts_text
from crow.llm import ModelInfo
from crow.store import SessionChanges
from tests.support.compaction import SUMMARY, AnsweringModel, Notes, branch_of, compactor_on, summariser
from tests.support.memory_store import MemoryStore
from tests.support.paths import result_of, said, user
from tests.support.scripted_model import Say, call

SYSTEM = Prompt(system="s" * 4_000, tools=(), cwd="/", model="m")
FRESH = Prompt(system="t" * 4_000, tools=(), cwd="/", model="m")
INFO = ModelInfo(name="tiny", endpoint="test tiny", context_window=16_000)
CONFIGURED = replace(INFO, is_window_configured=True)
TOO_LONG = ContextOverflow("The request is too long.")


async def fresh() -> Prompt:
    return FRESH


class Place:
    """A branch in memory and a compactor on it."""

    def __init__(self, model: AnsweringModel | None = None, settings: CompactionPolicy | None = None) -> None:
        self.store, self.client = MemoryStore(), Notes()
        self.branch: Branch = branch_of(self.store, self.client)
        self.model = model or summariser("good", info=INFO)
        self.settings, self.window = settings or CompactionPolicy(), ContextWindow()
        self.compactor = self.renewed()

    def renewed(self) -> Compactor:
        return compactor_on(
            self.branch, self.model, self.settings, window=self.window, fresh_prompt=fresh, deadline_s=30
        )

    async def talk(self, exchanges: int, size: int = 8_000) -> None:
        """Adds prompts and answers of `size` characters each."""
        for _ in range(exchanges):
            for body in (user("q" * size), said("a" * size), TurnEnd(stop="end_turn")):
                await self.branch.record([NewEntry(body=body)])

    def stored(self) -> list[Entry]:
        return list(self.store.path("s"))


@pytest.fixture
async def place() -> Place:
    place = Place()
    await place.branch.record([NewEntry(body=SYSTEM)])
    return place


async def test_checkpoint_and_new_prompt_are_one_append_and_the_client_is_told(place: Place) -> None:
    await place.talk(3)
    await place.branch.record([NewEntry(body=user("next"))])
    appends = place.store.appends
    await place.compactor.make_room()
    assert place.store.appends == appends + 1
    request, prompt, checkpoint = place.stored()[-3:]
    assert (request.body, request.usage) == (
        ModelRequest(purpose="summary"),
        Usage(input_tokens=1000, output_tokens=100),
    )
    assert prompt.body == FRESH
    assert isinstance(checkpoint.body, Checkpoint)
    assert (checkpoint.body.summary, checkpoint.body.method, checkpoint.body.reason) == (SUMMARY, "prefix", "threshold")
    assert (checkpoint.usage, checkpoint.model) == (None, "tiny")
    said_to_client = [event for event in place.client.events if isinstance(event, CompactionChanged)]
    assert said_to_client == [
        CompactionChanged(compaction_id=checkpoint.body.compaction_id, status="in_progress"),
        CompactionChanged(compaction_id=checkpoint.body.compaction_id, status="completed", detail=SUMMARY),
    ]
    assert place.branch.context().system == FRESH.system
    assert (await place.store.tail("s")).entries == tuple(place.branch.entries)


async def test_mode_and_plan_go_into_the_checkpoint(place: Place) -> None:
    plan = (PlanItem(content="write tests", status="in_progress"),)
    await place.branch.change(SessionChanges(mode="plan"))
    (step,) = await place.branch.record([NewEntry(body=said("", "a"))])
    await place.branch.record([NewEntry(body=result_of(step.id, 0, "ok", name="update_plan", plan=plan))])
    await place.talk(3)
    await place.compactor.make_room()
    checkpoint = place.stored()[-1].body
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.mode, checkpoint.plan) == ("plan", plan)
    assert (place.branch.projection.mode, place.branch.projection.plan) == ("plan", plan)


async def read(place: Place, path: str, text: str) -> None:
    """The model reads a file."""
    called = replace(said("", "a"), calls=(call("read_file", path=path),))
    (step,) = await place.branch.record([NewEntry(body=called)])
    announcement = Announcement(title="read_file", locations=(Location(path=path),))
    result = replace(result_of(step.id, 0, text), announcement=announcement)
    await place.branch.record([NewEntry(body=result)])


def shows(*files: tuple[str, str | None]) -> Callable[[str], Awaitable[str | None]]:
    texts = dict(files)

    async def read_file(path: str) -> str | None:
        return texts.get(path)

    return read_file


async def test_checkpoint_shows_the_files_in_use_as_they_are_now(place: Place) -> None:
    for name in "abcd":
        await read(place, f"/{name}", f"{name} as it was " * 20)
    await place.talk(3)
    await read(place, "/e", "e is still in view " * 20)
    files = shows(
        ("/a", "a as it is now </file>"), ("/b", None), ("/c", "c" * 40_000), ("/e", "e is still in view " * 20)
    )
    compactor = compactor_on(place.branch, place.model, fresh_prompt=fresh, read_file=files)
    await compactor.make_room()
    body = place.stored()[-1].body
    assert isinstance(body, Checkpoint)
    # /b cannot be read, /c is too large, /d is gone, and the model still sees /e.
    assert body.files_shown == (ShownFile(path="/a", text="a as it is now </file>"),)
    assert '<file_ path="/a">\na as it is now </file>\n</file_>' in text_of_checkpoint(place)
    assert body.tokens_after == place.branch.context().estimate
    # The next checkpoint goes on showing it, with its text of that time.
    await place.talk(3)
    files = shows(("/a", "a as it is later"))
    await compactor_on(place.branch, place.model, fresh_prompt=fresh, read_file=files).make_room()
    assert "a as it is later" in text_of_checkpoint(place)
    assert "a as it is now" not in text_of_checkpoint(place)


async def test_files_in_use_fit_into_the_room_and_the_newest_come_first(place: Place) -> None:
    names = [f"/{number}" for number in range(12)]
    for name in names:
        await read(place, name, "seen")
    await place.talk(3)
    files = shows(*[(name, f"{name} " + "x" * 2_000) for name in names])
    compactor = compactor_on(place.branch, place.model, fresh_prompt=fresh, read_file=files)
    await compactor.make_room()
    body = place.stored()[-1].body
    assert isinstance(body, Checkpoint)
    shown = [file.path for file in body.files_shown]
    assert shown == names[::-1][: len(shown)]
    assert 2 <= len(shown) < 12
    assert body.tokens_after <= compactor.gauge.limits().files_ceiling


def text_of_checkpoint(place: Place) -> str:
    message = place.branch.context().messages[1]
    assert isinstance(message, UserMessage)
    return parts_text(message.parts)


async def test_mask_is_one_entry_and_asks_no_model(place: Place) -> None:
    (step,) = await place.branch.record([NewEntry(body=said("", "a"))])
    for later in (result_of(step.id, 0, "x" * 50_000), said("well"), user("next")):
        await place.branch.record([NewEntry(body=later)])
    await place.compactor.make_room()
    body = place.stored()[-1].body
    assert isinstance(body, Mask)
    assert body.tokens_after < body.tokens_before
    assert place.model.requests == []
    assert place.compactor.gauge.used() == body.tokens_after


async def test_nothing_is_compacted_below_the_threshold_or_when_compaction_is_off(place: Place) -> None:
    await place.talk(1)
    await place.compactor.make_room()
    await place.talk(3)
    off = compactor_on(place.branch, place.model, CompactionPolicy(auto=False), fresh_prompt=fresh)
    await off.make_room()
    with pytest.raises(
        ContextOverflow, match=r"too long\. The request had about .* tokens.* is off .*; /compact makes room"
    ):
        await off.overflowed(TOO_LONG)
    assert place.model.requests == []
    assert place.client.compactions() == []
    assert "Compacted to a summary" in await off.on_command()


async def test_cancel_while_the_summary_is_written_leaves_nothing_behind() -> None:
    reached = anyio.Event()
    model = AnsweringModel(lambda _: Say(hold=anyio.Event(), reached=reached), INFO)
    place = Place(model)
    await place.talk(4)
    before = place.stored()
    compactor = compactor_on(place.branch, model, fresh_prompt=fresh)
    ended: list[str] = []

    async def make_room() -> None:
        try:
            await compactor.make_room()
        except anyio.get_cancelled_exc_class():
            ended.append("cancelled")
            raise

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make_room)
            await reached.wait()
            tasks.cancel_scope.cancel()
    assert ended == ["cancelled"]
    assert place.stored() == before
    assert place.client.compactions() == ["in_progress", "cancelled"]


async def test_lost_race_for_the_leaf_fails_and_changes_nothing(place: Place) -> None:
    await place.talk(4)
    await place.store.append("s", leaf=place.branch.leaf, turn=9, entries=[NewEntry(body=user("from elsewhere"))])
    stored = place.stored()
    with pytest.raises(LeafMoved):
        await place.compactor.make_room()
    assert place.stored() == stored
    assert place.client.compactions() == ["in_progress", "failed"]


async def test_entries_that_arrive_during_the_summary_are_kept(place: Place) -> None:
    async def fresh_and_late() -> Prompt:
        await place.branch.record([NewEntry(body=Reminder(text="The mode is now plan."))])
        return FRESH

    await place.branch.record([NewEntry(body=said("a" * 8_000)), NewEntry(body=user("q" * 44_000))])
    await compactor_on(place.branch, place.model, fresh_prompt=fresh_and_late).make_room()
    checkpoint = place.stored()[-1].body
    assert isinstance(checkpoint, Checkpoint)
    assert len(place.branch.context().messages) == 4
    assert place.branch.context().messages[-1] == UserMessage(parts=(Text(text="The mode is now plan."),))


async def test_larger_new_prompt_entry_makes_the_pass_keep_less(place: Place) -> None:
    await place.talk(8, 4_000)

    async def larger() -> Prompt:
        return Prompt(system="word" * 8_000, tools=(), cwd="/", model="m")

    result = await compactor_on(place.branch, place.model, fresh_prompt=larger).compact("threshold")
    limits = place.compactor.gauge.limits()
    assert limits.fixed > 8_000
    assert result.entry is not None
    assert isinstance(result.entry.body, Checkpoint)
    bound = limits.ceiling if result.entry.body.first_kept is None else limits.target
    assert place.compactor.gauge.used() == result.entry.body.tokens_after <= bound


async def test_too_small_configured_window_ends_the_turn_with_numbers_and_a_remedy() -> None:
    place = Place(summariser("good", info=replace(CONFIGURED, context_window=3_000)))
    await place.branch.record([NewEntry(body=SYSTEM)])
    await place.talk(2)
    before = place.stored()
    wanted = (
        r"context_window is 3,000 tokens in your configuration\. .* tools take 1,004.*Raise or remove context_window"
    )
    with pytest.raises(TurnError, match=wanted):
        await place.compactor.make_room()
    assert place.stored() == before
    assert place.model.requests == []


@pytest.mark.parametrize("window", [None, 900, 1_300, 3_000])
async def test_unconfigured_window_never_refuses(window: int | None) -> None:
    place = Place(summariser("good", info=replace(INFO, context_window=window)))
    await place.branch.record([NewEntry(body=SYSTEM), NewEntry(body=user("q" * 700_000))])
    for _ in range(3):
        await place.compactor.make_room()
    assert len(place.stored()) <= 2 + 3  # the prompt entry and the message, perhaps a request, a prompt, a checkpoint
    place.model.info = replace(CONFIGURED, context_window=900)
    with pytest.raises(TurnError, match="context_window is 900 tokens in your configuration"):
        await place.renewed().make_room()


async def test_tiny_learned_window_still_gets_a_checkpoint(place: Place) -> None:
    place.model.info = replace(INFO, context_window=2_000)
    await place.talk(2)
    await place.branch.record([NewEntry(body=user("And now?"))])
    await place.compactor.make_room()
    assert isinstance(place.stored()[-1].body, Checkpoint)
    assert place.compactor.gauge.used() < 2_000
    assert place.branch.context().messages[-1] == UserMessage(parts=(Text(text="And now?"),))


async def test_third_pass_in_a_row_ends_the_turn_and_the_next_turn_may_compact_again(place: Place) -> None:
    await fill_up_too_fast(place)
    place.model.info = CONFIGURED
    with pytest.raises(TurnError, match="fills up faster than compaction can empty it"):
        await place.compactor.make_room()
    await place.renewed().make_room()


async def test_third_pass_in_a_row_is_skipped_if_the_window_is_not_configured(place: Place) -> None:
    await fill_up_too_fast(place)
    before = place.stored()
    await place.compactor.make_room()
    assert place.stored() == before


async def fill_up_too_fast(place: Place) -> None:
    """Two passes with one answer after each, then a full context again."""
    for _ in range(2):
        for _ in range(4):
            await place.branch.record([NewEntry(body=user("q" * 12_000))])
        await place.compactor.make_room()
        await place.branch.record([NewEntry(body=said("one answer"))])
    for _ in range(4):
        await place.branch.record([NewEntry(body=user("q" * 12_000))])


async def test_answers_that_a_compaction_has_replaced_count_when_the_next_one_is_due(place: Place) -> None:
    place.model.info = CONFIGURED
    for passes in (1, 2, 3, 4):
        await place.talk(2, size=15_000)
        await place.compactor.make_room()
        assert sum(isinstance(entry.body, Checkpoint) for entry in place.stored()) == passes


async def test_overflow_lowers_the_window_and_compacts(place: Place) -> None:
    await place.talk(2)
    await place.compactor.overflowed(ContextOverflow("too long", limit=9_000))
    assert place.compactor.gauge.window() == 9_000
    assert place.renewed().gauge.window() == 9_000
    checkpoint = place.stored()[-1].body
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.reason == "overflow"


async def test_overflow_that_cannot_be_compacted_says_what_the_user_can_do(place: Place) -> None:
    await place.branch.record([NewEntry(body=user("hi"))])
    before = place.stored()
    wanted = (
        r"too long\. The request had about 1,009 tokens, 1,004 of them system prompt and tools.*prompt again.*/model"
    )
    with pytest.raises(ContextOverflow, match=wanted):
        await place.compactor.overflowed(TOO_LONG)
    assert place.stored() == before
    assert place.compactor.gauge.window() == 16_000


async def test_messages_are_cut_for_the_learned_window_while_a_larger_one_is_tested(place: Place) -> None:
    await place.talk(2)
    await place.compactor.overflowed(ContextOverflow("too long", limit=9_000))
    gauge = place.compactor.gauge
    cuts = gauge.cut_result("x" * 60_000), gauge.cut_prompt("x" * 60_000)
    for _ in range(16):
        await place.window.on_answer(gauge.info, sent=100, counted=100)
    place.window.test_if_due(gauge.info)
    assert gauge.window() == 16_000
    assert (gauge.cut_result("x" * 60_000), gauge.cut_prompt("x" * 60_000)) == cuts


@pytest.mark.parametrize(
    ("error", "calibration"),
    [
        (ContextOverflow("too long", size=10_000), 2.0),
        (ContextOverflow("too long", limit=10_000), 2.0),
        (ContextOverflow("too long", size=4_000), 1.0),
        (ContextOverflow("too long", limit=1_000_000), 1.0),
    ],
    ids=["counted twice as many", "at least twice as many", "counted less", "nonsense"],
)
async def test_refusal_corrects_the_calibration_within_bounds(
    place: Place, error: ContextOverflow, calibration: float
) -> None:
    await place.talk(1)
    await place.compactor.gauge.on_refusal(error)
    assert place.branch.row.calibration == pytest.approx(calibration, rel=0.01)


async def test_request_that_keeps_being_refused_is_compacted_twice(place: Place) -> None:
    await place.talk(3)
    for _ in range(2):
        await place.compactor.overflowed(TOO_LONG)
    used = place.compactor.gauge.used()
    with pytest.raises(
        ContextOverflow, match=r"after several compactions\. Send another prompt .* or start over with /clear"
    ):
        await place.compactor.overflowed(TOO_LONG)
    assert place.compactor.gauge.used() == used < 12_000 // 3
    assert len([entry for entry in place.stored() if isinstance(entry.body, Checkpoint)]) == 2
    await place.branch.record([NewEntry(body=user("Go on."))])
    await place.renewed().overflowed(TOO_LONG)
    assert place.compactor.gauge.used() < used - 400
    assert place.branch.context().messages[-1] == UserMessage(parts=(Text(text="Go on."),))


async def test_compact_answers_with_numbers_and_a_second_one_finds_nothing_new(place: Place) -> None:
    await place.talk(2)
    before = place.compactor.gauge.used()
    answer = await place.compactor.on_command("the parser")
    assert answer == (
        f"Compacted to a summary: {before:,} → {place.compactor.gauge.used():,} tokens. "
        "Nothing is deleted; the model can recall everything."
    )
    assert "the parser" in repr(place.model.requests[0].messages[-1])
    assert await place.compactor.on_command() == "Nothing is new since the last compaction."


async def test_undo_restores_the_conversation_also_from_a_loaded_tail(place: Place) -> None:
    await place.talk(2)
    before = place.branch.context()
    await place.compactor.on_command()
    assert place.branch.context() != before
    loaded = Branch(place.store, place.client, await place.store.tail("s"))
    answer = await compactor_on(loaded, place.model).on_command("undo")
    assert answer.startswith("Undone: ")
    assert loaded.context().messages[1:] == before.messages[1:]
    assert isinstance(place.stored()[-1].body, Restore)


async def test_undo_is_refused_with_numbers_if_the_conversation_would_not_fit(place: Place) -> None:
    assert await place.compactor.on_command("undo") == "There is no compaction to undo."
    await place.talk(4)
    await place.compactor.make_room()
    assert "Not undone: the conversation would have 17," in await place.compactor.on_command("undo")


async def test_calibration_is_stored_with_the_pass(place: Place) -> None:
    await place.talk(2)
    estimate = place.compactor.gauge.estimate()
    answer = replace(said("more"), endpoint=INFO.endpoint)
    usage = Usage(input_tokens=2 * estimate, output_tokens=10)
    await place.branch.record([NewEntry(body=answer, usage=usage, estimate=estimate), NewEntry(body=user("go"))])
    await place.compactor.make_room()
    assert place.branch.row.calibration == 1.5


async def test_client_is_told_how_full_the_context_is(place: Place) -> None:
    await place.talk(1)
    await place.compactor.gauge.tell()
    assert place.client.events[-1] == ContextMeasured(used=place.compactor.gauge.used(), size=16_000, cost=None)

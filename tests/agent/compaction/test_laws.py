"""Tests twelve laws of compaction over random sessions and failing summarisers.

1 requests are valid · 2 within the target, and never larger than before · 3 the first and last user message are visible
· 4 an entry is covered once, or visible · 5 modified files are complete · 6 a second pass changes nothing · 7 model
requests are bounded · 8 one system message with the same bytes · 9 a known outcome · 10 the same replay · 11 a prefix
between breaks · 12 all or nothing is stored.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.compaction import Reason
from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.compaction.checkpoint import masking_order
from crow.agent.history.branch import Branch
from crow.domain.conversation import for_model
from crow.domain.entries import (
    Assistant,
    Body,
    Checkpoint,
    Entry,
    Mask,
    ModelRequest,
    NewEntry,
    Restore,
    ToolResult,
    User,
)
from crow.domain.errors import StoreError
from crow.domain.messages import SystemMessage, Text, UserMessage
from crow.domain.rendering import parts_text, user_parts
from crow.llm import ModelInfo
from crow.protocol.params import ClientCapabilities
from tests.support.amounts import examples
from tests.support.compaction import PROMPT, Notes, Simulation, Way, compactor_on, flaky, same_prompt, summariser
from tests.support.memory_store import MemoryStore
from tests.support.paths import damaged, problems
from tests.support.shared_host import transcript
from tests.support.views import read_log

SESSIONS = examples(50)
WINDOWS = st.sampled_from([4_000, 5_000, 6_000, 8_000, 16_000])
TINY = st.sampled_from([500, 1_500, 2_500])
"""Nobody configures such windows, but crow may learn them."""
OUTPUTS = st.sampled_from([None, 1_000, 8_000, 200_000])
FAILURE_RATES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
REASONS: tuple[Reason, ...] = ("threshold", "model", "command", "overflow")
ENDS = {"noop", "masked", "compacted", "too_small"}


def described(window: int, max_output: int | None = None, *, is_configured: bool = True) -> ModelInfo:
    return ModelInfo(
        name="scripted",
        endpoint="test scripted",
        context_window=window,
        is_window_configured=is_configured,
        max_output_tokens=max_output,
    )


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    is_configured, seed = draw(st.booleans()), draw(st.integers(0, 2**32))
    window = draw(WINDOWS if is_configured else WINDOWS | TINY)
    info = described(window, draw(OUTPUTS), is_configured=is_configured)
    return Simulation(
        seed=seed,
        window=window,
        model=flaky(draw(FAILURE_RATES), random.Random(seed), info),
        ratio=draw(st.sampled_from([0.6, 1.0, 1.3, 3.0])),
    )


def check_all(simulation: Simulation) -> None:
    check_request_is_valid(simulation)
    check_prefix(simulation)
    if simulation.passes and simulation.passes[-1] is not simulation.checked:
        simulation.checked = simulation.passes[-1]
        check_pass(simulation)
        check_user_messages(simulation)
        check_covered(simulation)
        check_files(simulation)


def check_request_is_valid(simulation: Simulation) -> None:
    """Laws 1 and 8."""
    context = simulation.branch.context()
    assert problems(context.messages) == []
    assert context.messages[0] == SystemMessage(text=PROMPT.system)
    assert context.tools == PROMPT.tools


def check_prefix(simulation: Simulation) -> None:
    """Law 11."""
    if len(simulation.requests) > 1 and len(simulation.requests) - 1 not in simulation.broken:
        before, after = simulation.requests[-2:]
        assert after[: len(before)] == before


def check_pass(simulation: Simulation) -> None:
    """Laws 2, 7 and 9: at most two requests, none for a mask; at the target and smaller than before."""
    done = simulation.passes[-1]
    result, limits = done.result, done.limits
    assert result.outcome in ENDS
    assert done.calls <= (2 if result.outcome == "compacted" else 0 if result.outcome == "masked" else 2)
    if result.entry is not None:
        body = result.entry.body
        assert isinstance(body, (Mask, Checkpoint))
        nothing_kept = isinstance(body, Checkpoint) and body.first_kept is None
        assert body.tokens_after < body.tokens_before
        if limits.is_tiny and isinstance(body, Checkpoint):
            assert not limits.is_configured
            assert body.tokens_after <= 0.9 * body.tokens_before
        else:
            shows_files = isinstance(body, Checkpoint) and body.files_shown
            with_files = limits.files_ceiling if shows_files else 0
            assert body.tokens_after <= max(with_files, limits.ceiling if nothing_kept else limits.target)
        if isinstance(body, Mask):
            check_mask(simulation, result.entry, limits.target)
        if simulation.branch.entries[-1] is result.entry and not limits.is_tiny:
            assert simulation.compactor.gauge.used() < limits.threshold


def check_mask(simulation: Simulation, entry: Entry, target: int) -> None:
    """Part of law 2: without the output that was masked last, the target would not be reached."""
    mask, path = entry.body, [each for each in simulation.branch.entries if each.id < entry.id]
    assert isinstance(mask, Mask)
    before, after = for_model(path), for_model([*path, entry])
    hidden = {
        origin
        for origin, one, other in zip(before.origins, before.messages, after.messages, strict=True)
        if one != other
    }
    last = [each for each in masking_order(path) if each in hidden][-1]
    less = replace(entry, body=replace(mask, exceptions=(*mask.exceptions, last)))
    assert round(for_model([*path, less]).estimate * mask.tokens_after / after.estimate) > target - 2


def check_user_messages(simulation: Simulation) -> None:
    """Law 3: the first and last are there word for word, or cut and naming their entry."""
    users = [entry for entry in simulation.path() if isinstance(entry.body, User)]
    said = "\n".join(
        parts_text(message.parts)
        for message in simulation.branch.context().messages
        if isinstance(message, UserMessage)
    )
    for entry in users[:1] + users[-1:]:
        assert isinstance(entry.body, User)
        text = parts_text(user_parts(entry.body, entry.id))
        assert text in said or f"recall with entry {entry.id} " in said


def check_covered(simulation: Simulation) -> None:
    """Law 4: the newest checkpoint covers everything before the first kept entry, and hides it."""
    checkpoint = simulation.branch.projection.checkpoint
    if checkpoint is None:
        return
    path, context = simulation.path(), simulation.branch.context()
    assert isinstance(checkpoint.body, Checkpoint)
    first = checkpoint.body.first_kept or checkpoint.id + 1
    before = [entry for entry in path if entry.id < min(first, checkpoint.id)]
    assert checkpoint.body.first_covered == before[0].id
    if checkpoint.body.first_kept is None:
        before.pop()  # the prompt entry that was written with it
        while isinstance(before[-1].body, ModelRequest) and before[-1].id > (checkpoint.body.last_covered or 0):
            before.pop()  # the requests for its summary
    assert checkpoint.body.last_covered == before[-1].id
    assert all(origin == checkpoint.id or origin >= first for origin in context.origins[1:])
    assert for_model(path) == context


def check_files(simulation: Simulation) -> None:
    """Law 5: all modified files are listed."""
    checkpoint = simulation.branch.projection.checkpoint
    if checkpoint is not None and checkpoint is simulation.branch.entries[-1]:
        assert isinstance(checkpoint.body, Checkpoint)
        assert set(checkpoint.body.files_modified) == simulation.files_modified()


@pytest.mark.long
@given(simulation=simulations(), steps=st.integers(1, 12))
@settings(max_examples=SESSIONS)
async def test_every_law_holds_at_every_step_of_any_session(simulation: Simulation, steps: int) -> None:
    await simulation.run(steps, check_all)
    assert not replayed_differently(list(simulation.path()))


def replayed_differently(path: list[Entry]) -> bool:
    """Law 10: whether compaction changed the client's history beyond its own entries."""
    own = (Checkpoint, Mask, Restore)
    caps = ClientCapabilities(compaction=True)
    before, after = (
        transcript(read_log(entries, caps))
        for entries in (path, [entry for entry in path if not isinstance(entry.body, own)])
    )
    return before != after


@given(simulation=simulations(), steps=st.integers(1, 25))
@settings(max_examples=examples(20))
async def test_second_pass_changes_nothing(simulation: Simulation, steps: int) -> None:
    await simulation.run(steps, lambda _: None)
    if simulation.compactor.gauge.limits().is_tiny:
        return  # every pass is a try there; the compactor bounds how many there are
    for reason in REASONS:
        first = await simulation.compactor.compact(reason)
        if first.outcome != "compacted":
            continue
        appends, asked = simulation.store.appends, len(simulation.model.requests)
        second = await simulation.compactor.compact(reason)
        if reason != "overflow":
            assert second.outcome == "noop"
            assert (simulation.store.appends, len(simulation.model.requests)) == (appends, asked)


@given(entries=damaged(), window=WINDOWS, reason=st.sampled_from(REASONS), rate=FAILURE_RATES)
@settings(max_examples=examples(20))
async def test_damaged_history_is_compacted_like_any_other(
    entries: list[Entry], window: int, reason: Reason, rate: float
) -> None:
    if not entries:
        return
    entries = [replace(entry, body=enlarged(entry)) for entry in entries]
    store = MemoryStore()
    branch = Branch(store, Notes(), store.hold("s", entries))
    model = flaky(rate, random.Random(len(entries)), described(window))
    compactor = compactor_on(branch, model, fresh_prompt=same_prompt, deadline_s=0.001)
    for _ in range(3):
        result = await compactor.compact(reason)
        assert result.outcome in ENDS
        assert problems(branch.context().messages) == []
        if result.entry is not None:
            body = result.entry.body
            assert isinstance(body, (Mask, Checkpoint))
            assert body.tokens_after < body.tokens_before
    await branch.record([NewEntry(body=User(parts=(), message_id="m"))])
    assert problems(branch.context().messages) == []


def enlarged(entry: Entry) -> Body:
    """The entry's body, long enough to need compaction."""
    body = entry.body
    if isinstance(body, User):
        return replace(body, parts=tuple(Text(text=part.text * 300) for part in body.parts if isinstance(part, Text)))
    return replace(body, text=body.text * 300) if isinstance(body, (Assistant, ToolResult)) else body


@pytest.mark.long
@pytest.mark.parametrize("ways", [("hang",), ("garbage",), ("empty", "hang"), ("error",), ("calls", "long")])
async def test_summariser_that_never_works_leaves_notes_that_are_bounded_and_do_not_nest(
    ways: tuple[Way, ...],
) -> None:
    simulation = Simulation(seed=5, window=8_000, model=summariser(*ways, info=described(8_000)))
    await simulation.run(60, check_all)
    made = [
        done.result.entry.body for done in simulation.passes if done.result.outcome == "compacted" and done.result.entry
    ]
    assert len(made) > 5
    for body in made:
        assert isinstance(body, Checkpoint)
        assert body.summary.count("Notes taken without a model") <= 1
        assert len(body.summary) < 8_000


async def test_pass_that_cannot_be_stored_leaves_everything_as_it_was() -> None:
    """Law 12: a pass is one transaction and changes nothing else."""
    simulation = Simulation(seed=3, window=6_000, model=summariser("good", info=described(6_000)))
    await simulation.run(6, lambda _: None)
    store, branch = simulation.store, simulation.branch
    await branch.record([NewEntry(body=User(parts=(Text(text="word " * 6_000),), message_id="m"))])
    before, context, row = store.path("s"), branch.context(), await store.session("s")
    store.fails = StoreError("The disk is full.")
    with pytest.raises(StoreError, match="disk is full"):
        await simulation.compactor.compact("threshold")
    assert (store.path("s"), branch.context(), await store.session("s")) == (before, context, row)
    store.fails = None
    result = await simulation.compactor.compact("threshold")
    assert result.entry is not None
    reopened = await store.tail("s")
    assert for_model(reopened.entries) == branch.context() == for_model(store.path("s"))


@given(simulation=simulations())
@settings(max_examples=examples(20))
async def test_when_compaction_is_off_nothing_is_ever_compacted(simulation: Simulation) -> None:
    simulation.settings = CompactionPolicy(auto=False)
    await simulation.run(3, lambda _: None)
    appends = simulation.store.appends
    await simulation.compactor.make_room()
    assert simulation.store.appends == appends

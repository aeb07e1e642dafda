"""The laws of compaction over random sessions: whatever is said, whatever the summariser does."""

from __future__ import annotations

from functools import partial

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.compaction import CompactionSettings
from crow.domain.conversation import Replay, for_model
from crow.domain.entries import Checkpoint, Entry, Mask, Restore, User
from crow.domain.events import EntryStored, Event
from crow.domain.messages import SystemMessage, UserMessage
from crow.domain.rendering import parts_text, user_parts
from crow.llm import ModelInfo
from tests.support.compaction import PROMPT, Simulation, Way, summariser
from tests.support.paths import problems

WINDOWS = st.sampled_from([4_000, 6_000, 8_000, 16_000, 32_000, 128_000])
OUTPUTS = st.sampled_from([None, 1_000, 8_000, 200_000])
WAYS: list[Way] = ["good", "good", "empty", "cut", "calls", "long", "garbage", "error", "hang"]


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    window = draw(WINDOWS)
    info = ModelInfo(name="scripted", endpoint="test scripted", context_window=window, max_output_tokens=draw(OUTPUTS))
    return Simulation(
        seed=draw(st.integers(0, 2**32)),
        window=window,
        model=summariser(*draw(st.lists(st.sampled_from(WAYS), min_size=1, max_size=4)), info=info),
        ratio=draw(st.sampled_from([0.6, 1.0, 1.3, 3.0])),
    )


def check_all(simulation: Simulation) -> None:
    check_request_is_valid(simulation)
    check_prefix(simulation)
    if simulation.passes:
        check_pass(simulation)
        check_user_messages(simulation)
        check_covered(simulation)
        check_files(simulation)


def check_request_is_valid(simulation: Simulation) -> None:
    context = simulation.branch.context()
    assert problems(context.messages) == []
    assert context.messages[0] == SystemMessage(text=PROMPT.system)
    assert context.tools == PROMPT.tools


def check_prefix(simulation: Simulation) -> None:
    if len(simulation.requests) > 1 and len(simulation.requests) - 1 not in simulation.broken:
        before, after = simulation.requests[-2:]
        assert after[: len(before)] == before


def check_pass(simulation: Simulation) -> None:
    """At most two questions, none where a mask was enough; the result is at its target and less than before."""
    done = simulation.passes[-1]
    result, limits = done.result, done.limits
    assert done.calls <= (0 if result.outcome == "masked" else 2)
    if result.entry is not None:
        body = result.entry.body
        nothing_kept = isinstance(body, Checkpoint) and body.first_kept is None
        assert result.tokens_after < result.tokens_before
        assert result.tokens_after <= (limits.ceiling if nothing_kept else limits.target)
        if simulation.branch.entries[-1] is result.entry:
            assert simulation.compactor.gauge.used() < limits.threshold
    else:
        assert result.tokens_after == result.tokens_before


def check_user_messages(simulation: Simulation) -> None:
    """The first and the last message of the user are there word for word, or cut with their entry named."""
    users = [entry for entry in simulation.store.path("s") if isinstance(entry.body, User)]
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
    checkpoint = simulation.branch.projection.checkpoint
    context = simulation.branch.context()
    if checkpoint is None:
        return
    assert isinstance(checkpoint.body, Checkpoint)
    first = checkpoint.body.first_kept or checkpoint.id + 1
    assert all(origin == checkpoint.id or origin >= first for origin in context.origins[1:])
    assert for_model(simulation.store.path("s")) == context


def check_files(simulation: Simulation) -> None:
    checkpoint = simulation.branch.projection.checkpoint
    if checkpoint is not None and checkpoint is simulation.branch.entries[-1]:
        assert isinstance(checkpoint.body, Checkpoint)
        assert set(checkpoint.body.files_modified) == simulation.files_modified()


@given(simulation=simulations(), steps=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_every_law_holds_at_every_step_of_any_session(simulation: Simulation, steps: int) -> None:
    anyio.run(partial(simulation.run, steps, check_all))
    assert not replayed_differently(list(simulation.store.path("s")))


def replayed_differently(path: list[Entry]) -> bool:
    """Whether compaction changed the history for the client by more than its own entries."""
    own = (Checkpoint, Mask, Restore)

    def replayed(entries: list[Entry]) -> list[Event]:
        replay = Replay()
        events = [event for entry in entries for event in replay.feed(entry)] + list(replay.end())
        return [e for e in events if not (isinstance(e, EntryStored) and isinstance(e.entry.body, own))]

    return replayed(path) != replayed([entry for entry in path if not isinstance(entry.body, own)])


@given(simulation=simulations(), steps=st.integers(1, 25))
@settings(max_examples=40, deadline=None)
def test_a_second_pass_changes_nothing(simulation: Simulation, steps: int) -> None:
    async def run() -> None:
        await simulation.run(steps, lambda _: None)
        for reason in ("threshold", "command"):
            first = await simulation.compactor.compact(reason)
            if first.outcome != "compacted":
                continue
            appends, asked = simulation.store.appends, len(simulation.model.requests)
            second = await simulation.compactor.compact(reason)
            assert second.outcome == "noop"
            assert (simulation.store.appends, len(simulation.model.requests)) == (appends, asked)

    anyio.run(run)


def test_a_long_session_stays_bounded_and_its_cost_linear() -> None:
    sizes: list[int] = []
    simulation = Simulation(
        seed=11,
        window=32_000,
        model=summariser("good", info=ModelInfo(name="scripted", endpoint="test scripted", context_window=32_000)),
        settings=CompactionSettings(),
    )

    def note(simulation: Simulation) -> None:
        sizes.append(simulation.compactor.gauge.used())

    anyio.run(partial(simulation.run, 400, note))
    assert max(sizes) < simulation.compactor.gauge.limits().threshold
    half = len(sizes) // 2
    assert sum(sizes[half:]) < 1.3 * sum(sizes[:half])
    assert not simulation.ended

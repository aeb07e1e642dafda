"""Tests the sizes that a user may give with `/compact`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.compaction.budget import CompactionPolicy, limits_for
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.wish import CompactionWish
from crow.domain.entries import NewEntry, Prompt, TurnEnd
from crow.domain.errors import ArgumentError
from crow.domain.messages import UserMessage
from crow.domain.rendering import parts_text
from crow.llm import ModelInfo
from tests.support.compaction import AnsweringModel, Notes, branch_of, compactor_on, summariser
from tests.support.memory_store import MemoryStore
from tests.support.paths import said, user

INFO = ModelInfo(name="m", endpoint="test m", context_window=64_000)


@pytest.mark.parametrize(
    ("argument", "wish"),
    [
        ("", CompactionWish()),
        ("3000", CompactionWish(size=3_000)),
        ("3,000 the parser", CompactionWish(size=3_000, focus="the parser")),
        ("12k", CompactionWish(size=12_000)),
        ("--keep 500", CompactionWish(keep=500)),
        ("--keep=0 tests", CompactionWish(keep=0, focus="tests")),
        ("8000 --keep 2_000 what failed", CompactionWish(size=8_000, keep=2_000, focus="what failed")),
        ("the 3000 lines", CompactionWish(focus="the 3000 lines")),
        ("3000th line", CompactionWish(focus="3000th line")),
    ],
)
def test_an_argument_is_a_size_an_option_and_a_focus(argument: str, wish: CompactionWish) -> None:
    assert CompactionWish.parse(argument) == wish


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--keep", "`--keep` is “”; expected a number of tokens"),
        ("--keep many", "`--keep` is “many”; expected a number of tokens"),
        ("--kep 3", "has no option “--kep”"),
        ("3000 --keep 3000", "the whole conversation may take only 3,000"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_would_work(argument: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        CompactionWish.parse(argument)


@given(st.integers(8_000, 400_000), st.integers(1, 300_000), st.floats(0.1, 0.9), st.integers(500, 6_000))
def test_no_compaction_leaves_more_than_the_size(window: int, size: int, target: float, fixed: int) -> None:
    policy = CompactionPolicy(target=target)
    limits = limits_for(window, None, fixed, policy)
    try:
        within = CompactionWish(size=size).applied_to(limits, policy)
    except ArgumentError:
        assert size < 2_300
        return
    most = fixed + size
    assert max(within.target, within.ceiling, within.files_ceiling, within.threshold) <= max(most, fixed + limits.room)
    assert max(within.target, within.ceiling, within.files_ceiling) <= most + 1
    assert within.keep + within.pins + within.summary + within.lists + within.skills <= size


async def talk(exchanges: int = 6, size: int = 8_000) -> tuple[AnsweringModel, Compactor]:
    store, model = MemoryStore(), summariser("good", info=INFO)
    branch = branch_of(store, Notes())
    await branch.record([NewEntry(body=Prompt(system="s" * 4_000, tools=(), cwd="/", model="m"))])
    for number in range(exchanges):
        for body in (user(f"q{number} " + "q" * size), said(f"a{number} " + "a" * size), TurnEnd(stop="end_turn")):
            await branch.record([NewEntry(body=body)])
    return model, compactor_on(branch, model, CompactionPolicy())


async def test_compact_to_a_size_leaves_no_more_than_that() -> None:
    model, compactor = await talk()
    for size in (9_000, 3_000):  # the second one goes below what the first one has just kept
        assert "Compacted to a summary" in await compactor.on_command(f"{size} the parser")
        measured = compactor.gauge.measured()
        assert measured.used - measured.fixed <= size
    assert "the parser" in repr(model.requests[0].messages[-1])
    assert (await compactor.on_command("3000")).startswith("Nothing to do: the conversation takes about ")
    with pytest.raises(ArgumentError, match="300 tokens are too few for a conversation; expected at least 1,600"):
        await compactor.on_command("300")


async def test_compact_keeps_the_newest_tokens_that_the_user_asks_for() -> None:
    _, compactor = await talk()
    assert "Compacted to a summary" in await compactor.on_command("--keep 9k")
    kept = [
        parts_text(message.parts)[:2]
        for message in compactor.gauge.branch.context().messages[2:]
        if isinstance(message, UserMessage)
    ]
    assert kept == ["q4", "q5"]
    checkpoint = compactor.gauge.branch.projection.checkpoint_body
    assert checkpoint is not None
    assert checkpoint.tokens_after < checkpoint.tokens_before
    with pytest.raises(
        ArgumentError, match=r"`--keep` is 900,000 tokens; beside a summary, at most [0-9,]+ tokens fit"
    ):
        await compactor.on_command("--keep 900000")
    assert (await compactor.on_command("--keep 20000")).startswith("Nothing is new since the last compaction.")


async def test_compact_keeping_nothing_replaces_everything() -> None:
    _, compactor = await talk()
    await compactor.on_command("--keep 0")
    assert len(compactor.gauge.branch.context().messages) == 2


async def test_keeping_more_than_there_is_says_so() -> None:
    _, compactor = await talk(exchanges=2)
    assert "so there is too little to summarise before the newest 20,000" in await compactor.on_command("--keep 20000")

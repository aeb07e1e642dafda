"""Text that a resumed answer repeats is removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.turns.stream import Overlap, without_overlap
from crow.domain.entries import Assistant, Reminder
from crow.domain.errors import NetworkError, RateLimited
from crow.domain.messages import AssistantMessage
from tests.agent.harness import Tool, opened, text
from tests.support.amounts import examples
from tests.support.scripted_model import Say, ScriptedModel, call


@pytest.mark.parametrize(
    ("before", "new", "kept"),
    [
        ("The answer is for", "ty-two.", "ty-two."),
        ("The answer is ", "The answer is forty-two.", "forty-two."),
        ("I looked. The answer is", "The answer is forty-two.", " forty-two."),
        ("Half of a sen", "sentence.", "tence."),
        ("Half of a sentence", "\n\nHalf of a sentence, then more.", ", then more."),
        ("hel", "lo", "lo"),
        ("It was a", " pear", " pear"),
        ("It was a", "a pear", "a pear"),
        ("|---|---", "---|---|", "---|---|"),
        ("    return a\n", "    return b\n", "    return b\n"),
        ("one two", "one two", ""),
        ("ein Wort, 六个字的中文句子", "字的中文句子。", "字的中文句子。"),
        ("一句话,六个字的很长的中文句子", "六个字的很长的中文句子。", "。"),
        ("", "anything", "anything"),
    ],
)
def test_a_repeated_end_is_removed_and_a_chance_match_stays(before: str, new: str, kept: str) -> None:
    assert without_overlap(before, new) == kept


@given(
    before=st.text(alphabet="ab \n.", max_size=30),
    new=st.text(alphabet="ab \n.", max_size=40),
    again=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 70), max_size=8),
)
@settings(max_examples=examples(20))
def test_any_split_gives_the_same_new_text(before: str, new: str, again: int, cuts: list[int]) -> None:
    new = before[len(before) - min(again, len(before)) :] + new
    whole = without_overlap(before, new)
    assert new.endswith(whole)
    dropped = new[: len(new) - len(whole)]
    assert before.endswith(dropped.lstrip())

    def fed(pieces: list[str]) -> str:
        overlap = Overlap(before)
        return "".join(overlap.feed(piece) for piece in pieces) + overlap.finish()

    at = sorted(min(cut, len(new)) for cut in cuts)
    pieces = [new[start:end] for start, end in zip([0, *at], [*at, len(new)], strict=True)]
    assert fed(pieces) == fed(list(new)) == whole


def test_text_that_cannot_be_a_repetition_is_returned_at_once() -> None:
    overlap = Overlap("The end is near")
    assert overlap.feed("Yes") == "Yes"
    overlap = Overlap("The end is near")
    assert [overlap.feed(piece) for piece in ("end", " is", " near", ", so", " run")] == ["", "", "", ", so", " run"]


async def test_a_resumed_answer_shows_and_stores_no_word_twice(tmp_path: Path) -> None:
    broken = Say(text=["Birds build ", "nests of twi"], error=NetworkError("gone"))
    model = ScriptedModel(broken, Say(text=["nests", " of twigs", " and string."]), Say(text=["ok"]))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("Hi")) == "end_turn"
        assert run.client.shown() == "Birds build nests of twigs and string."
        assert [(answer.text, answer.finish) for answer in run.client.stored(Assistant)] == [
            ("Birds build nests of twi", "interrupted"),
            ("gs and string.", "stop"),
        ]
        await run.session.prompt(text("Again"))
        said = [message.text for message in model.requests[2].messages if isinstance(message, AssistantMessage)]
        assert [each.split("\n")[0] for each in said] == ["Birds build nests of twi", "gs and string."]


async def test_a_call_of_a_broken_answer_runs_once_when_the_resumed_answer_repeats_it(tmp_path: Path) -> None:
    ran: list[str] = []

    async def act(path: str) -> str:
        ran.append(path)
        return "done"

    wanted = (call("act", path="x"),)
    model = ScriptedModel(
        Say(text=["I act"], calls=wanted, error=NetworkError("gone")),
        Say(text=[" now."], calls=wanted),
        Say(text=["."]),
    )
    async with opened(tmp_path, model, tools={"act": Tool("read", act)}) as run:
        assert await run.session.prompt(text("Hi")) == "end_turn"
        assert ran == ["x"]


async def test_an_answer_that_broke_in_its_reasoning_is_requested_again_without_a_reminder(tmp_path: Path) -> None:
    model = ScriptedModel(Say(thought="Hm", error=RateLimited("slow down")), Say(text=["Yes."]))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("Hi")) == "end_turn"
        assert run.client.stored(Reminder) == []
        assert [(answer.thought, answer.text) for answer in run.client.stored(Assistant)] == [("Hm", ""), ("", "Yes.")]

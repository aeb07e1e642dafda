"""Tests what `/context` shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crow.agent.commands.inspect import breakdown, last_break, picture
from crow.agent.compaction.budget import CompactionPolicy, limits_for
from crow.domain.conversation import Projection
from crow.domain.entries import Body, Checkpoint, Mask, Note, Prompt, Restore
from crow.domain.messages import ToolSpec
from crow.store import Move
from tests.support.paths import PathBuilder, result_of, said, user

TOOLS = (ToolSpec(name="t", description="d" * 400, input_schema={}),)


def test_breakdown_counts_each_message_by_kind_and_adds_up_to_the_measured_size() -> None:
    path = PathBuilder(
        Prompt(system="s" * 400, tools=TOOLS, cwd="/", model="m"),
        user("q" * 400),
        Checkpoint(compaction_id="k", summary="S" * 800, first_kept=None),
        said("a" * 400, "c1"),
        result_of(4, 0, "r" * 1_200),
        user("q" * 40),
    )
    projection = Projection(path.entries)
    estimate = projection.context().estimate
    found = breakdown(projection, 2 * estimate)
    assert list(found) == ["system", "tools", "summary", "user", "assistant", "tool output"]
    assert abs(sum(found.values()) - 2 * estimate) <= 3
    assert (found["system"], found["user"], found["tool output"]) == (2 * 104, 2 * 14, 2 * 312)
    assert 2 * 200 < found["summary"] < 2 * 320


def test_picture_has_a_bar_for_the_window_and_one_for_each_kind() -> None:
    limits = limits_for(128_000, 8_000, 9_000, CompactionPolicy())
    tokens = dict(zip(("system", "tools", "summary", "user", "assistant"), (3_200, 6_400, 0, 100, 12_800), strict=True))
    shown = picture("m", {**tokens, "tool output": 41_500}, 64_000, limits)  # type: ignore[dict-item]
    assert (
        shown
        == """\
Context of m: about 64,000 of 128,000 tokens.

```text
███████████████░░░░░░░░░░│░░░░     64,000   50 %  all of it
█░░░░░░░░░░░░░░░░░░░░░░░░░░░░░      3,200    2 %  system
█▌░░░░░░░░░░░░░░░░░░░░░░░░░░░░      6,400    5 %  tools
░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░          0    0 %  summary
▌░░░░░░░░░░░░░░░░░░░░░░░░░░░░░        100    0 %  user
███░░░░░░░░░░░░░░░░░░░░░░░░░░░     12,800   10 %  assistant
██████████░░░░░░░░░░░░░░░░░░░░     41,500   32 %  tool output
                                   44,000   34 %  free until compaction (at │)
```"""
    )
    assert max(map(len, shown.splitlines())) <= 78


PROMPT = Prompt(system="s", tools=(), cwd="/", model="m", reason="the session began")


def moved(from_leaf: int, to_leaf: int | None, reason: str) -> Move:
    return Move(from_leaf=from_leaf, to_leaf=to_leaf, reason=reason, created_ms=0)


@pytest.mark.parametrize(
    ("bodies", "moves", "expected"),
    [
        ([PROMPT, user("q")], [], "the session began (entry 1,"),
        ([PROMPT, user("q"), replace(PROMPT, reason="")], [], "a new system message was needed (entry 3,"),
        ([PROMPT, user("q"), Mask(before=2)], [], "a compaction hid old tool outputs (entry 3,"),
        (
            [PROMPT, user("q"), Checkpoint(compaction_id="k", summary="S", first_kept=None), user("q")],
            [],
            "a compaction replaced older messages (entry 3,",
        ),
        (
            [PROMPT, Checkpoint(compaction_id="k", summary="S", first_kept=None), Restore(entry=2)],
            [],
            "a compaction was undone (entry 3,",
        ),
        (
            [PROMPT, user("q"), Note(about="dialect", value="reasoning"), Note(about="mode", value="ask")],
            [],
            "the endpoint began to refuse a part of the messages, or to accept it again (reasoning) (entry 3,",
        ),
        (
            [PROMPT, Note(about="dialect", value="is_error")],
            [],
            "this version of crow marks failed tool results (entry 2,",
        ),
        ([PROMPT, Note(about="thought_level", value="high")], [], "the thought level changed to high (entry 2,"),
        ([PROMPT, user("q"), user("q")], [moved(9, 2, "undo")], "the session moved to another entry (undo) ("),
        ([PROMPT, user("q"), PROMPT], [moved(9, 3, "redo")], "the session moved to another entry (redo) ("),
        ([PROMPT, user("q"), PROMPT], [moved(9, 2, "undo")], "the session began (entry 3,"),
        ([PROMPT, user("q")], [moved(9, None, "clear")], "the session began (entry 1,"),
        ([], [moved(9, None, "clear")], "the session moved to another entry (clear) ("),
    ],
)
def test_the_last_cache_break_is_named_with_its_reason(bodies: list[Body], moves: list[Move], expected: str) -> None:
    projection = Projection(PathBuilder(*bodies).entries)
    said = last_break(projection.entries, moves)
    assert said.startswith(f"Last cache break: {expected}")


def test_before_the_first_request_there_is_no_cache_break() -> None:
    assert last_break((), ()) == "No request has been sent yet."

"""Tests what `/context` shows."""

from __future__ import annotations

from crow.agent.commands.inspect import breakdown, picture
from crow.agent.compaction.budget import CompactionPolicy, limits_for
from crow.domain.conversation import Projection
from crow.domain.entries import Checkpoint, Prompt
from crow.domain.messages import ToolSpec
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
████████████████████░░░░░░░░░░░░░│░░░░░░     64,000   50 %  all of it
█░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░      3,200    2 %  system
██░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░      6,400    5 %  tools
░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░          0    0 %  summary
▌░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░        100    0 %  user
████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░     12,800   10 %  assistant
█████████████░░░░░░░░░░░░░░░░░░░░░░░░░░░     41,500   32 %  tool output
                                             44,000   34 %  free until compaction (at │)
```"""
    )

"""What fills the context, by kind, and the picture of it that a person reads.

Strategy: each message belongs to one kind by its role, the checkpoint to the summary; estimates are stretched so that
together they are what the whole was measured to have. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, assert_never

from crow.agent.compaction.limits import Limits
from crow.domain.conversation import Projection
from crow.domain.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage

__all__ = ["KINDS", "Kind", "breakdown", "picture"]

Kind: TypeAlias = Literal["system", "tools", "summary", "user", "assistant", "tool output"]

KINDS: tuple[Kind, ...] = ("system", "tools", "summary", "user", "assistant", "tool output")

CELLS = 40
FULL, PART, EMPTY, MARK = "█", "▌", "░", "│"


def breakdown(projection: Projection, used: int) -> Mapping[Kind, int]:
    """Tokens by kind, of `used` tokens in all; every kind is there."""
    context = projection.context()
    summary = 0 if projection.checkpoint is None else projection.checkpoint.id
    estimates: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    estimates["tools"] = context.tools_estimate
    for message, origin, estimate in zip(context.messages, context.origins, context.estimates, strict=True):
        estimates["summary" if summary and origin == summary else kind_of(message)] += estimate
    whole = max(1, sum(estimates.values()))
    return {kind: round(estimate * used / whole) for kind, estimate in estimates.items()}


def kind_of(message: Message) -> Kind:
    match message:
        case SystemMessage():
            return "system"
        case UserMessage():
            return "user"
        case AssistantMessage():
            return "assistant"
        case ToolMessage():
            return "tool output"
        case _ as never:
            assert_never(never)


def picture(model: str, tokens: Mapping[Kind, int], used: int, limits: Limits) -> str:
    """Lines of Markdown: one bar for the window, then one for each kind. From the mark on, compaction is due."""
    window = max(1, limits.window)
    lines = [f"{bar(used, window, limits.threshold)}  {used:>9,}  {percent(used, window)}  all of it"]
    lines += [
        f"{bar(tokens[kind], window)}  {tokens[kind]:>9,}  {percent(tokens[kind], window)}  {kind}" for kind in KINDS
    ]
    free = max(0, limits.threshold - used)
    lines.append(f"{' ' * CELLS}  {free:>9,}  {percent(free, window)}  free until compaction (at {MARK})")
    head = f"Context of {model}: about {used:,} of {limits.window:,} tokens."
    return "\n".join([head, "", "```text", *lines, "```"])


def bar(tokens: int, window: int, mark: int | None = None) -> str:
    """`CELLS` cells that stand for the window, filled by `tokens`, with a sign at `mark`."""
    halves = min(2 * CELLS, -(-2 * CELLS * tokens // window)) if tokens > 0 else 0
    cells = list(FULL * (halves // 2) + PART * (halves % 2))
    cells += EMPTY * (CELLS - len(cells))
    if mark is not None:
        cells[min(CELLS - 1, CELLS * mark // window)] = MARK
    return "".join(cells)


def percent(tokens: int, window: int) -> str:
    return f"{round(100 * tokens / window):>3} %"

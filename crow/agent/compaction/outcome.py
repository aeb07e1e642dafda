"""How a pass ended, in words for the user. Numbers are tokens of the whole request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from crow.agent.compaction.limits import Limits
from crow.agent.compaction.measuring import Measure
from crow.domain.entries import Checkpoint, Entry, Mask
from crow.domain.errors import ContextOverflow

__all__ = [
    "CompactionResult",
    "compacted",
    "masked",
    "nothing_done",
    "too_fast",
    "too_long",
    "too_small",
    "undone_not",
    "vetoed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """`entry` is the mask or checkpoint that was stored; None: nothing was."""

    outcome: Literal["noop", "masked", "compacted", "too_small"]
    words: str
    tokens_before: int
    tokens_after: int
    model_calls: int = 0
    entry: Entry | None = None


def nothing_done(found: Measure, why: str) -> CompactionResult:
    return CompactionResult(outcome="noop", words=why, tokens_before=found.used, tokens_after=found.used)


def vetoed(found: Measure, why: str) -> CompactionResult:
    return nothing_done(found, f"A hook kept the conversation from being compacted: {why}")


def masked(entry: Entry, body: Mask) -> CompactionResult:
    return CompactionResult(
        outcome="masked",
        words=f"Hid old tool outputs from the model: {arrow(body)}. It can recall them.",
        tokens_before=body.tokens_before,
        tokens_after=body.tokens_after,
        entry=entry,
    )


def compacted(entry: Entry, body: Checkpoint) -> CompactionResult:
    how = "notes taken without the model" if body.method == "fallback" else "a summary"
    return CompactionResult(
        outcome="compacted",
        words=f"Compacted to {how}: {arrow(body)}. Nothing is deleted; the model can recall it.",
        tokens_before=body.tokens_before,
        tokens_after=body.tokens_after,
        model_calls=body.model_calls,
        entry=entry,
    )


def too_small(model: str, limits: Limits, found: Measure) -> CompactionResult:
    """Stops a turn only where the user configured the window."""
    words = (
        f"The request does not fit {model} and cannot be compacted further: context_window is {limits.window:,} tokens "
        f"in your configuration, of which system prompt and tools take {limits.fixed:,}; {found.used:,} would be sent, "
        f"{limits.threshold:,} are possible. Raise or remove context_window (in [model] or [models.NAME] of "
        f"config.toml), choose a model with a larger window, or disable MCP servers that are not needed."
    )
    return CompactionResult(outcome="too_small", words=words, tokens_before=found.used, tokens_after=found.used)


def too_fast(model: str, limits: Limits, answers: int) -> str:
    return (
        f"The context fills up faster than compaction can empty it: 2 compactions and only {answers} answers since. "
        f"The window of {model} is taken as {limits.window:,} tokens, of which system prompt and tools take "
        f"{limits.fixed:,}. Ask for smaller steps, or use a model with a larger window."
    )


def too_long(error: ContextOverflow, found: Measure, why: Literal["off", "often", "nothing"]) -> ContextOverflow:
    """The endpoint's error with what the user can do: compaction is `off`, came too `often`, or `nothing` is left."""
    sent = f"About {found.used:,} tokens were sent, {found.fixed:,} of them system prompt and tools"
    match why:
        case "off":
            advice = f"{sent}. Automatic compaction is off (compaction.auto): /compact makes room."
        case "often":
            advice = f"{sent}, after several compactions. Prompt again to compact further, or begin anew with /clear."
        case "nothing":
            advice = (
                f"{sent}, and nothing of it can be compacted. Prompt again if the endpoint may have been wrong. Else "
                "send a shorter prompt, choose a model with a larger window (/model), start the server with a larger "
                "one, or disable MCP servers that are not needed."
            )
        case _ as never:
            assert_never(never)
    return ContextOverflow(f"{error} {advice}", limit=error.limit, size=error.size)


def undone_not(tokens: int, limits: Limits) -> str:
    return (
        f"Not undone: the conversation would have {tokens:,} tokens again, and from {limits.threshold:,} on it is "
        f"compacted (window {limits.window:,})."
    )


def arrow(body: Mask | Checkpoint) -> str:
    return f"{body.tokens_before:,} → {body.tokens_after:,} tokens"

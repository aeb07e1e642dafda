"""Keeps the context small without losing history. Also defines what compaction hooks receive and return.

The history never changes. A mask or a checkpoint is one more entry, and the projection leaves out what that entry hides
or replaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Advice", "Done", "Proposal", "Reason"]

Reason: TypeAlias = Literal["threshold", "overflow", "command", "model"]
"""Why crow compacts: the threshold was reached, a request was refused as too long, the user asked for it, or the
threshold was reached after a change of model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A compaction that is about to start, passed to `crow.before_compact`. Sizes are tokens of the whole request.

    If `kind` is `mask`, the compaction only hides old tool outputs. `previous_summary` is empty before the first
    compaction of kind `summary`.
    """

    session_id: str
    cwd: str
    model: str
    kind: Literal["mask", "summary"]
    reason: Reason
    focus: str
    tokens: int
    threshold: int
    window: int
    previous_summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `crow.before_compact` may return; None means no advice. `veto` is a sentence that says why not to compact.
    `context` is added to the summary prompt. `summary` is used instead of asking the model."""

    veto: str = ""
    context: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished compaction, passed to `crow.after_compact`. `entry` is the id of the stored mask or checkpoint."""

    session_id: str
    cwd: str
    model: str
    kind: Literal["mask", "summary"]
    reason: Reason
    entry: int
    tokens_before: int
    tokens_after: int
    summary: str = ""
    method: str = ""
    files_modified: tuple[str, ...] = ()

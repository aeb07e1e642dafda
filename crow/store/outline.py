"""What a person sees of a session's branches: its moves, the points on them, where they end. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Move", "Outline", "Point", "Tip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A session was made to stand elsewhere: `undo`, `redo`, `rewind`, `retry`, `new`, `refusal`."""

    from_leaf: int | None
    to_leaf: int | None
    reason: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place in a conversation that a person knows: a prompt, a label, a checkpoint.

    To stand on `entry` is to be just after it, on `before` just before it (None: at the beginning). `previous` is the
    point before it on the path. `text` is the label, or how the prompt begins.
    """

    entry: int
    before: int | None
    previous: int | None
    kind: Literal["prompt", "label", "checkpoint"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """Where a branch ends; `point` is the last one on it."""

    entry: int | None
    point: int | None
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All branches that a session ever stood on: `points` by id, ends of branches with the current one first and then
    those left last. Ends that differ in nothing that was said are one."""

    points: tuple[Point, ...]
    tips: tuple[Tip, ...]

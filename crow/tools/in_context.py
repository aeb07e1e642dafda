"""Tells whether the model still gets a part of an earlier call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class CallPart:
    """The arguments or the result of a call."""

    call_id: str
    part: Literal["arguments", "result"]


InContext: TypeAlias = Callable[[CallPart, str], bool]
"""A function that returns whether the model gets this part of a call whole. It does not if the part was shortened,
hidden, compacted or undone, or belongs to another agent. The second argument is the id of any call of the agent whose
model is meant. If it is empty, the models of all agents of the session are meant."""


def always(_part: CallPart, _reader: str) -> bool:
    """Return True. This is the `InContext` for a model that keeps all parts of all calls."""
    return True

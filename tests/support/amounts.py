"""How much a test tries. The suite tries a part, `make soak` (with `CROW_SOAK=1`) everything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["EXAMPLES", "IS_SOAK", "examples", "some"]

T = TypeVar("T")

IS_SOAK = bool(os.environ.get("CROW_SOAK"))


def examples(few: int) -> int:
    """Return how many examples a property is tried with: a `few`, or ten times as many in `make soak`."""
    return few * 10 if IS_SOAK else few


EXAMPLES = examples(20)
"""How many examples a property is tried with, if its test does not say."""


def some(cases: Sequence[T], every: int, first: int = 0) -> Sequence[T]:
    """Return every `every`-th case from `first` on, or all of them in `make soak`."""
    return cases if IS_SOAK else cases[first::every]

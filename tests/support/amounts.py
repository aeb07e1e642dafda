"""How much a test tries. The suite tries a part, `make soak` (with `CROW_SOAK=1`) everything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["EXAMPLES", "IS_SOAK", "some"]

T = TypeVar("T")

IS_SOAK = bool(os.environ.get("CROW_SOAK"))
EXAMPLES = 1_000 if IS_SOAK else 20
"""How many examples a property is tried with, if its test does not say."""


def some(cases: Sequence[T], every: int, first: int = 0) -> Sequence[T]:
    """Return every `every`-th case from `first` on, or all of them in `make soak`."""
    return cases if IS_SOAK else cases[first::every]

"""Keeps the context small without losing history.

The history never changes. A mask or a checkpoint is one more entry, and the projection leaves out what that entry hides
or replaces.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["Reason"]

Reason: TypeAlias = Literal["threshold", "overflow", "command", "model", "early"]
"""Why crow compacts. `threshold`: the threshold was reached. `overflow`: a request was refused as too long. `command`:
the user asked for it. `model`: the threshold was reached after a change of model. `early`: the summary was written
while the session was idle."""

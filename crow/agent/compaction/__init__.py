"""Compaction: keeping the context small without losing anything.

Strategy: `window`, `measuring` and `limits` say how full the context is and may be, `planner` decides, `contents` keeps
words and files, `summary` asks the model, `compactor` puts them together on a branch, `outcome` and `breakdown` have
the words and the picture for the user, `hooks` lets others have a say. The history itself is never changed: a mask or
a checkpoint is one more entry, and the projection does the rest. Hooks of other packages import their types from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crow.agent.compaction.hooks import Advice, Done, Proposal

__all__ = ["Advice", "Done", "Proposal"]


def __getattr__(name: str) -> object:
    if name in __all__:  # only then: `hooks` brings modules that a process needs with its first turn, not at its start
        from crow.agent.compaction import hooks

        return getattr(hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Compaction: keeping the context small without losing anything.

Strategy: `limits` measures, `planner` decides, `contents` keeps words and files, `summary` asks the model, `compactor`
puts them together on a branch, `outcome` has the words for the user. Only `summary` and `compactor` do anything; the
rest is pure. The history itself is never changed: a mask or a checkpoint is one more entry, and the projection does
the rest.
"""

from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.limits import (
    DEFAULT_WINDOW,
    CompactionSettings,
    Limits,
    Measure,
    cut_for,
    limits_for,
    measure,
    recalibrated,
)
from crow.agent.compaction.outcome import CompactionResult
from crow.agent.compaction.planner import Decision, Draft, MaskOutputs, Noop, Reason, Summarise, TooSmall, plan

__all__ = [
    "DEFAULT_WINDOW",
    "CompactionResult",
    "CompactionSettings",
    "Compactor",
    "Decision",
    "Draft",
    "Limits",
    "MaskOutputs",
    "Measure",
    "Noop",
    "Reason",
    "Summarise",
    "TooSmall",
    "cut_for",
    "limits_for",
    "measure",
    "plan",
    "recalibrated",
]

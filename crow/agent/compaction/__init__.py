"""Compaction: keeping the context small without losing anything.

Strategy: `window`, `measuring` and `limits` say how full the context is and may be, `planner` decides, `contents` keeps
words and files, `summary` asks the model, `compactor` puts them together on a branch, `outcome` and `breakdown` have
the words and the picture for the user, `hooks` lets others have a say. The history itself is never changed: a mask or
a checkpoint is one more entry, and the projection does the rest.
"""

from crow.agent.compaction.breakdown import breakdown, picture
from crow.agent.compaction.compactor import Compactor, Helpers
from crow.agent.compaction.gauge import Gauge
from crow.agent.compaction.hooks import Advice, Done, Hooks, NamedHook, Proposal
from crow.agent.compaction.limits import CompactionSettings, Limits, cut_for, limits_for
from crow.agent.compaction.measuring import Measure, measure, recalibrated, silent_cut
from crow.agent.compaction.outcome import CompactionResult
from crow.agent.compaction.planner import Decision, Draft, MaskOutputs, Noop, Reason, Summarise, TooSmall, plan
from crow.agent.compaction.window import DEFAULT_WINDOW, Window, window_of

__all__ = [
    "DEFAULT_WINDOW",
    "Advice",
    "CompactionResult",
    "CompactionSettings",
    "Compactor",
    "Decision",
    "Done",
    "Draft",
    "Gauge",
    "Helpers",
    "Hooks",
    "Limits",
    "MaskOutputs",
    "Measure",
    "NamedHook",
    "Noop",
    "Proposal",
    "Reason",
    "Summarise",
    "TooSmall",
    "Window",
    "breakdown",
    "cut_for",
    "limits_for",
    "measure",
    "picture",
    "plan",
    "recalibrated",
    "silent_cut",
    "window_of",
]

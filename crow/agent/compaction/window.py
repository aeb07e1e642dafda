"""The context window of a model: as declared, lowered by what refused requests have shown.

Strategy: what was learned stays with the session, bound to the endpoint and to what was declared then; a new
declaration makes it void. Pure.
"""

from __future__ import annotations

from crow.agent.compaction.limits import DEFAULT_WINDOW, Measure
from crow.domain.errors import ContextOverflow
from crow.domain.messages import JsonObject
from crow.llm import ModelInfo

__all__ = ["learn_window", "window_of"]

KEY = "learned_window"


def window_of(info: ModelInfo, metadata: JsonObject) -> int:
    """Tokens that a request to the model and its answer may have together; `metadata` is the session's."""
    declared = info.context_window or DEFAULT_WINDOW
    learned = metadata.get(KEY)
    if not isinstance(learned, dict) or (learned.get("endpoint"), learned.get("declared")) != (info.endpoint, declared):
        return declared
    tokens = learned.get("tokens")
    return min(declared, tokens) if isinstance(tokens, int) and tokens > 0 else declared


def learn_window(info: ModelInfo, metadata: JsonObject, error: ContextOverflow, found: Measure) -> JsonObject:
    """The session's metadata after a request measured as `found` was refused: with the limit that the endpoint
    states, else with nine tenths of what it refused."""
    window = window_of(info, metadata)
    tokens = min(window, error.limit) if error.limit else min(window, error.size or found.used) * 9 // 10
    declared = info.context_window or DEFAULT_WINDOW
    return {**metadata, KEY: {"endpoint": info.endpoint, "declared": declared, "tokens": tokens}}

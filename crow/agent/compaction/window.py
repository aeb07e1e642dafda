"""Tracks each model's context window, learning from refused and answered requests.

Only a configured window makes crow refuse a request. A learned window only triggers compaction, so a wrong number costs
work but never ends a session. Learned windows are stored with the endpoint because other sessions will meet the same
limit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime

from crow.domain.errors import ContextOverflow, StoreError
from crow.llm import EndpointMemory, ModelInfo

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 128_000
"""Tokens assumed for a model whose window is unknown."""

MIN_ROOM = 2_000
"""Compaction cannot help if the threshold is less than this many tokens above the fixed part."""

FACT = "window"
QUOTE_CHARS = 300
FIRST_PATIENCE = 4
MAX_PATIENCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWindow:
    """A window size that crow learned from how an endpoint behaved, stored as a fact about the endpoint.

    A window that was learned only once (`times` is 1) applies only to `session`. A window that was learned more than
    once applies to every session. After `patience` compactions, crow tests whether the endpoint accepts more. `source`
    says what the size was learned from. `learned_on` is a date in UTC. `is_silent` means that the endpoint truncates
    longer requests instead of refusing them.
    """

    tokens: int
    source: str
    learned_on: str
    session: str
    times: int = 1
    is_silent: bool = False
    compactions: int = 0
    patience: int = FIRST_PATIENCE


def learned_in(facts: Mapping[str, object]) -> LearnedWindow | None:
    """Return the learned window among an endpoint's facts, or None if there is none or its format is unknown."""
    fact = facts.get(FACT)
    if not isinstance(fact, Mapping):
        return None
    known = {field.name: fact[field.name] for field in fields(LearnedWindow) if field.name in fact}
    if any(type(known[field.name]).__name__ != field.type for field in fields(LearnedWindow) if field.name in known):
        return None
    try:
        learned = LearnedWindow(**known)
    except TypeError:
        return None
    is_valid = learned.tokens > 0 and min(learned.times, learned.compactions, learned.patience) >= 0
    return learned if is_valid else None


@dataclass(slots=True)
class EndpointWindow:
    """What a session knows about one endpoint's window.

    `worked` is the largest request, in tokens, that was accepted since the last refusal. `refusals` counts the requests
    that were refused since the last answer. `was_refused` is true if the endpoint has refused any request in this
    session. While `probing` is true, crow ignores `learned` to test whether it still holds.
    """

    loaded: bool = False
    configured: int | None = None
    learned: LearnedWindow | None = None
    listed: int | None = None
    worked: int = 0
    refusals: int = 0
    was_refused: bool = False
    probing: bool = False


class ContextWindow:
    """The windows of one session's models. Without `memory`, what is learned is lost with this object."""

    def __init__(self, memory: EndpointMemory | None = None, session: str = "") -> None:
        self._memory = memory
        self._session = session
        self._endpoints: dict[str, EndpointWindow] = {}

    def tokens(self, info: ModelInfo) -> int:
        """Return the window that currently applies, in tokens."""
        return self.declared(info) if self._of(info).probing else self.cautious_tokens(info)

    def cautious_tokens(self, info: ModelInfo) -> int:
        """Like `tokens`, but a learned window applies even while crow tests whether it still holds."""
        learned = self.learned(info)
        return self.declared(info) if learned is None else min(self.declared(info), learned.tokens)

    def declared(self, info: ModelInfo) -> int:
        """Return the configured window, else the one that the endpoint lists, else the default."""
        return info.context_window or self._of(info).listed or DEFAULT_WINDOW

    def learned(self, info: ModelInfo) -> LearnedWindow | None:
        """Return the learned window if it applies to this session."""
        learned = self._of(info).learned
        return learned if learned is not None and (learned.times > 1 or learned.session == self._session) else None

    def describe(self, info: ModelInfo) -> str:
        """Explain to the user, in full sentences, where the window size comes from."""
        learned = self.learned(info)
        if learned is not None:
            scope = "for every session with this endpoint" if learned.times > 1 else "for this session only"
            left = learned.patience - learned.compactions
            probe = f"After {left} more compaction{'s' * (left != 1)} crow tests whether the endpoint accepts more."
            if self._of(info).probing:
                probe = "Crow is now testing whether the endpoint accepts more."
            return (
                f"Crow learned a window of {learned.tokens:,} tokens on {learned.learned_on}, {scope}, from "
                f"{learned.source}. It only triggers compaction. {probe} `/context forget` drops it."
            )
        if info.is_window_configured:
            return "You configured this window."
        if info.context_window or self._of(info).listed:
            return "The endpoint lists this window."
        return f"The endpoint does not say how large its window is; crow assumes {DEFAULT_WINDOW:,} tokens."

    def is_loaded_for(self, info: ModelInfo) -> bool:
        """Whether this model was looked up with its present configuration."""
        return self._of(info).loaded and self._of(info).configured == configured_window(info)

    async def look_up(self, info: ModelInfo) -> None:
        """Load what was learned about the model. If the user configured a window, what was learned is discarded."""
        state = self._of(info)
        state.loaded = True
        if state.configured != configured_window(info):
            state.learned, state.probing, state.configured = None, False, configured_window(info)
        if self._memory is None:
            return
        facts = await self._memory.learned(*endpoint_and_model(info))
        if info.is_window_configured:
            if facts.get(FACT) is not None:
                await self._store(info, None)
            return
        state.listed = listed_window(facts)
        state.learned = learned_in(facts)
        state.probing = state.probing and state.learned is not None

    async def on_refusal(self, info: ModelInfo, error: ContextOverflow, *, used: int, fixed: int) -> int:
        """Learn from a refused request of `used` tokens. The system message and the tools take `fixed` of them.

        Return the window that the next compaction should assume. It is smaller than the request, and may be smaller
        than the learned window.
        """
        await self.look_up(info)
        state, declared = self._of(info), self.declared(info)
        old, worked, limit = self.learned(info), state.worked, error.limit
        state.refusals += 1
        state.worked = 0
        size = error.size if error.size is not None and used / 4 <= error.size <= used * 4 else used
        # After the first refusal, a limit above the request's own size cannot explain why the request was refused.
        is_plausible = limit is not None and fixed < limit < declared and (limit < size or state.refusals == 1)
        tokens: int | None = None
        if limit is not None and is_plausible and limit >= worked:
            tokens = limit
        elif worked < used:
            still_holds = old is not None and worked <= old.tokens < used
            tokens = old.tokens if old is not None and still_holds else max(size * 9 // 10, worked)
            if tokens * 4 // 5 - fixed < MIN_ROOM and not state.was_refused:
                tokens = None  # one refused request is not enough to shrink the window this far
        state.was_refused = True
        if tokens is not None and tokens < declared:
            words = "".join(char if char.isprintable() else " " for char in str(error))[:QUOTE_CHARS]
            await self._learn(info, tokens, f'a refused request of about {used:,} tokens: "{words}"')
        elif state.probing and old is not None:
            state.probing = False
            await self._replace(info, confirmed(old))
        return min(declared, used * 9 // 10, tokens or declared)

    async def on_truncation(self, info: ModelInfo, tokens: int, *, fixed: int) -> None:
        """Learn that the endpoint never counts more than `tokens`, so it silently truncates longer requests."""
        if fixed < tokens < self.declared(info):
            source = f"token counts: requests grew, but the endpoint never counted more than {tokens:,} input tokens"
            await self._learn(info, tokens, source, is_silent=True)

    async def on_answer(self, info: ModelInfo, *, sent: int, counted: int | None) -> None:
        """Learn from an answered request of about `sent` tokens. `counted` is the endpoint's count in tokens, or None
        if it is unknown."""
        state, learned = self._of(info), self.learned(info)
        state.refusals = 0
        state.worked = max(state.worked, sent // 2 if counted is None else counted)
        if learned is None:
            return
        if counted is not None:
            is_disproved = counted > learned.tokens * (1.05 if learned.is_silent else 1)
        else:
            is_disproved = not learned.is_silent and sent > learned.tokens * 1.1
        if is_disproved:
            state.probing = False
            await self._replace(info, None)
        elif state.probing and counted is not None and sent > learned.tokens * 1.2:
            state.probing = False
            await self._replace(info, confirmed(learned))

    async def on_compaction(self, info: ModelInfo) -> None:
        """Count a compaction of a full context. After `patience` compactions, start to test a larger window."""
        state, learned = self._of(info), self.learned(info)
        if learned is None or state.probing:
            return
        state.probing = learned.compactions + 1 >= learned.patience
        await self._replace(info, replace(learned, compactions=0 if state.probing else learned.compactions + 1))

    async def forget(self, info: ModelInfo) -> LearnedWindow | None:
        """Drop the learned window, for this session and the endpoint. Return the dropped window."""
        await self.look_up(info)
        state = self._of(info)
        learned, state.probing = state.learned, False
        if learned is not None:
            await self._replace(info, None)
        return learned

    def _of(self, info: ModelInfo) -> EndpointWindow:
        return self._endpoints.setdefault(info.endpoint, EndpointWindow())

    async def _learn(self, info: ModelInfo, tokens: int, source: str, *, is_silent: bool = False) -> None:
        state = self._of(info)
        old, was_probing, state.probing = state.learned, state.probing, False
        learned = LearnedWindow(
            tokens=tokens,
            source=source,
            learned_on=datetime.now(UTC).date().isoformat(),
            session=self._session,
            # several refusals in a row count as one
            times=1 if old is None else old.times + (state.refusals < 2),
            is_silent=is_silent,
            patience=FIRST_PATIENCE if old is None else old.patience,
        )
        await self._replace(info, confirmed(learned) if was_probing else learned)

    async def _replace(self, info: ModelInfo, learned: LearnedWindow | None) -> None:
        self._of(info).learned = learned
        if not info.is_window_configured:
            await self._store(info, None if learned is None else asdict(learned))

    async def _store(self, info: ModelInfo, fact: Mapping[str, object] | None) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(*endpoint_and_model(info), {FACT: fact})
        except StoreError as error:
            # a turn should not fail because of this; crow will learn the window again
            logger.warning("Could not store the learned context window of %s: %s", info.endpoint, error)


def confirmed(learned: LearnedWindow) -> LearnedWindow:
    """Return a learned window that a test has confirmed. The next test comes after twice as many compactions."""
    return replace(learned, compactions=0, patience=min(MAX_PATIENCE, learned.patience * 2))


def configured_window(info: ModelInfo) -> int | None:
    return info.context_window if info.is_window_configured else None


def listed_window(facts: Mapping[str, object]) -> int | None:
    """Return the window that the endpoint's list of models states, or None."""
    listed = facts.get("listed")
    tokens = listed.get("context_window") if isinstance(listed, Mapping) else None
    return tokens if type(tokens) is int and tokens > 0 else None


def endpoint_and_model(info: ModelInfo) -> tuple[str, str]:
    """The two halves of `ModelInfo.endpoint`: base URL and model."""
    base_url, _, model = info.endpoint.partition(" ")
    return base_url, model

"""Tracks each model's context window, learning from refused and answered requests.

Only a configured window makes crow refuse a request. Crow uses a learned window only to decide when to compact, so a
wrong window costs work but never ends a session. Learned windows are stored with the endpoint because other sessions
will meet the same limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date

from crow.domain.errors import ContextOverflow, StoreError
from crow.llm import EndpointMemory, ModelInfo
from crow.llm.facts import (
    FIRST_WINDOW_PATIENCE,
    LEARNED_KEYS,
    WINDOW,
    LearnedFact,
    LearnedWindow,
    describe_facts,
    describe_window,
    learned_window,
    utc_today,
    without_controls,
)

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 128_000
"""Tokens assumed for a model whose window is unknown."""

_MIN_SUSPECT = 8_000
"""If a request with fewer tokens than this is refused without a clear reason, crow does not suspect that it was too
long."""

MIN_ROOM = 2_000
"""Compaction cannot help if the threshold is less than this many tokens above the fixed part."""


@dataclass(slots=True)
class _EndpointWindow:
    """A session's knowledge about the context window of one endpoint. Windows are in tokens."""

    loaded: bool = False
    """What earlier sessions learned about the window has been loaded."""
    configured: int | None = None
    """The window that the user configured."""
    learned: LearnedWindow | None = None
    listed: int | None = None
    """The window that the endpoint lists."""
    worked: int = 0
    """The largest request, in tokens, that was accepted since the last refusal."""
    refusals: int = 0
    """The number of requests that were refused since the last answer."""
    was_refused: bool = False
    """The endpoint has refused a request in this session."""
    probing: bool = False
    """While true, crow ignores `learned` to test whether it still holds."""
    answers: int = 0
    """The number of answers since `learned` was stored."""


class ContextWindow:
    """The context windows of the models of one session. If `memory` is None, this object does not store what it learns.
    `today` returns the date in UTC.

    Each endpoint is in one of three states. Declared: nothing smaller was learned, so the declared window applies.
    Learned: the learned window applies. Testing: the declared window applies until a refusal confirms the learned
    window or an answer disproves it.
    """

    def __init__(
        self, memory: EndpointMemory | None = None, session: str = "", *, today: Callable[[], date] = utc_today
    ) -> None:
        self._memory = memory
        self._session = session
        self._today = today
        self._endpoints: dict[str, _EndpointWindow] = {}

    def tokens(self, info: ModelInfo) -> int:
        """Return the window that currently applies, in tokens."""
        return self.declared(info) if self._of(info).probing else self.cautious_tokens(info)

    def cautious_tokens(self, info: ModelInfo) -> int:
        """Return the same as `tokens`, but a learned window applies even while crow tests whether it still holds."""
        learned = self.learned(info)
        return self.declared(info) if learned is None else min(self.declared(info), learned.tokens)

    def declared(self, info: ModelInfo) -> int:
        """Return the configured window. If there is none, return the window that the endpoint lists, or else the
        default."""
        return info.context_window or self._of(info).listed or DEFAULT_WINDOW

    def learned(self, info: ModelInfo) -> LearnedWindow | None:
        """Return the learned window if it applies to this session."""
        learned = self._of(info).learned
        return learned if learned is not None and learned.applies_to(self._session) else None

    def is_larger_than_accepted(self, info: ModelInfo, used: int) -> bool:
        """Return whether a request of `used` tokens may be too long for the endpoint. This is the case if it has at
        least `_MIN_SUSPECT` tokens and is larger than every request that the endpoint has accepted in this session
        since its last refusal."""
        return used >= _MIN_SUSPECT and used > self._of(info).worked

    def describe(self, info: ModelInfo) -> str:
        """Explain to the user, in full sentences, where the window size comes from."""
        learned = self.learned(info)
        if learned is not None:
            state = self._of(info)
            words = describe_window(learned, self._today(), answers=state.answers, is_tested=state.probing)
            return f"{words} `/context forget` drops it."
        if info.is_window_configured:
            return "You configured this window."
        if info.context_window or self._of(info).listed:
            return "The endpoint lists this window."
        return f"The endpoint does not say how large its window is; crow assumes {DEFAULT_WINDOW:,} tokens."

    async def facts(self, info: ModelInfo) -> tuple[LearnedFact, ...]:
        """Return the learned facts about the endpoint that apply to this session. The learned window is not
        included."""
        if self._memory is None:
            return ()
        learned = await self._memory.learned(*_endpoint_and_model(info))
        without_window = {key: fact for key, fact in learned.items() if key != WINDOW}
        return describe_facts(without_window, self._session, today=self._today())

    def is_loaded_for(self, info: ModelInfo) -> bool:
        """Return whether `look_up` was called for this model with its present configured window."""
        return self._of(info).loaded and self._of(info).configured == _configured_window(info)

    async def look_up(self, info: ModelInfo) -> None:
        """Load what was learned about the model's window. If the user configured a window, discard the learned one."""
        state = self._of(info)
        state.loaded = True
        if state.configured != _configured_window(info):
            state.learned, state.probing, state.configured = None, False, _configured_window(info)
        if self._memory is None:
            return
        facts = await self._memory.learned(*_endpoint_and_model(info))
        if info.is_window_configured:
            if facts.get(WINDOW) is not None:
                await self._store(info, None)
            return
        state.listed = _listed_window(facts)
        old, state.learned = state.learned, learned_window(facts)
        # another session may have finished the test
        state.probing = state.probing and state.learned is not None and state.learned == old

    async def on_refusal(self, info: ModelInfo, error: ContextOverflow, *, used: int, fixed: int) -> int:
        """Learn from a refused request of `used` tokens. The system message and the tools take `fixed` of them.

        Return the window that the next compaction should assume. This window is smaller than the request, and may be
        smaller than the learned window.
        """
        await self.look_up(info)
        state, declared = self._of(info), self.declared(info)
        old, worked, limit = self.learned(info), state.worked, error.limit
        state.refusals += 1
        state.worked = 0
        size = error.size if error.size is not None and used / 4 <= error.size <= used * 4 else used
        # The stated limit may be above the request's size, because the size may be estimated too low. After a second
        # refusal in a row, such a limit is not believed.
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
            await self._learn(
                info,
                tokens,
                f'a refused request of about {used:,} tokens: "{without_controls(str(error))}"',
            )
        elif state.probing and old is not None:
            await self._confirm(info, old)
        return min(declared, used * 9 // 10, tokens or declared)

    async def on_truncation(self, info: ModelInfo, tokens: int, *, fixed: int) -> None:
        """Learn that the endpoint silently truncates requests to `tokens` tokens. The sign of this is that requests
        grow, but the endpoint never counts more than `tokens` tokens."""
        if fixed < tokens < self.declared(info):
            source = f"token counts: requests grew, but the endpoint never counted more than {tokens:,} input tokens"
            await self._learn(info, tokens, source, is_silent=True)

    async def on_answer(self, info: ModelInfo, *, sent: int, counted: int | None) -> None:
        """Learn from an answered request of about `sent` tokens. `counted` is the endpoint's count in tokens, or None
        if it is unknown."""
        state, learned = self._of(info), self.learned(info)
        state.refusals = 0
        state.answers += 1
        state.worked = max(state.worked, sent // 2 if counted is None else counted)
        if learned is None:
            return
        if counted is not None:
            is_disproved = counted > learned.tokens * (1.05 if learned.is_silent else 1)
        else:
            is_disproved = not learned.is_silent and sent > learned.tokens * 1.1
        if is_disproved:
            state.probing = False
            await self._replace(info, learned.disproved(self._today()))
        elif state.probing and counted is not None and sent > learned.tokens * 1.2:
            await self._confirm(info, learned)

    def test_if_due(self, info: ModelInfo) -> None:
        """If a test of the learned window is due, start it: a larger window applies until the test ends, so that a full
        context is not compacted. A test is also due if the endpoint has accepted a larger request in this session."""
        self._of(info).probing = self.is_test_due(info)

    def is_test_due(self, info: ModelInfo) -> bool:
        """Return whether crow is testing a window larger than the learned one, or will do so when the context is
        full."""
        state, learned = self._of(info), self.learned(info)
        if learned is None or state.probing:
            return state.probing
        return state.worked > learned.tokens or learned.is_due(state.answers, self._today())

    async def on_compaction(self, info: ModelInfo) -> None:
        """Store how many answers the endpoint has given since the learned window was last checked. Call this after a
        full context was compacted."""
        state, learned = self._of(info), self.learned(info)
        if learned is not None and not state.probing and state.answers:
            await self._replace(info, replace(learned, answers=learned.answers + state.answers))

    async def forget(self, info: ModelInfo) -> LearnedWindow | None:
        """Forget everything that was learned about the endpoint, for all sessions. Return the learned window, or None
        if there was none."""
        await self.look_up(info)
        state = self._of(info)
        learned, state.probing = state.learned, False
        if learned is not None:
            await self._replace(info, None)
        if self._memory is not None:
            facts = await self._memory.learned(*_endpoint_and_model(info))
            if dropped := {key: None for key in LEARNED_KEYS if facts.get(key)}:
                await self._memory.learn(*_endpoint_and_model(info), dropped)
        return learned if learned is not None and learned.times else None

    def _of(self, info: ModelInfo) -> _EndpointWindow:
        return self._endpoints.setdefault(info.endpoint, _EndpointWindow())

    async def _learn(self, info: ModelInfo, tokens: int, source: str, *, is_silent: bool = False) -> None:
        state = self._of(info)
        old, was_probing, state.probing = state.learned, state.probing, False
        today = self._today()
        times = 1 if old is None else old.times + (state.refusals < 2)  # several refusals in a row count as one
        learned = LearnedWindow(
            tokens=tokens,
            source=source,
            learned_on=today.isoformat(),
            session=self._session,
            times=times,
            is_silent=is_silent,
            answers=0 if old is None else old.answers + state.answers,
            patience=FIRST_WINDOW_PATIENCE if old is None else old.patience,
            checked_on=today.isoformat(),
        )
        await self._replace(info, learned.confirmed(today) if was_probing else replace(learned, answers=0))

    async def _confirm(self, info: ModelInfo, learned: LearnedWindow) -> None:
        """Record that a test has confirmed the learned window."""
        state = self._of(info)
        state.probing = False
        counted = replace(learned, answers=learned.answers + state.answers)
        await self._replace(info, counted.confirmed(self._today()))

    async def _replace(self, info: ModelInfo, learned: LearnedWindow | None) -> None:
        state = self._of(info)
        state.learned, state.answers = learned, 0
        if not info.is_window_configured:
            await self._store(info, None if learned is None else asdict(learned))

    async def _store(self, info: ModelInfo, fact: Mapping[str, object] | None) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(*_endpoint_and_model(info), {WINDOW: fact})
        except StoreError as error:
            # a turn should not fail because of this; crow will learn the window again
            logger.warning("Could not store the learned context window of %s: %s", info.endpoint, error)


def _configured_window(info: ModelInfo) -> int | None:
    return info.context_window if info.is_window_configured else None


def _listed_window(facts: Mapping[str, object]) -> int | None:
    """Return the window that the endpoint's list of models states, or None."""
    listed = facts.get("listed")
    tokens = listed.get("context_window") if isinstance(listed, Mapping) else None
    return tokens if type(tokens) is int and tokens > 0 else None


def _endpoint_and_model(info: ModelInfo) -> tuple[str, str]:
    """Return the two halves of `ModelInfo.endpoint`: base URL and model."""
    base_url, _, model = info.endpoint.partition(" ")
    return base_url, model

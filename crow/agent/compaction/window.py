"""The context window of a model: configured, listed or assumed, lowered by what its endpoint has shown.

Only a configured window may refuse a request. A learned one causes compaction, nothing else, so a wrong number costs
work, never the session. It is kept in the store with the endpoint, since other sessions will meet the same limit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from crow.agent.compaction.limits import MIN_ROOM
from crow.domain.errors import StoreError

if TYPE_CHECKING:
    from crow.domain.errors import ContextOverflow
    from crow.llm import EndpointMemory, ModelInfo

__all__ = ["DEFAULT_WINDOW", "LearnedWindow", "Window", "learned_in"]

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 128_000
"""Tokens assumed of a model whose window nobody has told."""

FACT = "window"
WORDS_CHARS = 300
FIRST_PATIENCE = 4
MOST_PATIENCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWindow:
    """A window that an endpoint has shown.

    It holds for `session` until it was shown twice (`times`), then for every session of the endpoint. After it has
    caused `patience` compactions, crow tries whether the endpoint takes more. `source`: the words it was taken from;
    `learned_on`: a date, in UTC; `is_silent`: the endpoint refuses nothing, but cuts longer requests.
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
    """What `facts` say was learned; None also for what an older version wrote, which believed any number."""
    fact = facts.get(FACT)
    if not isinstance(fact, Mapping):
        return None
    known = {field.name: fact[field.name] for field in fields(LearnedWindow) if field.name in fact}
    try:
        learned = LearnedWindow(**known)
    except TypeError:
        return None
    numbers = (learned.tokens, learned.times, learned.compactions, learned.patience)
    texts = (learned.source, learned.learned_on, learned.session)
    is_valid = (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(type(text) is str for text in texts)
        and type(learned.is_silent) is bool
        and learned.tokens > 0
    )
    return learned if is_valid else None


@dataclass(slots=True)
class Seen:
    """What a session knows of one endpoint, while a window is `configured` or none is.

    `worked`: the most tokens it took since it last refused a request. `refusals`: how many it refused since it last
    answered; `was_refused`: it ever did. `trying`: what was learned is left aside, to see whether it still holds.
    """

    configured: int | None = None
    learned: LearnedWindow | None = None
    listed: int | None = None
    worked: int = 0
    refusals: int = 0
    was_refused: bool = False
    trying: bool = False


class Window:
    """What one session knows of the windows of its models. Without a `memory`, nothing outlasts this object."""

    def __init__(self, memory: EndpointMemory | None = None, session: str = "") -> None:
        self._memory = memory
        self._session = session
        self._seen: dict[str, Seen] = {}
        self._looked_up: set[str] = set()

    async def look_up(self, info: ModelInfo) -> None:
        """Read what was learned of the model; a configured window makes that void."""
        self._looked_up.add(info.endpoint)
        seen = self._of(info)
        if seen.configured != configured_in(info):
            seen.learned, seen.trying, seen.configured = None, False, configured_in(info)
        if self._memory is None:
            return
        facts = await self._memory.learned(*endpoint_and_model(info))
        if info.is_window_configured:
            if facts.get(FACT) is not None:
                await self._store(info, None)
            return
        seen.listed = listed_in(facts)
        seen.learned = learned_in(facts)
        seen.trying = seen.trying and seen.learned is not None

    def is_of(self, info: ModelInfo) -> bool:
        """Whether it has looked up this model, configured as it is now."""
        return info.endpoint in self._looked_up and self._of(info).configured == configured_in(info)

    def declared(self, info: ModelInfo) -> int:
        """The window as configured, else as the endpoint lists it, else a guess."""
        return info.context_window or self._of(info).listed or DEFAULT_WINDOW

    def tokens(self, info: ModelInfo) -> int:
        """The window to go by now."""
        return self.declared(info) if self._of(info).trying else self.cautious_tokens(info)

    def cautious_tokens(self, info: ModelInfo) -> int:
        """The same, but what was learned also counts while it is tried whether it still holds."""
        learned = self.learned(info)
        return self.declared(info) if learned is None else min(self.declared(info), learned.tokens)

    def learned(self, info: ModelInfo) -> LearnedWindow | None:
        """What was learned and counts in this session."""
        learned = self._of(info).learned
        return learned if learned is not None and (learned.times > 1 or learned.session == self._session) else None

    async def refused(self, info: ModelInfo, error: ContextOverflow, *, used: int, fixed: int) -> int:
        """Learn from a refused request of `used` tokens, `fixed` of them system message and tools. Returns the window
        to compact for now: smaller than the request, and perhaps than what is learned."""
        await self.look_up(info)
        seen, declared = self._of(info), self.declared(info)
        old, worked, limit = self.learned(info), seen.worked, error.limit
        seen.refusals += 1
        seen.worked = 0
        size = error.size if error.size is not None and used / 4 <= error.size <= used * 4 else used
        # A limit that is named again for a shorter request, and still above it, cannot be the reason.
        is_named = limit is not None and fixed < limit < declared and (limit < size or seen.refusals == 1)
        tokens: int | None = None
        if limit is not None and is_named and limit >= worked:
            tokens = limit
        elif worked < used:
            kept = old is not None and worked <= old.tokens < used
            tokens = old.tokens if old is not None and kept else max(size * 9 // 10, worked)
            if tokens * 4 // 5 - fixed < MIN_ROOM and not seen.was_refused:
                tokens = None  # one refusal of a short request is no reason to work in so little room
        seen.was_refused = True
        if tokens is not None and tokens < declared:
            words = "".join(char if char.isprintable() else " " for char in str(error))[:WORDS_CHARS]
            await self._learn(info, tokens, f'a refused request of about {used:,} tokens: "{words}"')
        elif seen.trying and old is not None:
            seen.trying = False
            await self._keep(info, waiting_longer(old))
        return min(declared, used * 9 // 10, tokens or declared)

    async def cut(self, info: ModelInfo, tokens: int, *, fixed: int) -> None:
        """The endpoint counts `tokens` whatever is sent: it cuts longer requests without a word."""
        if fixed < tokens < self.declared(info):
            source = f"token counts: requests grew, and the endpoint counted {tokens:,} input tokens at most"
            await self._learn(info, tokens, source, is_silent=True)

    async def answered(self, info: ModelInfo, *, sent: int, counted: int | None) -> None:
        """A request of about `sent` tokens was answered; the endpoint `counted` so many, None if that is not known."""
        seen, learned = self._of(info), self.learned(info)
        seen.refusals = 0
        seen.worked = max(seen.worked, sent // 2 if counted is None else counted)
        if learned is None:
            return
        if counted is not None:
            is_disproved = counted > learned.tokens * (1.05 if learned.is_silent else 1)
        else:
            is_disproved = not learned.is_silent and sent > learned.tokens * 1.1
        if is_disproved:
            seen.trying = False
            await self._keep(info, None)
        elif seen.trying and counted is not None and sent > learned.tokens * 1.2:
            seen.trying = False
            await self._keep(info, waiting_longer(learned))

    async def compacted(self, info: ModelInfo) -> None:
        """A compaction was made because the window is full. After some, what was learned is left aside once."""
        seen, learned = self._of(info), self.learned(info)
        if learned is None or seen.trying:
            return
        seen.trying = learned.compactions + 1 >= learned.patience
        await self._keep(info, replace(learned, compactions=0 if seen.trying else learned.compactions + 1))

    async def forget(self, info: ModelInfo) -> LearnedWindow | None:
        """Drop what was learned, for this session and for the endpoint; what that was."""
        await self.look_up(info)
        seen = self._of(info)
        learned, seen.trying = seen.learned, False
        if learned is not None:
            await self._keep(info, None)
        return learned

    def words(self, info: ModelInfo) -> str:
        """Where the number comes from, in sentences for the user."""
        learned = self.learned(info)
        if learned is not None:
            reach = "for every session of this endpoint" if learned.times > 1 else "for this session only"
            left = learned.patience - learned.compactions
            trial = (
                "Crow is trying whether the endpoint takes more now."
                if self._of(info).trying
                else f"After {left} more compaction{'s' * (left != 1)} crow tries whether the endpoint takes more."
            )
            return (
                f"A window of {learned.tokens:,} tokens was learned on {learned.learned_on}, {reach}, from "
                f"{learned.source}. It only causes compaction. {trial} `/context forget` drops it."
            )
        if info.is_window_configured:
            return "You configured this window."
        if info.context_window or self._of(info).listed:
            return "The endpoint gives this window."
        return f"The endpoint has not told its window: {DEFAULT_WINDOW:,} tokens are assumed."

    async def _learn(self, info: ModelInfo, tokens: int, source: str, *, is_silent: bool = False) -> None:
        seen = self._of(info)
        old, was_trial, seen.trying = seen.learned, seen.trying, False
        learned = LearnedWindow(
            tokens=tokens,
            source=source,
            learned_on=datetime.now(UTC).date().isoformat(),
            session=self._session,
            # Refusals in a row are one event.
            times=1 if old is None else old.times + (seen.refusals < 2),
            is_silent=is_silent,
            patience=FIRST_PATIENCE if old is None else old.patience,
        )
        await self._keep(info, waiting_longer(learned) if was_trial else learned)

    async def _keep(self, info: ModelInfo, learned: LearnedWindow | None) -> None:
        self._of(info).learned = learned
        if not info.is_window_configured:
            await self._store(info, None if learned is None else asdict(learned))

    async def _store(self, info: ModelInfo, fact: Mapping[str, object] | None) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(*endpoint_and_model(info), {FACT: fact})
        except StoreError as error:  # it is learned again another time; no turn fails for it
            logger.warning("What %s showed of its window could not be stored: %s", info.endpoint, error)

    def _of(self, info: ModelInfo) -> Seen:
        return self._seen.setdefault(info.endpoint, Seen())


def waiting_longer(learned: LearnedWindow) -> LearnedWindow:
    """It was tried, and holds: the next trial comes after twice as many compactions."""
    return replace(learned, compactions=0, patience=min(MOST_PATIENCE, learned.patience * 2))


def configured_in(info: ModelInfo) -> int | None:
    return info.context_window if info.is_window_configured else None


def listed_in(facts: Mapping[str, object]) -> int | None:
    """The window that the endpoint's list of models told."""
    listed = facts.get("listed")
    tokens = listed.get("context_window") if isinstance(listed, Mapping) else None
    return tokens if type(tokens) is int and tokens > 0 else None


def endpoint_and_model(info: ModelInfo) -> tuple[str, str]:
    """The two halves of `ModelInfo.endpoint`: base URL and model."""
    base_url, _, model = info.endpoint.partition(" ")
    return base_url, model

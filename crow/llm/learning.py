"""Learns facts about a model from the endpoint's list of models, from its answers, and from its refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from datetime import date
from functools import reduce

from crow.domain.errors import StoreError
from crow.domain.messages import Usage, WireName
from crow.llm import EndpointMemory, ModelInfo
from crow.llm.dialect import Dialect, changes_messages, is_wire
from crow.llm.endpoint import Endpoint
from crow.llm.facts import (
    USAGE,
    Refusal,
    UsageShape,
    learned_refusals,
    learned_usage,
    refusals_for,
    stored_refusals,
    utc_today,
    without_controls,
)
from crow.llm.form import RequestForm
from crow.llm.listing import PRICES, Offered, facts_of, learned_listing

logger = logging.getLogger(__name__)

_LISTING_INTERVAL = 50
"""Crow counts the answers to requests that fill at least half of the context window. It reads the list of models again
after the first of these answers, and then after every `_LISTING_INTERVAL` more."""

_MIN_OUTPUT = 512
"""Crow does not remember a lower output limit than this, because such a limit usually depends on the length of a single
request."""

_MISSING_USAGE = 3
"""After this many answers in a row without token counts, crow stores that the endpoint reports none."""


class EndpointFacts:
    """The facts that crow knows about one model at one endpoint, in addition to its configuration.

    `learned` contains the facts that `memory` had stored when this process began. These facts are read again before
    each request, and changes are stored at once. A configured context window takes precedence over a listed one.
    Overflow errors are handled by the agent and not here, because the agent knows what was sent.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        memory: EndpointMemory | None,
        learned: Mapping[str, object],
        *,
        today: Callable[[], date] = utc_today,
    ) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._today = today
        self._filled = 0
        """The number of answers to requests that filled at least half of the window."""
        self._missing_usage = 0
        """The number of answers in a row without token counts."""
        self._sessions: set[str] = set()
        """The sessions that have sent a request in this process."""
        self._unstored: dict[str, object] = {}
        """Facts that could not be stored."""
        self._last_read = learned
        self._take(learned)

    def _take(self, learned: Mapping[str, object]) -> None:
        """Replace all facts by those in `learned`."""
        self._info: ModelInfo | None = None  # None: must be computed again
        self._listed = learned_listing(learned, self._endpoint.model)
        self._refusals = learned_refusals(learned)
        self._usage = learned_usage(learned)

    async def refresh(self) -> None:
        """Read the stored facts again: another session, another process or the user may have changed them."""
        if self._memory is None:
            return
        try:
            learned = await self._memory.learned(self._endpoint.base_url, self._endpoint.model)
        except StoreError as error:
            logger.warning("Facts about %s could not be read: %s", self._endpoint.base_url, error)
            return
        if learned is not self._last_read:
            self._last_read = learned
            self._take({**learned, **self._unstored})

    @property
    def is_listed(self) -> bool:
        """Whether the endpoint's list of models was ever read."""
        return self._listed is not None

    @property
    def info(self) -> ModelInfo:
        """The model as configured. Limits and prices that are not configured are taken from the endpoint's list of
        models."""
        if self._info is None:
            self._info = self._current_info()
        return self._info

    def _current_info(self) -> ModelInfo:
        info, listed = self._endpoint.info, self._listed
        window = info.context_window or (listed.context_window if listed is not None else None)
        limits = (each.limit for each in self._refusals.values() if each.times > 1 and each.holds)
        known = min((limit for limit in limits if limit is not None), default=None)
        info = replace(
            info,
            wire=self._wire(),
            context_window=window,
            max_output_tokens=self.output_limit(None, known),
            thought_levels=listed.thought_levels if listed is not None else None,
            refused=tuple(
                each for each in self._refusals.values() if changes_messages(each.part) and not is_wire(each.part)
            ),
        )
        if listed is None or info.input_price is not None or info.output_price is not None:
            return info
        prices = {key: getattr(listed, key) for key in PRICES}
        return replace(info, **prices)

    def _wire(self) -> WireName:
        """Return the wire that requests of every session use."""
        known = (part for part, each in self._refusals.items() if is_wire(part) and each.holds and each.times > 1)
        return reduce(Dialect.refusing, known, self._endpoint.dialect).wire

    def output_limit(self, wanted: int | None, known: int | None) -> int | None:
        """Return the output limit to send, or None to send no limit. `known` is the largest limit that the endpoint is
        known to accept. If `wanted` is None, the configured limit takes its place. The result is the smallest of the
        wanted limit, the limit that the endpoint lists, and `known`. If `wanted` is None and no limit is configured,
        the result is `known`."""
        wanted = wanted or self._endpoint.max_output_tokens
        listed = self._listed.max_output_tokens if self._listed is not None and wanted is not None else None
        return min((limit for limit in (wanted, listed, known) if limit is not None), default=None)

    def form(self, session: str, *, has_tools: bool = True) -> RequestForm:
        """Return the form of the next request of `session`. If a fact is due for a test, the form tests it. A request
        without tools tests no wire, because some wires are refused only with tools."""
        is_first = session not in self._sessions
        self._sessions.add(session)
        known = {each.part: each for each in refusals_for(self._refusals, session)}
        today = self._today()
        due = {part for part, each in known.items() if each.is_due(today)}
        return RequestForm(
            session=session,
            configured=self._endpoint.dialect,
            known=known,
            tested={
                part for part in due if (is_first or not changes_messages(part)) and (has_tools or not is_wire(part))
            },
        )

    def refuse(self, form: RequestForm, part: str, words: str, *, limit: int | None = None) -> None:
        """Record in `form` that the endpoint refused a part of the request. The refusal is stored when the endpoint
        accepts the request without this part."""
        today = self._today().isoformat()
        form.tested.discard(part)
        form.refused[part] = Refusal(
            part=part,
            source=f'a refused request: "{without_controls(words)}"',
            learned_on=today,
            checked_on=today,
            session=form.session,
            limit=limit,
            # One refusal of a wire is enough for every session: it is unlikely to be a temporary fault.
            times=2 if is_wire(part) else 1,
        )

    async def settle(self, form: RequestForm, shows: Callable[[str], bool]) -> None:
        """Learn from a request that the endpoint accepted in this form. `shows(part)` returns whether the request would
        be different without this part. If it would not, the request did not test the part."""
        if form.is_settled:
            return
        form.is_settled = True
        if not (form.refused or form.doubted or form.in_question):
            return
        await self.refresh()
        today, refusals = self._today(), dict(self._refusals)
        for part, new in form.refused.items():
            if new.limit is None or new.limit >= _MIN_OUTPUT:
                old = refusals.get(part)
                refusals[part] = new if old is None else old.again(new, today)
        for part in form.doubted & refusals.keys():
            refusals[part] = refusals[part].again(refusals[part], today)
        for part in form.in_question & refusals.keys():
            if shows(part):
                refusals[part] = replace(refusals[part], holds=False)
        if refusals != self._refusals:
            self._refusals, self._info = refusals, None
            await self._store(stored_refusals(refusals))

    async def set_listed(self, offered: Offered | None) -> None:
        """Record what the endpoint's list of models says about this model. If `offered` is None, the list does not
        contain the model."""
        self._listed, self._info = offered or Offered(name=self._endpoint.model), None
        await self._store(facts_of(self._listed))

    async def add_usage(self, usage: Usage | None) -> bool:
        """Record which token counts the endpoint reports. Forget the listed context window if the input was longer than
        the window. Return True if it is time to read the list of models: either crow has never read the list, or the
        window is filling up and its size may have changed at the server."""
        await self._note_usage(usage)
        used = (usage.input_tokens or 0) if usage is not None else 0
        window = self._listed.context_window if self._listed is not None else None
        if self._listed is not None and window is not None and used > window:
            await self.set_listed(replace(self._listed, context_window=None))
            window = None
        if self._endpoint.context_window is not None:
            return False
        if self._listed is None:
            return True
        if window is None or used * 2 < window:
            return False
        self._filled += 1
        return self._filled % _LISTING_INTERVAL == 1

    async def _note_usage(self, usage: Usage | None) -> None:
        """Store the names of the counts that the endpoint reports, if crow sees this set of names for the first or
        second time."""
        counts = [
            each.name.removesuffix("_tokens")
            for each in (() if usage is None else fields(usage))
            if each.name.endswith("_tokens") and getattr(usage, each.name) is not None
        ]
        known = self._usage.counts.split() if self._usage is not None else []
        self._missing_usage = 0 if counts else self._missing_usage + 1
        if known and not counts and self._missing_usage < _MISSING_USAGE:
            return
        # Not every answer has every count: many endpoints omit the count of cached tokens when it is zero.
        seen = [*known, *(count for count in counts if count not in known)] if counts else []
        times = 2 if self._usage is not None and seen == known else 1
        if self._usage is not None and seen == known and self._usage.times >= times:
            return
        self._usage = UsageShape(counts=" ".join(seen), learned_on=self._today().isoformat(), times=times)
        await self._store({USAGE: asdict(self._usage)})

    async def _store(self, facts: Mapping[str, object]) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(self._endpoint.base_url, self._endpoint.model, facts)
        except StoreError as error:  # the answer is more important than the facts learned from it
            self._unstored.update(facts)
            logger.warning("Facts about %s could not be stored: %s", self._endpoint.base_url, error)
        else:
            for key in facts:
                self._unstored.pop(key, None)

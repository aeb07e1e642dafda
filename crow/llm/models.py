"""Learns facts about models from the endpoint's answer to `GET /models`, and from refused requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from functools import reduce
from typing import Any

from crow.domain.errors import StoreError
from crow.domain.messages import Usage, WireName
from crow.llm import THOUGHT_LEVELS, EndpointMemory, ModelInfo, ModelLimits, ThoughtLevel
from crow.llm.dialect import Dialect, changes_messages, is_wire
from crow.llm.endpoint import Endpoint
from crow.llm.errors import ErrorBody
from crow.llm.facts import (
    MAX_TOKENS,
    USAGE,
    Refusal,
    UsageShape,
    is_possible_limit,
    learned_refusals,
    learned_usage,
    refusals_for,
    stored_refusals,
    utc_today,
    without_controls,
)

logger = logging.getLogger(__name__)

# If several windows are stated, the smallest is used, because a single request may not exceed it. The window that a
# model was trained with (llama.cpp's `n_ctx_train`) is ignored: it does not tell how the model is served.
_LOADED_WINDOWS = (
    ("loaded_context_length",),  # LM Studio
    ("max_model_len",),  # vLLM, SGLang
    ("meta", "n_ctx"),  # llama.cpp
)
_POSSIBLE_WINDOWS = (
    ("context_length",),  # OpenRouter, Together, Moonshot
    ("top_provider", "context_length"),  # OpenRouter, for its preferred provider
    ("context_window",),  # Groq
    ("max_context_length",),  # Mistral, LM Studio
    ("max_input_tokens",),  # LiteLLM, Anthropic
    ("inputTokenLimit",),  # Gemini's native API
)
_OUTPUTS = (("top_provider", "max_completion_tokens"), ("max_completion_tokens",), ("outputTokenLimit",))
_THINKS = (
    ("supports_reasoning",),  # LiteLLM, Moonshot
    ("capabilities", "reasoning"),  # Mistral
)
_MIN_WINDOW = 256
_MAX_NAME_CHARS = 200
_LISTING_INTERVAL = 50
"""Crow counts the answers to requests that fill at least half of the context window. It reads the list of models again
after the first of these answers, and from then on after every `_LISTING_INTERVAL` more."""

_MIN_OUTPUT = 512
"""Crow does not remember a lower output limit than this, because such a limit usually depends on the length of a single
request."""

_MISSING_USAGE = 3
"""After this many answers in a row without token counts, crow stores that the endpoint reports none."""

_PRICES = ("input_price", "cached_price", "cache_write_price", "output_price")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(ModelLimits):
    """A model that an endpoint lists."""

    name: str
    thought_levels: tuple[ThoughtLevel, ...] | None = None
    """The thought levels that the model takes. None if the list does not say."""


def read_listing(body: object) -> tuple[Offered, ...] | None:
    """Return the models that `body` lists, in the order of the list. Return None if `body` is not a list of models."""
    listed = body.get("data", body.get("models")) if isinstance(body, Mapping) else body
    if not isinstance(listed, list):
        return None
    return tuple(offered for item in listed if (offered := _offered(item)) is not None)


def last_of_page(body: object) -> str | None:
    """Return the id of the last model in `body`, one page of Anthropic's list, or None if no other page follows."""
    if not isinstance(body, Mapping) or body.get("has_more") is not True:
        return None
    last = body.get("last_id")
    return last if isinstance(last, str) and 0 < len(last) <= _MAX_NAME_CHARS else None


def _offered(item: object) -> Offered | None:
    if isinstance(item, str):
        item = {"id": item}
    name = item.get("id") or item.get("name") or item.get("model") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:
        return None
    windows = list(_sizes(item, _LOADED_WINDOWS)) or list(_sizes(item, _POSSIBLE_WINDOWS))
    outputs = _OUTPUTS if item.get("type") != "model" else (*_OUTPUTS, ("max_tokens",))  # Anthropic
    return Offered(
        name=name,
        context_window=min(windows, default=None),
        max_output_tokens=min(_sizes(item, outputs), default=None),
        input_price=_price(item, "prompt"),
        cached_price=_price(item, "input_cache_read"),
        cache_write_price=_price(item, "input_cache_write"),
        output_price=_price(item, "completion"),
        thought_levels=_thought_levels(item),
    )


def _thought_levels(item: Mapping[str, object]) -> tuple[ThoughtLevel, ...] | None:
    """Return the thought levels that a listed model takes: none if it does not think, None if the list does not say."""
    thinks = _value_at(item, ("capabilities", "thinking", "supported"))  # Anthropic
    if thinks is True:
        effort = _value_at(item, ("capabilities", "effort"))
        has_budget = _value_at(item, ("capabilities", "thinking", "types", "enabled", "supported")) is not False
        if has_budget or not isinstance(effort, Mapping):
            return THOUGHT_LEVELS
        return tuple(
            level for level in THOUGHT_LEVELS if level == "off" or _value_at(effort, (level, "supported")) is not False
        )
    reasoning = item.get("reasoning")
    if isinstance(reasoning, Mapping):  # OpenRouter
        efforts, is_mandatory = reasoning.get("supported_efforts"), reasoning.get("mandatory") is True
        taken = efforts if isinstance(efforts, list) else THOUGHT_LEVELS
        return tuple(level for level in THOUGHT_LEVELS if (not is_mandatory if level == "off" else level in taken))
    parameters = item.get("supported_parameters")  # OpenRouter
    if isinstance(parameters, list):
        return THOUGHT_LEVELS if "reasoning" in parameters or "reasoning_effort" in parameters else ()
    flags = (thinks, *(_value_at(item, place) for place in _THINKS))
    return () if False in (flag for flag in flags if isinstance(flag, bool)) else None


def _sizes(item: Mapping[str, object], places: tuple[tuple[str, ...], ...]) -> Iterator[int]:
    for place in places:
        size = _number(_value_at(item, place))
        if size is not None and _MIN_WINDOW <= size <= MAX_TOKENS:
            yield int(size)


def _price(item: Mapping[str, object], key: str) -> float | None:
    """Return the price in USD per million tokens. OpenRouter states USD per token, as text."""
    price = _number(_value_at(item, ("pricing", key)))
    return round(price * 1e6, 6) if price is not None and 0 <= price < 1 else None


def _number(value: object) -> float | None:
    """Read a value that an endpoint stated as a number, or as text such as "0.5". Return None for anything else."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_possible(name: str, value: object) -> bool:
    """Return whether `value` is a possible value of the limit or price `name`."""
    if name in _PRICES:
        price = None if isinstance(value, str) else _number(value)
        return price is not None and price >= 0
    return is_possible_limit(value)


def _value_at(item: Mapping[str, object], place: tuple[str, ...]) -> object:
    value: object = item
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def facts_of(offered: Offered) -> Mapping[str, object]:
    """Return what to store about a listed model."""
    stated = {key: value for key, value in asdict(offered).items() if key != "name" and value is not None}
    return {"listed": stated}


@dataclass(slots=True, kw_only=True)
class RequestForm:
    """The form in which one request is sent. It changes until the endpoint accepts the request.

    The request leaves out the parts in `refused`, and those in `known` that are in neither `tested` nor `restored`. A
    part that the endpoint refuses by name is added to `refused`. After a refusal that names no part, all parts in
    `tested` move to `doubted`; if there are none, parts in `known` are added to `restored`.
    """

    session: str
    """The cache key of the session."""
    configured: Dialect
    """The endpoint's dialect as configured, before any refusal."""
    known: dict[str, Refusal]
    """The refusals that apply to the session."""
    tested: set[str] = field(default_factory=set)
    """Parts in `known` that this request contains anyway, to test whether the endpoint still refuses them."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    """The parts that the endpoint has refused in this request."""
    doubted: set[str] = field(default_factory=set)
    """Parts that were being tested when the endpoint refused the request without a usable reason. The request no longer
    contains them."""
    restored: set[str] = field(default_factory=set)
    """Parts in `known` that were left out when the endpoint refused the request. The request now contains them, because
    the endpoint may require them."""
    moved: tuple[ErrorBody, WireName] | None = None
    """The first refusal of a whole wire, and this wire. None if no wire was refused."""
    is_back: bool = False
    """Whether the request returned to the wire of `moved`, because the endpoint refused all other wires, too."""
    is_settled: bool = False
    """Whether crow has learned from this request."""

    def left_out(self) -> tuple[Refusal, ...]:
        """Return the refusals whose parts this request leaves out, oldest first."""
        sent = self.tested | self.restored
        return (*(each for each in self.known.values() if each.part not in sent), *self.refused.values())

    @property
    def dialect(self) -> Dialect:
        """The dialect of this request."""
        return self.dialect_without()

    def dialect_without(self, *parts: str) -> Dialect:
        """Return the dialect that this request would have if it also left out `parts`."""
        # The wire comes first, because the other parts belong to one wire.
        found = sorted((*(each.part for each in self.left_out()), *parts), key=is_wire, reverse=True)
        return reduce(Dialect.refusing, found, self.configured)

    @property
    def max_output(self) -> int | None:
        """The largest output limit that the endpoint is known to accept."""
        return min((each.limit for each in self.left_out() if each.limit is not None), default=None)

    def revert(self, words: str) -> bool:
        """Change the form after a refusal that names no part to leave out. If parts are being tested, leave them out
        again. Otherwise send again the parts that were left out and that `words`, the text of the refusal, mentions. If
        it mentions none of them, send all of them again. Return False if there is nothing to change."""
        if self.tested:
            self.doubted, self.tested = self.doubted | self.tested, set()
            return True
        absent = self.known.keys() - self.refused.keys() - self.doubted - self.restored
        # The name of a part may begin with its wire.
        self.restored |= {part for part in absent if part.rpartition(".")[2] in words} or absent
        return bool(absent)

    def go_back(self) -> ErrorBody | None:
        """Return to the first wire that was refused, to try it with other requests. Return the reason that it gave, or
        None if this request never left a wire, or has returned to it before."""
        if self.moved is None or self.is_back:
            return None
        self.is_back = True
        self.refused = {part: each for part, each in self.refused.items() if not is_wire(part)}
        return self.moved[0]

    @property
    def in_question(self) -> frozenset[str]:
        """The parts in `known` that this request contains. If the endpoint accepts the request, it no longer refuses
        these parts."""
        return frozenset(self.tested | self.restored) - self.refused.keys()


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
        self._listed: Offered | None = None
        self._refusals = learned_refusals(learned)
        self._usage = learned_usage(learned)
        listed = learned.get("listed")
        if isinstance(listed, Mapping):
            known = {each.name: listed.get(each.name) for each in fields(ModelLimits)}
            limits: dict[str, Any] = {key: value for key, value in known.items() if _is_possible(key, value)}
            levels = listed.get("thought_levels")
            taken = None
            if isinstance(levels, (list, tuple)):
                taken = tuple(level for level in THOUGHT_LEVELS if level in levels)
            self._listed = Offered(name=self._endpoint.model, thought_levels=taken, **limits)

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
        prices = {key: getattr(listed, key) for key in _PRICES}
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
        """Record which token counts the endpoint reports. Forget the listed context window if this request was longer
        than the window. Return True if it is time to read the list of models: either crow has never read the list, or
        the window is filling up and its size may have changed at the server."""
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
        except StoreError as error:  # the answer is more important than storing what was learned from it
            self._unstored.update(facts)
            logger.warning("Facts about %s could not be stored: %s", self._endpoint.base_url, error)
        else:
            for key in facts:
                self._unstored.pop(key, None)

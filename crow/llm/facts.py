"""The facts that crow has learned about a model at an endpoint: their stored format, and their descriptions for the
user.

A learned window or refusal records what it was learned from, when, in which session, and how often. If it was learned
once, it applies only to its session. If it was learned at least twice, it applies to every session. The token counts
that the endpoint reports are the same for every session. No fact is final. Crow tests each fact again, so a temporary
fault of an endpoint has no lasting effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeGuard, TypeVar

from crow.domain.text import plural

WINDOW, _REFUSED, USAGE = "window", "refused", "usage"
LEARNED_KEYS = (WINDOW, _REFUSED, USAGE)
"""Keys of the stored facts about one endpoint and model."""

OUTPUT_LIMIT = "max_output_tokens"
"""The name in `Refusal` for an output limit that was too high."""

_QUOTE_CHARS = 300
MAX_TOKENS = 1_000_000_000
"""No context window or output limit is larger than this."""

_MAX_PATIENCE_DAYS = 32
"""A refused part is tested again after at most this many days."""

_MAX_REFUSALS = 40
"""At most this many refusals are stored and read for one endpoint and model."""

FIRST_WINDOW_PATIENCE = 8
_MAX_WINDOW_PATIENCE = 256
_MAX_SILENT_PATIENCE = 1024
"""The patience of a learned window is a number of answers; see `LearnedWindow`. An endpoint that truncates requests
silently is tested less often, because in such a test the model does not see the start of the conversation."""

_Fact = TypeVar("_Fact", "LearnedWindow", "Refusal", "UsageShape")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWindow:
    """A size of the context window that crow learned from how an endpoint behaved. To test the size again, crow sends a
    longer request instead of compacting the context. Dates are ISO dates in UTC.

    When the endpoint accepts a longer request, `times` becomes 0, and the window no longer applies. The fact is kept,
    because a window that is learned later takes over its `patience`. If the endpoint accepts a longer request on the
    day on which the window was learned, crow assumes that the endpoint changes often. Then `patience` returns to its
    first value, so that crow tests often.
    """

    tokens: int
    """The size of the window in tokens."""
    source: str
    """A description of the behaviour from which crow learned the size, for the user."""
    learned_on: str
    """The day on which it was learned last."""
    session: str
    """The session that learned it last."""
    times: int = 1
    """How often it was learned. If once, it applies only to `session`, else to every session."""
    is_silent: bool = False
    """Whether the endpoint truncates longer requests instead of refusing them."""
    answers: int = 0
    """The number of answers since a check last confirmed the window."""
    patience: int = FIRST_WINDOW_PATIENCE
    """Crow tests the window after this many answers, or on a later day than `checked_on`."""
    checked_on: str = ""
    """The day on which a check last confirmed the window."""

    def applies_to(self, session: str) -> bool:
        return self.times > 1 or (self.times == 1 and self.session == session)

    def is_due(self, answers: int, today: date) -> bool:
        """Return whether to test the window now. `answers` is the number of answers since `self.answers` was stored."""
        return self.answers + answers >= self.patience or _is_past(self.checked_on, 1, today)

    def disproved(self, today: date) -> LearnedWindow:
        """Return the fact to store when the endpoint has accepted a longer request."""
        is_same_day = today.isoformat() == self.learned_on
        return replace(self, times=0, answers=0, patience=FIRST_WINDOW_PATIENCE if is_same_day else self.patience)

    def confirmed(self, today: date) -> LearnedWindow:
        """Return the fact to store when a test has shown that the window holds. If the test came after `patience`
        answers, the patience is doubled."""
        patience = self.patience
        if self.answers >= patience:
            patience = min(_MAX_SILENT_PATIENCE if self.is_silent else _MAX_WINDOW_PATIENCE, 2 * patience)
        return replace(self, answers=0, patience=patience, checked_on=today.isoformat())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A part of a request that the endpoint refused: without this part, the endpoint accepted the request. When the
    refusal is due for a test, crow sends the part again in one request."""

    part: str
    """A name that :class:`crow.llm.dialect.Dialect` uses, or `OUTPUT_LIMIT`."""
    source: str
    """A description of the refused request, with a quotation of the refusal."""
    learned_on: str
    """The day on which it was learned last."""
    session: str
    """The session that learned it last."""
    times: int = 1
    """How often it was learned. If once, it applies only to `session`, else to every session."""
    limit: int | None = None
    """The largest output limit that the endpoint accepts, if the part is `OUTPUT_LIMIT`."""
    checked_on: str = ""
    """The day on which the endpoint last refused the part."""
    patience: int = 1
    """Crow tests the part this many days later. If it is refused again, the patience is doubled."""
    holds: bool = True
    """False once the endpoint has accepted the part again. The fact is kept, so that crow does not count a later
    refusal as the first one."""

    def applies_to(self, session: str) -> bool:
        return self.holds and (self.times > 1 or self.session == session)

    def is_due(self, today: date) -> bool:
        return _is_past(self.checked_on, self.patience, today)

    def again(self, new: Refusal, today: date) -> Refusal:
        """Return the fact to store when the part has been refused again. `new` describes the latest refusal."""
        patience = min(_MAX_PATIENCE_DAYS, self.patience * 2)
        return replace(new, times=self.times + 1, patience=patience, checked_on=today.isoformat())


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageShape:
    """The token counts that the endpoint reports."""

    counts: str
    """The names of the counts, separated by spaces, such as `input output cached`. Empty if the endpoint reports
    none."""
    learned_on: str
    """The day on which this was learned."""
    times: int = 1
    """How often this was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedFact:
    """One learned fact for the user."""

    about: str
    """What the fact is about, such as `context window`."""
    words: str
    """The description, in full sentences."""


def utc_today() -> date:
    return datetime.now(UTC).date()


def without_controls(words: str) -> str:
    """Return the start of an endpoint's message, without control characters."""
    return "".join(char if char.isprintable() else " " for char in words)[:_QUOTE_CHARS]


def learned_window(facts: Mapping[str, object]) -> LearnedWindow | None:
    """Return the learned window among an endpoint's facts, or None if there is none or its format is unknown."""
    learned = _read(LearnedWindow, facts.get(WINDOW))
    is_valid = learned is not None and learned.tokens > 0 and min(learned.times, learned.answers, learned.patience) >= 0
    return learned if is_valid else None


def learned_refusals(facts: Mapping[str, object]) -> dict[str, Refusal]:
    """Return the refusals by the names of the refused parts, oldest first."""
    listed = facts.get(_REFUSED)
    found: dict[str, Refusal] = {}
    for item in listed[:_MAX_REFUSALS] if isinstance(listed, (list, tuple)) else ():
        refusal = _read(Refusal, item)
        is_valid = refusal is not None and refusal.times > 0 and refusal.patience > 0
        if refusal is not None and is_valid and (refusal.limit is None or is_possible_limit(refusal.limit)):
            found[refusal.part] = refusal
    return found


def is_possible_limit(value: object) -> TypeGuard[int]:
    """Return whether this can be an output limit in tokens."""
    return type(value) is int and 0 < value <= MAX_TOKENS


def learned_usage(facts: Mapping[str, object]) -> UsageShape | None:
    """Return which token counts the endpoint reports, or None if that is unknown."""
    return _read(UsageShape, facts.get(USAGE))


def stored_refusals(refusals: Mapping[str, Refusal]) -> dict[str, object]:
    """Return the newest `_MAX_REFUSALS` of `refusals` in the format in which facts are stored."""
    return {_REFUSED: [asdict(each) for each in refusals.values()][-_MAX_REFUSALS:]}


def describe_facts(
    facts: Mapping[str, object], session: str | None = None, *, today: date | None = None
) -> tuple[LearnedFact, ...]:
    """Describe everything that was learned about an endpoint. Each description says what was learned, from what, when
    and how often, and when crow tests it again. If `session` is given, leave out facts that do not apply to that
    session. `today` is by default the date in UTC."""
    today = today or utc_today()
    described: list[LearnedFact] = []
    window = learned_window(facts)
    if window is not None and window.times and (session is None or window.applies_to(session)):
        words = describe_window(window, today, is_own=session is not None)
        described.append(LearnedFact(about="context window", words=words))
    described += [
        LearnedFact(about=_part_name(refusal.part), words=_describe_refusal(refusal, today, is_own=session is not None))
        for refusal in learned_refusals(facts).values()
        if refusal.holds and (session is None or refusal.applies_to(session))
    ]
    usage = learned_usage(facts)
    if usage is not None:
        counts = " and ".join(", ".join(usage.counts.split()).rsplit(", ", 1))
        reports = f"The endpoint reports {counts} tokens" if counts else "The endpoint reports no token counts"
        seen = "after one answer" if usage.times == 1 else "after several answers"
        words = f"{reports} ({seen}, {usage.learned_on}). Crow checks this with every answer."
        described.append(LearnedFact(about="usage", words=words))
    return tuple(described)


def describe_window(
    window: LearnedWindow, today: date, *, answers: int = 0, is_tested: bool = False, is_own: bool = True
) -> str:
    """Describe a learned window in full sentences. `answers` is the number of answers since `window.answers` was
    stored. `is_tested` means that crow is testing the window now and therefore ignores it. `is_own` means that the
    words are shown in a session to which the window applies."""
    more = plural(window.patience - window.answers - answers, "more answer")
    test = f"After {more}, or on another day, crow tests whether the endpoint accepts more."
    if is_tested:
        test = "Crow is now testing whether the endpoint accepts more."
    elif window.is_due(answers, today):
        test = "When the context is full, crow tests whether the endpoint accepts more."
    scope = _scope(window.times, is_own=is_own)
    return (
        f"Crow learned a window of {window.tokens:,} tokens on {window.learned_on}, {scope}, from {window.source}. "
        f"Crow uses it only to decide when to compact. {test}"
    )


def _part_name(part: str) -> str:
    """Return the name of a part for the user. `part` begins with the wire on which the part was refused, except for
    Chat Completions."""
    wire, _, plain = part.rpartition(".")
    name = _PART_NAMES.get(plain, plain)
    return f"{name} (on {wire})" if wire else name


_PART_NAMES = {
    "chat_wire": "API Chat Completions",
    "responses_wire": "API Responses",
    "messages_wire": "API Messages",
    "files": "files in tool results",
    "include": "encrypted reasoning (include)",
    "summary": "summaries of reasoning",
    "cache_retention": "cache breakpoints",
    "output_limit": "any output limit",
    "strict": "strict tools",
    "custom_tools": "tools with plain text as input",
    "store": "store",
    "stream": "streaming",
    "stream_options": "usage while streaming (stream_options)",
    "max_output_tokens": "output limit",
    "prompt_cache_key": "cache key (prompt_cache_key)",
    "cache_marker": "cache marker (cache_control)",
    "null_content": "null as the content of messages with calls",
    "no_content": "calls without content",
    "no_reasoning": "answers sent back without reasoning",
    "parallel_calls": "several calls in one answer",
    "opaque": "opaque reasoning details",
    "is_error": "marks of failed tool results (is_error)",
    "earlier_thoughts": "thoughts from before the conversation was changed",
    "thought_level": "thought level",
    "adaptive_thinking": "adaptive thinking",
    "thinking_budget": "thinking with a budget",
    "thinking_off": "turning thinking off",
    "thinking_display": "asking for the text of thoughts",
    "effort": "effort",
    "images": "images",
    "system_role": "system messages",
    "developer_role": "developer messages",
}


def _describe_refusal(refusal: Refusal, today: date, *, is_own: bool) -> str:
    done = "Crow leaves this out of requests"
    if refusal.part.endswith("_wire"):
        done = "Crow uses another API of this endpoint"
    if refusal.limit is not None:
        done = f"Crow asks for at most {refusal.limit:,} output tokens"
    since = f" (since {refusal.learned_on})"
    day = _day_after(refusal.checked_on, refusal.patience)
    test = "with the next request" if refusal.is_due(today) else f"on {day}"
    scope = f", {_scope(refusal.times, is_own=is_own)}" if not refusal.part.endswith("_wire") else ""
    return f"{done}{since}{scope}, because of {refusal.source}. Crow tests this again {test}."


def _scope(times: int, *, is_own: bool) -> str:
    if times > 1:
        return f"for every session (seen {times} times)"
    return f"for {'this' if is_own else 'one'} session only (seen once)"


def _read(kind: type[_Fact], fact: object) -> _Fact | None:
    """Return a stored fact, or None if it has another format."""
    if not isinstance(fact, Mapping):
        return None
    known: dict[str, Any] = {each.name: fact[each.name] for each in fields(kind) if each.name in fact}
    for each in fields(kind):
        # This compares types because `isinstance` would accept a JSON `true` as an int.
        if each.name in known and type(known[each.name]).__name__.replace("NoneType", "None") not in str(each.type):
            return None
    try:
        return kind(**known)
    except TypeError:
        return None


def _day_after(day: str, days: int) -> str:
    try:
        return (date.fromisoformat(day) + timedelta(days=days)).isoformat()
    except (ValueError, OverflowError):
        return ""


def _is_past(day: str, days: int, today: date) -> bool:
    """Return whether `days` days have passed since `day`. The result is also True if `day` cannot be read, or if it
    lies in the future because a clock was wrong."""
    return not today.isoformat() < _day_after(day, days) or day > today.isoformat()


def refusals_for(refusals: Mapping[str, Refusal], session: str) -> Sequence[Refusal]:
    """Return the refusals that apply to this session, oldest first."""
    return [each for each in refusals.values() if each.applies_to(session)]

"""Checks the answers of hooks: each event accepts certain keys.

An error message continues a sentence that begins with the hook's name and ends with "and is skipped."
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from crow.agent import new_message_id
from crow.domain.entries import Custom
from crow.domain.messages import JsonObject
from crow.domain.text import shorten_end

_DENIAL_CHARS = 2_000
TEXT_CHARS = 20_000
"""A text from a hook is cut to this many characters."""

_MAX_ENTRIES = 20
_MAX_DEPTH = 64
"""The objects and lists of an answer may be nested at most this many levels deep."""

HookEvent: TypeAlias = Literal[
    "session_start",
    "before_prompt",
    "before_request",
    "before_tool",
    "after_tool",
    "before_compact",
    "after_compact",
    "turn_end",
]
EVENTS: tuple[HookEvent, ...] = get_args(HookEvent)

_ANYWHERE = frozenset({"context", "entries", "metadata"})

KEYS: Mapping[HookEvent, frozenset[str]] = {
    **dict.fromkeys(EVENTS, _ANYWHERE),
    "before_prompt": _ANYWHERE | {"deny"},
    "before_request": _ANYWHERE | {"deny"},
    "before_tool": _ANYWHERE | {"deny", "arguments"},
    "before_compact": _ANYWHERE | {"deny", "summary"},
    "turn_end": _ANYWHERE | {"prompt"},
}
"""The keys that a hook's answer may have, by event."""

_ENTRY_KEYS = frozenset({"namespace", "text", "show", "model", "data"})

_NAMESPACE = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookAnswer:
    """The answer of a hook."""

    deny: str = ""
    """The reason for a denial, or empty."""
    context: str = ""
    """Text for the model. For `before_compact`, text that is added to the instruction for the summary."""
    arguments: JsonObject | None = None
    """New arguments for the call, or None."""
    summary: str = ""
    """Used as the summary of a compaction, if it fits."""
    prompt: str = ""
    """One more prompt for the same turn."""
    entries: tuple[Custom, ...] = ()
    metadata: JsonObject = field(default_factory=dict)
    """Merged into the session's metadata. A null removes a member."""


def answer_from(value: object, event: HookEvent, namespace: str) -> tuple[HookAnswer, str]:
    """Check the JSON value that a hook of `event` answered. Return the answer, and a warning if parts of the value are
    ignored, otherwise an empty text. Entries without a namespace get `namespace`.

    :raises ValueError: the answer cannot be used.
    """
    value = _storable(value)
    if not isinstance(value, dict):
        raise ValueError(f"answered with {type(value).__name__} instead of an object")  # noqa: TRY004
    known, unknown = KEYS[event], ", ".join(sorted(map(str, value.keys() - KEYS[event])))
    problem = f"answered with unknown keys: {unknown}; {event} accepts {', '.join(sorted(known))}." if unknown else ""
    deny = value.get("deny") if "deny" in known else None
    if deny is True or (isinstance(deny, str) and deny.isspace()):
        deny = "it gave no reason"
    arguments = _typed(value, "arguments", dict, "an object") if "arguments" in known else None
    answer = HookAnswer(
        deny=shorten_end(_text_in({"deny": deny or None}, "deny").strip(), _DENIAL_CHARS),
        context=shorten_end(_text_in(value, "context"), TEXT_CHARS),
        arguments=arguments,
        summary=_text_in(value, "summary") if "summary" in known else "",
        prompt=shorten_end(_text_in(value, "prompt").strip(), TEXT_CHARS) if "prompt" in known else "",
        entries=_entries_in(value, namespace),
        metadata=_typed(value, "metadata", dict, "an object") or {},
    )
    return answer, problem


def _storable(value: object) -> object:
    """Return a JSON value with its lone surrogates replaced, because surrogates cannot be sent.

    :raises ValueError: the value is nested too deeply.
    """
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        level = [inner for one in level for inner in _children_of(one)]
        if not level:
            return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    raise ValueError(f"answered with more than {_MAX_DEPTH} levels of objects and lists")


def _children_of(value: object) -> Collection[object]:
    match value:
        case dict():
            return value.values()
        case list():
            return value
        case _:
            return ()


def _entries_in(value: Mapping[str, object], default_namespace: str) -> tuple[Custom, ...]:
    """Return the custom entries of an answer. :raises ValueError: the entries cannot be used."""
    given = _typed(value, "entries", list, "a list") or []
    if len(given) > _MAX_ENTRIES:
        raise ValueError(f"answered with {len(given)} entries instead of at most {_MAX_ENTRIES}")
    entries = []
    for each in given:
        if not isinstance(each, dict) or not each.keys() <= _ENTRY_KEYS:
            raise ValueError(
                f"answered with an entry that is not an object, or has keys other than {', '.join(sorted(_ENTRY_KEYS))}"
            )
        namespace = _text_in(each, "namespace") or default_namespace
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(
                f"answered with the namespace {namespace[:80]!r} instead of 1 to 64 characters of A-Z a-z 0-9 . _ : -"
            )
        entries.append(
            Custom(
                namespace=namespace,
                text=shorten_end(_text_in(each, "text"), TEXT_CHARS),
                is_shown=bool(_typed(each, "show", bool, "true or false")),
                for_model=bool(_typed(each, "model", bool, "true or false")),
                message_id=new_message_id(),
                data=_typed(each, "data", dict, "an object") or {},
            )
        )
    return tuple(entries)


def _typed(value: Mapping[str, object], key: str, kind: type, words: str) -> Any:
    """Return the value of a key, or None if there is no value. :raises ValueError: the value has another type than
    `kind`."""
    found = value.get(key)
    if found is not None and not isinstance(found, kind):
        raise ValueError(f"answered with {key} = {json.dumps(found, default=str):.80} instead of {words}")
    return found


def _text_in(value: Mapping[str, object], key: str) -> str:
    return _typed(value, key, str, "text") or ""

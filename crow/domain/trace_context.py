"""The W3C trace context that a client sends with a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar

_IDS = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(f"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(?:-[!-~]{{0,200}})?")
_HEADER_VALUE = re.compile("[!-~](?:[ -~]{0,8190}[!-~])?")

_current: ContextVar[Mapping[str, str]] = ContextVar("trace_context")


def trace_context_from(meta: Mapping[str, object]) -> dict[str, str]:
    """Return the valid texts among `traceparent`, `tracestate` and `baggage` in a `_meta` object.

    A text is left out if it cannot be the value of an HTTP header. A `tracestate` is left out if there is no
    `traceparent`.
    """
    found = {}
    for name, pattern in (("traceparent", _TRACEPARENT), ("tracestate", _HEADER_VALUE), ("baggage", _HEADER_VALUE)):
        value = meta.get(name)
        if isinstance(value, str) and pattern.fullmatch(value):
            found[name] = value
    if "traceparent" not in found:
        found.pop("tracestate", None)
    return found


def use_trace_context(context: Mapping[str, str]) -> None:
    """Set the trace context of the current task, and of the tasks that it starts after this call."""
    _current.set(context)


def current_trace_context() -> dict[str, str]:
    """Return the trace context of the work in progress. It is empty if the client sent none."""
    return dict(_current.get({}))

"""What OpenTelemetry's semantic conventions for generative AI, version 0.1.0, require of spans and metrics."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.support.collector import Got, got

__all__ = ["METRICS", "ledger_of", "problems_of", "read_otlp"]

INTERNAL, CLIENT = 1, 3

SPANS: Mapping[str, tuple[int, str, Mapping[str, type]]] = {
    "chat": (
        CLIENT,
        "gen_ai.request.model",
        {
            "gen_ai.operation.name": str,
            "gen_ai.provider.name": str,
            "gen_ai.request.model": str,
            "gen_ai.conversation.id": str,
            "gen_ai.request.stream": bool,
        },
    ),
    "execute_tool": (
        INTERNAL,
        "gen_ai.tool.name",
        {
            "gen_ai.operation.name": str,
            "gen_ai.tool.name": str,
            "gen_ai.tool.call.id": str,
            "gen_ai.tool.type": str,
        },
    ),
    "invoke_agent": (
        INTERNAL,
        "gen_ai.agent.name",
        {
            "gen_ai.operation.name": str,
            "gen_ai.provider.name": str,
            "gen_ai.agent.name": str,
            "gen_ai.conversation.id": str,
        },
    ),
}
"""The kind of each operation's span, the attribute that its name ends with, and the attributes that are required, or
required if they are known, as they always are here."""

METRICS: Mapping[str, set[str]] = {
    "gen_ai.client.inference.duration": {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"},
    **{
        f"gen_ai.client.inference.{kind}": {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}
        for kind in ("usage.input_tokens", "usage.output_tokens", "operation.input_tokens", "operation.output_tokens")
    },
    "gen_ai.execute_tool.duration": {"gen_ai.operation.name", "gen_ai.tool.name"},
    "gen_ai.invoke_agent.duration": {"gen_ai.operation.name", "gen_ai.agent.name"},
}
"""The attributes that each metric must have."""

CONTENT = {
    *("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions"),
    *("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
}
COUNTS = ("input_tokens", "output_tokens", "cache_read.input_tokens")


def problems_of(spans: Iterable[Got], *, has_content: bool = False) -> list[str]:
    """Return how spans differ from the conventions, and from what any trace promises."""
    spans = list(spans)
    found = [] if len({(span.trace, span.span) for span in spans}) == len(spans) else ["a span comes twice"]
    known = {(span.trace, span.span): span for span in spans}
    for span in spans:
        attributes = span.attributes
        operation = attributes.get("gen_ai.operation.name")
        if operation is not None:
            kind, target, required = SPANS[operation]
            if (span.kind, span.name) != (kind, f"{operation} {attributes.get(target)}"):
                found.append(f"{span.name} has the kind {span.kind}")
            found += [
                f"{span.name} lacks {name}" for name, of in required.items() if not isinstance(attributes.get(name), of)
            ]
        if ("server.address" in attributes) != ("server.port" in attributes):
            found.append(f"{span.name} has half an address")
        if span.is_error != ("error.type" in attributes):
            found.append(f"{span.name} has an error without a type")
        if "__" in span.name and attributes.get("mcp.method.name") != "tools/call":
            found.append(f"{span.name} lacks the method of MCP")
        if not has_content and CONTENT & attributes.keys():
            found.append(f"{span.name} has content")
        if not 0 < span.start <= span.end:
            found.append(f"{span.name} ends before it begins")
        if span.parent and (span.trace, span.parent) not in known:
            found.append(f"{span.name} has no parent: {span}")
    return found


def ledger_of(spans: Iterable[Got]) -> tuple[int, ...]:
    """Return the sums of the tokens."""
    return tuple(sum(span.attributes.get(f"gen_ai.usage.{name}", 0) for span in spans) for name in COUNTS)


def read_otlp(lines: Iterable[bytes]) -> list[Got]:
    """Return the spans in lines of OTLP's JSON, read by its own definition. Only ids differ from the JSON of Protocol
    Buffers: they are hexadecimal."""
    spans = []
    for line in lines:
        found = json_format.ParseDict(_with_base64(json.loads(line)), TracesData())
        spans += [got(span) for each in found.resource_spans for scope in each.scope_spans for span in scope.spans]
    return spans


def _with_base64(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _base64(one) if key.endswith("Id") else _with_base64(one) for key, one in value.items()}
    return [_with_base64(one) for one in value] if isinstance(value, list) else value


def _base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()

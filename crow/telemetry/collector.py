"""Sends spans and metrics with OpenTelemetry's SDK, over OTLP with HTTP."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from crow.telemetry.spans import Redact, Span, spans_of
from crow.telemetry.turns import AGENT, Turn
from crow.version import __version__

_SPANS = 2_048
"""The number of spans that are kept while the collector fails."""
_RETRY_S = 30.0

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))
_DIMENSIONS = (
    *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.address", "server.port"),
    *("gen_ai.agent.name", "gen_ai.tool.name", "mcp.method.name", "error.type"),
)
"""The attributes of a span that its metrics have, too."""
_USAGE = (
    *("input_tokens", "output_tokens", "cache_read.input_tokens", "cache_write.input_tokens"),
    "reasoning.output_tokens",
)
_DURATIONS = {
    "chat": "gen_ai.client.inference.duration",
    "execute_tool": "gen_ai.execute_tool.duration",
    "invoke_agent": "gen_ai.invoke_agent.duration",
}


class OtlpCollector:
    """A collector that speaks OTLP over HTTP. `endpoint` is its base URL. If `endpoint` is empty, the SDK's `OTEL_*`
    variables name the collector. The SDK's other variables always apply."""

    def __init__(self, endpoint: str = "") -> None:
        base = endpoint.rstrip("/")
        self._session = _Session()
        self._ids = _Ids()
        self._finished = _Finished()
        self._retry_at = 0.0
        """Nothing is sent before this time of the monotonic clock, in seconds."""
        known = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({"service.version": __version__} | ({} if known else {"service.name": AGENT}))
        self._exporter = OTLPSpanExporter(f"{base}/v1/traces" if base else None, session=self._session)
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(self._finished)
        self._tracer = self._provider.get_tracer("crow", __version__)
        exporter = OTLPMetricExporter(f"{base}/v1/metrics" if base else None, session=self._session)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        self._meters = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._metrics = _Metrics(self._meters)

    @property
    def is_failing(self) -> bool:
        """See `Collector`."""
        return self._session.is_failing

    def send(self, turn: Turn, redact: Redact | None) -> None:
        """See `Collector`. After a failure, nothing is sent for some time."""
        spans = spans_of(turn, redact)
        for span in spans:
            self._metrics.record(span)
        if spans and self._is_sampled(turn, spans[0]):
            for span in spans:
                self._record(span)
        if time.monotonic() < self._retry_at:
            return
        if self._finished.spans:
            self._exporter.export(tuple(self._finished.spans))
            if not self.is_failing:
                self._finished.spans.clear()
        if not self.is_failing:
            self._meters.force_flush()
        self._retry_at = time.monotonic() + _RETRY_S if self.is_failing else 0.0

    def _is_sampled(self, turn: Turn, first: Span) -> bool:
        """Return whether the SDK's sampler keeps the turn's trace. The client may have begun this trace."""
        parent = None if turn.is_sampled is None else _context(turn.trace_id, turn.span_id, is_sampled=turn.is_sampled)
        sampling = self._provider.sampler.should_sample(
            parent, turn.trace_id, first.name, attributes=dict(first.attributes)
        )
        return sampling.decision is not Decision.DROP

    def _record(self, span: Span) -> None:
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        recorded = self._tracer.start_span(
            span.name,
            None if span.parent_id is None else _context(span.trace_id, span.parent_id, is_sampled=True),
            SpanKind.CLIENT if span.is_client else SpanKind.INTERNAL,
            dict(span.attributes),
            start_time=span.start_ms * 1_000_000,
        )
        if span.error:
            recorded.set_status(Status(StatusCode.ERROR))
        recorded.end(span.end_ms * 1_000_000)


def _context(trace_id: int, span_id: int, *, is_sampled: bool) -> Any:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)))


class _Metrics:
    """The metrics that the semantic conventions define."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("crow", __version__)
        self._durations = {
            name: meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=_SECONDS)
            for name in (*_DURATIONS.values(), "mcp.client.operation.duration")
        }
        self._totals = {
            kind: meter.create_counter(f"gen_ai.client.inference.usage.{kind}", "{token}") for kind in _USAGE
        }
        self._sizes = {
            kind: meter.create_histogram(
                f"gen_ai.client.inference.operation.{kind}", "{token}", explicit_bucket_boundaries_advisory=_TOKENS
            )
            for kind in ("input_tokens", "output_tokens")
        }

    def record(self, span: Span) -> None:
        """Add a span to the metrics. Estimated tokens do not count."""
        found, seconds = span.attributes, (span.end_ms - span.start_ms) / 1000
        dimensions = {name: found[name] for name in _DIMENSIONS if name in found}
        duration = _DURATIONS.get(str(found.get("gen_ai.operation.name")))
        if duration:
            own = {name: value for name, value in dimensions.items() if name != "mcp.method.name"}
            self._durations[duration].record(seconds, own)
        if "mcp.method.name" in found:
            self._durations["mcp.client.operation.duration"].record(seconds, dimensions)
        if span.is_client and not found.get("crow.usage.is_estimated"):
            self._record_tokens(found, dimensions)

    def _record_tokens(self, found: Mapping[str, object], dimensions: Mapping[str, Any]) -> None:
        for kind in _USAGE:
            if isinstance(count := found.get(f"gen_ai.usage.{kind}"), int):
                self._totals[kind].add(count, dimensions)
                if kind in self._sizes:
                    self._sizes[kind].record(count, dimensions)


class _Ids(IdGenerator):
    """Gives each span the ids that were computed from the log."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id

    def is_trace_id_random(self) -> bool:
        return True  # a digest is as evenly distributed as a random number


class _Finished(SpanProcessor):
    """Keeps the spans that are still to be sent, but not too many."""

    def __init__(self) -> None:
        self.spans: deque[ReadableSpan] = deque(maxlen=_SPANS)

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Session(requests.Session):
    """Never reads the body of a response, because the body might never end. Remembers whether the last request
    failed."""

    is_failing = False

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request, and return a response with only the status and the headers."""
        options |= {"stream": True, "allow_redirects": False}
        known = requests.Response()
        try:
            with super().send(request, **options) as answer:
                known.status_code, known.reason, known.headers = answer.status_code, answer.reason, answer.headers
        except BaseException:
            self.is_failing = True
            raise
        self.is_failing = not 200 <= known.status_code < 300
        return known

"""A collector for OpenTelemetry that keeps what it gets, or behaves badly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

__all__ = ["Collector", "Got", "endless", "refuse", "start_collector"]

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass(frozen=True, kw_only=True)
class Got:
    """A span. Its ids are hexadecimal, and times are in nanoseconds."""

    name: str
    kind: int
    trace: str
    span: str
    parent: str
    start: int
    end: int
    is_error: bool
    attributes: Mapping[str, Any]


@dataclass(kw_only=True)
class Collector:
    """What was sent to a collector."""

    url: str
    spans: list[Got] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """The sum of each metric, over all its attributes, as it was sent last."""
    points: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """The attributes of each metric's points."""
    resource: dict[str, Any] = field(default_factory=dict)
    asked: int = 0
    """The number of requests."""
    news: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until something is true. Call this in a thread."""
        with self.news:
            return self.news.wait_for(condition, 120)

    def take(self, path: str, body: bytes) -> None:
        """Keep a request."""
        with self.news:
            self.asked += 1
            if path.endswith("traces"):
                for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resource = values(each.resource.attributes)
                    self.spans += [got(span) for scope in each.scope_spans for span in scope.spans]
            else:
                self.metrics, self.points = {}, {}
                for batch in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for metric in (metric for scope in batch.scope_metrics for metric in scope.metrics):
                        points = list(metric.sum.data_points) or list(metric.histogram.data_points)
                        sums = (getattr(point, "sum", 0) or getattr(point, "as_int", 0) for point in points)
                        self.metrics[metric.name] = sum(sums)
                        self.points[metric.name] = [values(point.attributes) for point in points]
            self.news.notify_all()


def got(span: Any) -> Got:
    return Got(
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        is_error=span.status.code == 2,
        attributes=values(span.attributes),
    )


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in attributes}


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind) if kind else None
    return tuple(value_of(one) for one in value.array_value.values) if kind == "array_value" else found


def refuse(status: int, headers: Sequence[tuple[str, str]] = ()) -> Answer:
    """Answer with a status."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in (*headers, ("Content-Length", "0")):
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Answer with a body that never ends."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 65_536)


@contextmanager
def start_collector(answer: Answer | None = None, port: int = 0) -> Iterator[Collector]:
    """Start a collector. It answers with `answer`, after it has kept the request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            with suppress(OSError):
                (answer or refuse(200))(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector = Collector(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""The server's metrics, in the text format of Prometheus."""

from __future__ import annotations

import inspect
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, cast

from crow.domain.entries import NewEntry, TurnEnd
from crow.domain.errors import StoreError
from crow.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""The upper bounds of the buckets in a histogram of store latencies, in seconds."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
_Labels: TypeAlias = tuple[tuple[str, str], ...]


class MetricFamily:
    """A metric with all its samples. No two samples have the same labels."""

    def __init__(self, name: str, kind: Kind, words: str) -> None:
        self.name = name
        self.kind = kind
        self.words = words
        self.samples: dict[_Labels, float] = defaultdict(float)

    def add(self, amount: float = 1.0, /, **labels: str) -> None:
        """Add `amount` to the sample with these labels."""
        self.samples[tuple(labels.items())] += amount

    def lines(self) -> Iterable[str]:
        """Yield the lines of this metric in the text format."""
        yield f"# HELP {self.name} {self.words}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples.items():
            yield _sample(self.name, labels, value)


class Histogram(MetricFamily):
    """A histogram of durations in seconds."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(name, "histogram", words)
        self._counts: dict[_Labels, list[int]] = {}
        self._sums: dict[_Labels, float] = defaultdict(float)

    def observe(self, seconds: float, /, **labels: str) -> None:
        """Add one duration."""
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(_BUCKETS_S) + 1))
        counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self._sums[key] += seconds

    def lines(self) -> Iterable[str]:
        """See `MetricFamily`."""
        yield from super().lines()
        for key, counts in self._counts.items():
            total = 0
            for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), counts, strict=True):
                total += count
                yield _sample(f"{self.name}_bucket", (*key, ("le", bound)), total)
            yield _sample(f"{self.name}_sum", key, self._sums[key])
            yield _sample(f"{self.name}_count", key, total)


class Metrics:
    """The counters and histograms that the server updates as it works."""

    def __init__(self) -> None:
        self.connections = MetricFamily(
            "crow_connections_total", "counter", "WebSocket connections that were accepted."
        )
        self.refused = MetricFamily("crow_refused_total", "counter", "Connections that were refused, by reason.")
        self.ended = MetricFamily("crow_disconnects_total", "counter", "WebSocket connections that ended, by reason.")
        self.requests = MetricFamily("crow_requests_total", "counter", "Requests of clients, by method.")
        self.turns_started = MetricFamily("crow_turns_started_total", "counter", "Turns that were started.")
        self.turns_ended = MetricFamily("crow_turns_ended_total", "counter", "Turns that ended, by stop reason.")
        self.tokens = MetricFamily("crow_tokens_total", "counter", "Tokens of model requests; input includes cached.")
        self.cost = MetricFamily("crow_cost_usd_total", "counter", "Cost of model requests with known prices.")
        self.store = Histogram("crow_store_seconds", "Time of the store's operations, by method.")
        self.store_errors = MetricFamily(
            "crow_store_errors_total", "counter", "Store operations that failed, by method."
        )

    def render(self, gauges: Iterable[MetricFamily]) -> str:
        """Return all metrics, followed by `gauges`, in Prometheus' text format."""
        families = (*(each for each in vars(self).values() if isinstance(each, MetricFamily)), *gauges)
        return "\n".join(line for family in families for line in family.lines()) + "\n"

    def note_entries(self, entries: Iterable[NewEntry]) -> None:
        """Add the tokens, costs and ended turns in these stored entries to the counters."""
        for entry in entries:
            if isinstance(entry.body, TurnEnd):
                self.turns_ended.add(stop=entry.body.stop)
            if entry.usage is not None:
                self.tokens.add(entry.usage.input_tokens or 0, kind="input")
                self.tokens.add(entry.usage.cached_tokens or 0, kind="cached")
                self.tokens.add(entry.usage.output_tokens or 0, kind="output")
            if entry.cost is not None:
                self.cost.add(entry.cost)


class _MeteredStore:
    """Wraps a store, and measures how long each of its methods takes."""

    def __init__(self, inner: Store, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(value):
            return value
        measured = self._measured(name, value)
        setattr(self, name, measured)
        return measured

    def _measured(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        metrics = self._metrics

        async def measured(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                result = await call(*args, **options)
            except StoreError:
                metrics.store_errors.add(method=name)
                raise
            finally:
                metrics.store.observe(time.perf_counter() - started, method=name)
            if name == "append":
                metrics.note_entries(options["entries"])
            elif name == "take_turn":
                metrics.turns_started.add()
            return result

        return measured


def metered(store: Store, metrics: Metrics) -> Store:
    """Return the store wrapped in a `_MeteredStore`."""
    return cast(Store, _MeteredStore(store, metrics))


def gauge(name: str, words: str, value: float, /, **labels: str) -> MetricFamily:
    """Return a gauge with one sample."""
    family = MetricFamily(name, "gauge", words)
    family.add(value, **labels)
    return family


def process_metrics() -> Iterable[MetricFamily]:
    """Yield CPU time, memory and open files of this process, under Prometheus' usual names.

    Memory and open files are known on Linux only.
    """
    cpu = MetricFamily("process_cpu_seconds_total", "counter", "CPU time of this process.")
    cpu.add(time.process_time())
    yield cpu
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        files = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    yield gauge("process_resident_memory_bytes", "Resident memory.", pages * os.sysconf("SC_PAGE_SIZE"))
    yield gauge("process_open_fds", "Open file descriptors.", files)


def _sample(name: str, labels: _Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    number = str(int(value)) if value == int(value) else repr(float(value))
    return f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

"""What operators read: the text of the metrics, and the lines of the log."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from crow.domain.entries import NewEntry, Remark, TurnEnd
from crow.domain.errors import StoreError
from crow.domain.messages import Usage
from crow.domain.trace_context import use_trace_context
from crow.log import log_as_json, mask_in_log, start_logging
from crow.serve.listen import is_known_host, is_known_origin
from crow.serve.metrics import Histogram, MetricFamily, Metrics, gauge, metered
from crow.store.sqlite.store import SqliteStore
from tests.support.fork_server import run_script
from tests.support.server import ServerProcess, server_environment

SAMPLE = re.compile(r'[a-z_]+(\{[a-z]+="([^"\\\n]|\\[\\n"])*"(,[a-z]+="([^"\\\n]|\\[\\n"])*")*\})? [0-9.e+-]+')


async def test_every_line_of_the_metrics_can_be_parsed_and_every_metric_is_explained(server: ServerProcess) -> None:
    response = await server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text.endswith("\n")
    explained: set[str] = set()
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in {"counter", "gauge", "histogram"}
            assert name not in explained
            assert name.endswith("_total") == (kind == "counter")
            explained.add(name)
        elif not line.startswith("# HELP "):
            assert SAMPLE.fullmatch(line), line
            assert re.sub(r"(_bucket|_sum|_count)?[{ ].*", "", line) in explained


def test_labels_are_escaped() -> None:
    assert list(gauge("x", "Words.", 0.5, name='a"b\\c\nd').lines()) == [
        "# HELP x Words.",
        "# TYPE x gauge",
        'x{name="a\\"b\\\\c\\nd"} 0.5',
    ]


def test_a_histogram_counts_in_all_larger_buckets() -> None:
    times = Histogram("t", "Words.")
    for seconds in (0.0005, 0.002, 30.0):
        times.observe(seconds, method="append")
    lines = list(times.lines())
    assert 't_bucket{method="append",le="0.0005"} 1' in lines
    assert 't_bucket{method="append",le="0.0025"} 2' in lines
    assert 't_bucket{method="append",le="5.0"} 2' in lines
    assert lines[-3:] == [
        't_bucket{method="append",le="+Inf"} 3',
        't_sum{method="append"} 30.0025',
        't_count{method="append"} 3',
    ]


def test_usage_and_the_ends_of_turns_are_counted() -> None:
    metrics = Metrics()
    usage = Usage(input_tokens=100, cached_tokens=90, output_tokens=None)
    metrics.note_entries(
        [
            NewEntry(body=TurnEnd(stop="end_turn"), usage=usage, cost=0.25),
            NewEntry(body=Remark(text="", message_id="m")),
        ]
    )
    assert dict(metrics.tokens.samples) == {
        (("kind", "input"),): 100,
        (("kind", "cached"),): 90,
        (("kind", "output"),): 0,
    }
    assert metrics.cost.samples == {(): 0.25}
    assert metrics.turns_ended.samples == {(("stop", "end_turn"),): 1}


async def test_calls_of_the_store_are_measured_also_if_they_fail(tmp_path: Path) -> None:
    metrics = Metrics()
    store = metered(await SqliteStore.open(tmp_path / "crow.db"), metrics)
    assert await store.session_by_alias("x") is None
    assert store.warning == ""
    await store.close()
    with pytest.raises(StoreError):
        await store.session_by_alias("x")
    lines = list(metrics.store.lines())
    assert 'crow_store_seconds_count{method="session_by_alias"} 2' in lines
    assert metrics.store_errors.samples == {(("method", "session_by_alias"),): 1}


def test_the_log_is_json_without_secrets_and_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "serve.log"
    log_as_json(file, "info", ["sk-first-secret"])
    logger = logging.getLogger("crow.serve.test")
    use_trace_context({"traceparent": "00-11-22-01"})
    try:
        logger.info("It has %d words", 2, extra={"address": "10.0.0.1", "key": "sk-first-secret", "count": 3})
        start_logging(tmp_path / "crow.log", "warning", ["sk-second-secret"])  # as when the settings change
        mask_in_log(["sk-third-secret"])
        logger.info("Not logged any more")
        try:
            raise ValueError("sk-second-secret\nsk-third-secret")
        except ValueError:
            logger.exception("It failed")
    finally:
        use_trace_context({})
    first, second = map(json.loads, file.read_text().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "crow.serve.test",
        "message": "It has 2 words",
        "address": "10.0.0.1",
        "key": "…",
        "count": 3,
        "traceparent": "00-11-22-01",
    }
    assert second["message"] == "It failed"
    assert "ValueError: …\n…" in second["traceback"]
    assert not (tmp_path / "crow.log").exists()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "header",
    [
        *("localhost", "localhost:1", "LOCALHOST.", "127.0.0.1:7431", "[::1]:7431", "[::1]", "[::ffff:127.0.0.1]:1"),
        *("[fe80::1%25eth0]:7431", "Crow.Example:7431", "crow.example."),
    ],
)
def test_addresses_localhost_and_listed_names_are_known_hosts(header: str) -> None:
    assert is_known_host([header], frozenset({"crow.example"}))


@pytest.mark.parametrize(
    "headers",
    [
        *([], ["localhost", "localhost"], ["localhost", "evil.example"], [""], [":"], [":1"], ["."], ["[]"], ["["]),
        *(["evil"], ["evil:7431"], ["127.0.0.1.evil:1"], ["1:2:3"], ["a]:1"], ["::1"], ["::1]"], ["[::1"], ["[::1]]"]),
        *(["[::1].evil.example"], ["[::1].evil.example:1"], ["[::1]evil"], ["[::1]:1:2"], ["[::1]:x"], ["[::1] "]),
        *(["[localhost]"], ["[127.0.0.1]"], ["[crow.example]"], ["[::1%]"], ["[::1%@evil]"], ["[v1.x]"]),
        *(["localhost:"], ["localhost:65536"], ["localhost:1x"], ["localhost:+1"], ["localhost:1 "], [" localhost"]),
        *(["localhost.."], ["localhost.evil.example"], ["evil.example/localhost"], ["evil.example@localhost"]),
        *(["localhost@evil.example"], ["localhost#"], ["localhost?"], ["localhost\\evil"], ["localhost,evil.example"]),
        *(
            ["localhost\t"],
            ["local\u017fost"],
            ["ｌocalhost"],
            ["127.1"],
            ["2130706433"],
            ["0x7f.0.0.1"],
            ["0177.0.0.1"],
        ),
        *(
            ["0177.0.0.1"],
            ["127.0.0.1%00.evil"],
            ["127.0.0.1%eth0"],
            ["１27.0.0.1"],
            ["crow.example.evil"],
            ["xcrow.example"],
        ),
    ],
)
def test_all_other_hosts_are_unknown(headers: list[str]) -> None:
    assert not is_known_host(headers, frozenset({"crow.example"}))


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        ([], True),
        (["https://chat.example"], True),
        (["HTTPS://Chat.Example"], True),
        (["https://chat.example", "https://chat.example"], False),
        (["https://chat.example", "https://evil.example"], False),
        *(([each], False) for each in ("", "null", "https://chat.example/", "https://chat.example.evil.example")),
        *(([each], False) for each in ("http://chat.example", "https://chat.example:8443", "https://x.chat.example")),
        *(([each], False) for each in ("https://chat.example https://evil.example", "https://evil@chat.example")),
    ],
)
def test_an_origin_is_known_only_as_it_is_listed(headers: list[str], is_known: bool) -> None:
    assert is_known_origin(headers, frozenset({"https://chat.example"})) is is_known


def test_a_family_without_samples_is_still_explained() -> None:
    assert list(MetricFamily("x_total", "counter", "Words.").lines()) == [
        "# HELP x_total Words.",
        "# TYPE x_total counter",
    ]


WITHOUT_WEBSOCKETS = """
import sys
for name in list(sys.modules):
    if name.startswith(("crow.serve", "websockets")):
        del sys.modules[name]
sys.modules["websockets"] = None
from crow.cli import main
sys.exit(main(["serve"]))
"""


def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path) -> None:
    done = run_script(WITHOUT_WEBSOCKETS, env=server_environment(tmp_path), check=False)
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "crow: crow serve needs the package websockets, which is not installed. In a clone of crow, run: "
        "pipx install --force '.[serve]'\n"
    )

"""The exporter, in this process."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import replace

import anyio
import anyio.to_thread
import pytest

from crow.domain.entries import Body, TurnEnd
from crow.domain.messages import ToolCall
from crow.telemetry import collector as module
from crow.telemetry import live
from crow.telemetry.collector import OtlpCollector
from crow.telemetry.live import Sender
from crow.telemetry.spans import Redact
from crow.telemetry.turns import Turn, Turns
from tests.support.collector import refuse, start_collector
from tests.support.paths import result_of, said, user
from tests.telemetry.test_spans import stored


def turn(number: int = 1, answers: int = 1) -> Turn:
    bodies: list[tuple[int, Body]] = [
        (1, user("Look.")),
        *[(2, said("Twigs."))] * answers,
        (3, TurnEnd(stop="end_turn")),
    ]
    (done,) = Turns().add(stored(*bodies, session=f"s{number}"))
    return done


def test_what_could_not_be_sent_is_sent_with_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    with start_collector(refuse(400)) as down:
        sender = OtlpCollector(down.url)
        sender.send(turn(1), None)
    assert sender.is_failing
    with start_collector(port=int(down.url.rpartition(":")[2])) as back:
        sender.send(turn(2), None)
    assert not sender.is_failing
    assert {span.attributes["gen_ai.conversation.id"] for span in back.spans} == {"s1", "s2"}
    assert back.metrics["gen_ai.invoke_agent.duration"] == pytest.approx(0.004)


def test_a_collector_that_fails_is_left_alone_for_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_collector() as down:
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # less than the first pause before a second try
    sender = OtlpCollector(down.url)
    sender.send(turn(1), None)
    with start_collector(port=int(down.url.rpartition(":")[2])) as back:
        for number in range(5):
            sender.send(turn(number), None)
    assert sender.is_failing
    assert back.asked == 0


def test_only_so_many_spans_and_turns_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    monkeypatch.setattr(module, "_SPANS", 10)
    with start_collector(refuse(400)) as down:
        sender = OtlpCollector(down.url)
        sender.send(turn(1, answers=50), None)
    with start_collector(port=int(down.url.rpartition(":")[2])) as back:
        sender.send(turn(2), None)
    assert len(back.spans) == 10
    assert back.spans[-1].attributes["gen_ai.conversation.id"] == "s2"


@pytest.mark.long
def test_an_hour_without_a_collector_costs_nothing_but_the_traces() -> None:
    """No prompt waits, memory does not grow, and the metrics stay exact."""
    with start_collector() as down:
        pass
    turns, sizes = [turn(number, answers=30) for number in range(120)], list[int]()
    collector = OtlpCollector(down.url)
    tracemalloc.start()
    for each in turns:
        collector.send(each, None)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[80:]) - max(sizes[:80]) < 500_000, "once 2,048 spans wait, nothing grows"
    with start_collector(port=int(down.url.rpartition(":")[2])) as back:
        collector._retry_at = 0.0  # half a minute has passed
        collector.send(turn(120), None)
    assert len(back.spans) == module._SPANS
    assert back.spans[-1].attributes["gen_ai.conversation.id"] == "s120"
    assert back.metrics["gen_ai.invoke_agent.duration"] == pytest.approx(0.002 * 121)


async def test_no_turn_waits_for_a_collector_that_hangs() -> None:
    taken, hangs = list[Turn](), threading.Event()

    class Hanging:
        is_failing = True

        def send(self, turn: Turn, redact: Redact | None) -> None:
            taken.append(turn)
            hangs.wait(60)

    sender = Sender(Hanging, None)
    for number in range(3_600):
        sender.put(turn(number))  # returns at once, although the first turn is still being sent
    assert len(taken) <= 1
    hangs.set()
    with anyio.fail_after(60):
        while len(taken) < live._TURNS:  # noqa: ASYNC110  # another thread takes them
            await anyio.sleep(0.01)
    await sender.close()
    assert len(taken) <= live._TURNS + 1, "the others were dropped"


@pytest.mark.long
def test_the_variables_of_the_sdk_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "nest")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        OtlpCollector().send(turn(), None)
        assert collector.spans == []
        assert collector.metrics["gen_ai.invoke_agent.duration"] == pytest.approx(0.002)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        sender = OtlpCollector()
        for number in range(100):
            sender.send(turn(number), None)
        assert len(collector.spans) == 200, "a ratio of 1 takes all"
        assert collector.resource["service.name"] == "nest"
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
        del collector.spans[:]
        sender = OtlpCollector()
        for number in range(100):
            sender.send(turn(number), None)
        whole = {span.trace for span in collector.spans if span.name == "invoke_agent crow"}
        assert {span.trace for span in collector.spans} == whole
        assert len(collector.spans) == 2 * len(whole)
        assert 20 < len(whole) < 80


async def test_half_a_character_and_a_broken_turn_cost_no_other_turn() -> None:
    def connect() -> OtlpCollector:
        return OtlpCollector(collector.url)

    call = ToolCall(id="\ud800", name="nest\ud800__tool", arguments='{"path": "\ud800"}')
    strange: list[tuple[int, Body]] = [(1, user("\ud800")), (2, replace(said("\ud800"), calls=(call,)))]
    result = result_of(2, text="\ud800", name=call.name)
    bodies: list[tuple[int, Body]] = [*strange, (3, result), (4, TurnEnd(stop="end_turn"))]
    (done,) = Turns().add(stored(*bodies))
    with start_collector() as collector:
        sender = Sender(connect, str)
        sender.put(replace(turn(1), entries=[]))
        sender.put(done)
        sender.put(turn(2))
        await anyio.to_thread.run_sync(lambda: collector.wait_for(lambda: len(collector.spans) == 5))
        await sender.close()
    assert [span.name for span in collector.spans][2] == "execute_tool nest?__tool"


async def test_a_thread_that_fails_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    def connect() -> OtlpCollector:
        raise ImportError("No module named 'opentelemetry'")

    sender = Sender(connect, None)
    for number in range(200):
        sender.put(turn(number))
    await sender.close()
    assert "No more traces are sent" in caplog.text

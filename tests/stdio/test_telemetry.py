"""Real processes send traces to a collector, and lose nothing else if it fails."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from crow.cli import main
from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess
from tests.support.collector import Answer, Collector, Got, endless, refuse, start_collector
from tests.support.conventions import METRICS, ledger_of, problems_of, read_otlp
from tests.support.fake_endpoint import HANG, FakeEndpoint, Reply

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
SECRET = "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56"


def configure(home: Path, url: str, *, enabled: str = "true", more: str = "") -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[telemetry]\nenabled = {enabled}\nendpoint = "{url}"\n{more}')


def answers(endpoint: FakeEndpoint) -> None:
    """The model reads a file, then says what is in it."""
    counted = {"choices": [], "usage": USAGE}
    function = {"name": "read_file", "arguments": '{"path": "README.md"}'}
    call = fake.chunk({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]})
    endpoint.script(
        Reply(steps=(fake.sse(call, fake.chunk(finish="tool_calls"), counted),)),
        Reply(steps=(fake.sse(fake.chunk({"content": f"Twigs {SECRET}."}), fake.chunk(finish="stop"), counted),)),
    )


async def prompt(agent: CrowProcess, place: Path) -> str:
    """Run a turn in a new session, and return its id."""
    await agent.initialize()
    session = await agent.new_session(place)
    await agent.prompt(session, "What is in the nest?")
    return session


async def wait_for(collector: Collector, operation: str) -> None:
    def has_come() -> bool:
        return bool(collector.metrics) and any(span.name.startswith(operation) for span in collector.spans)

    assert await anyio.to_thread.run_sync(lambda: collector.wait_for(has_come))


async def test_a_turn_is_sent_with_spans_and_metrics_after_the_conventions(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    with start_collector() as collector:
        configure(home, collector.url)
        async with crow(endpoint=endpoint, env={"OTEL_RESOURCE_ATTRIBUTES": "team=nest"}) as agent:
            answers(endpoint)
            session = await prompt(agent, place)
            await wait_for(collector, "invoke_agent")
        spans, points = collector.spans, collector.points
    assert [span.name for span in spans] == [
        "invoke_agent crow",
        "chat fake-model",
        "execute_tool read_file",
        "chat fake-model",
    ]
    assert problems_of(spans) == []
    assert ledger_of(spans) == (200, 14, 80)
    assert {span.attributes["gen_ai.conversation.id"] for span in spans} == {session}
    assert collector.resource.items() >= {"service.name": "crow", "team": "nest"}.items()
    for name, required in METRICS.items():
        assert all(required <= point.keys() for point in points[name]), name
        assert points[name], name
    assert collector.metrics["gen_ai.client.inference.usage.input_tokens"] == 200
    assert collector.metrics["gen_ai.client.inference.usage.cache_read.input_tokens"] == 80
    assert SECRET not in repr(spans)
    assert await exported(home, session, home / "traces.jsonl") == spans, "an export has the same spans"


async def exported(home: Path, session: str, path: Path) -> list[Got]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROW_HOME", str(home))
        arguments = ["sessions", "export", session, "--format", "otlp", "-o", str(path)]
        assert await anyio.to_thread.run_sync(main, arguments) == 0
    return read_otlp((await anyio.Path(path).read_bytes()).splitlines())


async def test_content_is_sent_only_if_the_user_wants_it_and_without_secrets(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    with start_collector() as collector:
        configure(home, collector.url, more="content = true\n")
        async with crow(endpoint=endpoint) as agent:
            answers(endpoint)
            await prompt(agent, place)
            await wait_for(collector, "invoke_agent")
        first, _, tool, last = (span.attributes for span in collector.spans)
    assert json.loads(first["gen_ai.input.messages"])[0]["parts"][0]["content"] == "What is in the nest?"
    assert json.loads(last["gen_ai.output.messages"])[0]["parts"][0]["content"] == "Twigs [hidden]."
    assert tool["gen_ai.tool.call.arguments"] == '{"path": "README.md"}'
    assert "Twigs and string." in tool["gen_ai.tool.call.result"]


@pytest.mark.long
@pytest.mark.parametrize(("flags", "sent"), [("01", True), ("00", False)])
async def test_a_turn_joins_the_trace_of_the_client_unless_that_is_not_recorded(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, flags: str, sent: bool
) -> None:
    with start_collector() as collector:
        configure(home, collector.url)
        async with crow(endpoint=endpoint) as agent:
            answers(endpoint)
            await agent.initialize()
            session = await agent.new_session(place)
            text = [{"type": "text", "text": "What is in the nest?"}]
            meta = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-{flags}"}
            await agent.request("session/prompt", {"sessionId": session, "prompt": text, "_meta": meta})
            assert await anyio.to_thread.run_sync(lambda: collector.wait_for(lambda: bool(collector.metrics)))
    assert bool(collector.spans) == sent
    if sent:
        assert {span.trace for span in collector.spans} == {"ab" * 16}
        assert collector.spans[0].parent == "cd" * 8


BAD: Sequence[tuple[str, Answer]] = [
    ("endless", endless),
    ("broken", refuse(500)),
    ("busy", refuse(503, [("Retry-After", "3600")])),
    ("elsewhere", refuse(307, [("Location", "http://127.0.0.1:9/v1/traces")])),
]


@pytest.mark.long
@pytest.mark.parametrize("answer", [answer for _, answer in BAD], ids=[name for name, _ in BAD])
async def test_a_collector_that_misbehaves_costs_only_traces(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, answer: Answer
) -> None:
    """The exit does not wait for it, stderr stays empty, and nobody follows it elsewhere."""
    with start_collector(answer) as collector:
        configure(home, collector.url)
        async with crow(endpoint=endpoint) as agent:
            answers(endpoint)
            session = await prompt(agent, place)
            assert await anyio.to_thread.run_sync(lambda: collector.wait_for(lambda: bool(collector.spans)))
            answers(endpoint)
            await agent.prompt(session, "And now?")
            assert agent.text(session).endswith(f"Twigs {SECRET}.")


async def test_a_collector_that_never_answers_does_not_hold_a_process_back(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        configure(home, f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with crow(endpoint=endpoint, env={"OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}) as agent:
            answers(endpoint)
            await prompt(agent, place)
            accepted, _ = await anyio.to_thread.run_sync(silent.accept)
            assert await agent.close_stdin_and_wait() == 0
            accepted.close()


async def test_a_collector_that_is_down_costs_only_traces(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    with start_collector() as collector:
        pass
    configure(home, collector.url)
    async with crow(endpoint=endpoint) as agent:
        answers(endpoint)
        session = await prompt(agent, place)
        for _ in range(3):
            answers(endpoint)
            await agent.prompt(session, "Again.")
        assert await agent.close_stdin_and_wait() == 0
    assert agent.stderr == b""
    assert problems_of(later := await exported(home, session, home / "traces.jsonl")) == []
    assert [span.name for span in later].count("invoke_agent crow") == 4, "the log has them all"


async def test_a_killed_process_loses_only_the_turn_that_ran(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    with start_collector() as collector:
        configure(home, collector.url)
        async with crow(endpoint=endpoint) as agent:
            answers(endpoint)
            session = await prompt(agent, place)
            await wait_for(collector, "invoke_agent")
            endpoint.script(Reply(steps=(fake.sse(fake.chunk({"content": "It is "}), done=False), HANG)))
            since = len(agent.log)
            await agent.start_prompt(session, "And what else?")
            await agent.wait_for_text(session, "It is ", since=since)
            await agent.kill()
        before = len(collector.spans)
        async with crow(endpoint=endpoint) as agent:
            answers(endpoint)
            await agent.initialize()
            await agent.request("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
            await agent.prompt(session, "Go on.")
            await wait_for(collector, "invoke_agent")
            assert await anyio.to_thread.run_sync(lambda: collector.wait_for(lambda: len(collector.spans) > before))
    assert before == 4
    assert [span.is_error for span in collector.spans] == [False] * 8, "nothing is said about the turn that was lost"
    later = await exported(home, session, home / "traces.jsonl")
    assert problems_of(later) == []
    (lost,) = (span for span in later if span.attributes.get("crow.turn.stop") == "interrupted")
    assert lost.attributes["error.type"] == "interrupted"


async def test_nothing_is_imported_unless_the_user_asks_for_traces(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    """Forked processes have imported the few modules that an export needs. `tests/guards/test_imports.py` names what no
    process imports when it starts."""
    imported = home / "imported"
    code = f"""
import atexit, sys
before = set(sys.modules)
atexit.register(lambda: open({str(imported)!r}, "w").write(" ".join(set(sys.modules) - before)))
"""
    for enabled in ("false", "true"):
        configure(home, "http://127.0.0.1:9", enabled=enabled)
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
        async with crow(endpoint=endpoint, before=code, env=env) as agent:
            answers(endpoint)
            await prompt(agent, place)
        names = ("crow.telemetry", "google", "opentelemetry.exporter", "opentelemetry.sdk", "requests")
        found = [name for name in (await anyio.Path(imported).read_text()).split() if name.startswith(names)]
        assert bool(found) == (enabled == "true"), found

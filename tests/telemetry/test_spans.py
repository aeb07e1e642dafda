"""Single turns as spans."""

from __future__ import annotations

import json
from dataclasses import replace

from crow.domain.entries import (
    Assistant,
    Body,
    Entry,
    ModelRequest,
    Prompt,
    Started,
    TurnEnd,
    User,
)
from crow.domain.messages import SentRequest, Text, ToolCall, Usage
from crow.export.redact import redactor
from crow.store import SessionRow
from crow.telemetry.spans import Span, provider_at, spans_of
from crow.telemetry.turns import Turns, id_of_call
from tests.support.paths import result_of, said, user

SENT = SentRequest(digest="d", size=1, endpoint="https://api.anthropic.com/v1 claude-sonnet-5", limit=900)


def stored(*bodies: tuple[int, Body], session: str = "s", first: int = 1, **more: object) -> list[Entry]:
    """Entries of one turn. Each body comes with its time in ms."""
    return [
        Entry(id=first + at, conversation=1, session=session, parent=None, turn=1, body=body, created_ms=made, **more)  # type: ignore[arg-type]
        for at, (made, body) in enumerate(bodies)
    ]


def traced(entries: list[Entry], traceparent: str = "") -> list[Span]:
    """The spans of a turn whose entries were stored one by one."""
    turns = Turns()
    done = [turn for entry in entries for turn in turns.add([entry], traceparent)]
    return [span for turn in (*done, *turns.rest()) for span in spans_of(turn)]


def times(spans: list[Span]) -> list[tuple[str, int, int]]:
    return [(span.name, span.start_ms, span.end_ms) for span in spans]


def test_a_turn_has_the_times_of_its_entries() -> None:
    answer = replace(said("", "c1"), sent=SENT, wire="messages")
    entries = stored(
        (1_000, user("Look.")),
        (1_010, Prompt(system="s", tools=(), cwd="/w", model="m")),
        (1_500, ModelRequest(purpose="answer", sent=SENT)),
        (1_500, answer),
        (1_900, Started(call=result_of(4).call, why="allow once by the user")),
        (2_400, result_of(4, duration_ms=450)),
        (3_000, replace(said("Twigs."), sent=SENT)),
        (3_005, TurnEnd(stop="end_turn")),
        (4_000, ModelRequest(purpose="title", sent=SENT)),
    )
    assert times(traced(entries)) == [
        ("invoke_agent crow", 1_000, 3_005),
        ("chat claude-sonnet-5", 1_010, 1_500),  # an attempt that failed: the answer's span covers it, too
        ("chat claude-sonnet-5", 1_010, 1_500),
        ("execute_tool read_file", 1_950, 2_400),  # without the time of the question
        ("chat claude-sonnet-5", 2_400, 3_000),
        ("chat claude-sonnet-5", 3_005, 4_000),
    ]


def test_a_killed_turn_ends_at_the_last_known_time() -> None:
    """Its end is stored when the session is next opened, which may be days later."""
    later = 86_400_000
    entries = stored(
        (1_000, user("Look.")),
        (2_000, said("", "c1")),
        (2_100, Started(call=result_of(2).call, why="mode auto")),
        (later, said("It is", finish="interrupted")),
        (later, TurnEnd(stop="interrupted")),
    )
    found = traced(entries)
    assert times(found) == [
        ("invoke_agent crow", 1_000, 2_100),
        ("chat unknown", 1_000, 2_000),
        ("chat unknown", 2_100, 2_100),
        ("execute_tool read_file", 2_100, 2_100),
    ]
    assert [span.error for span in found] == ["interrupted", "", "interrupted", "interrupted"]


def test_a_request_has_what_the_log_knows_of_it() -> None:
    usage = Usage(input_tokens=100, output_tokens=20, cached_tokens=60, cache_write_tokens=7, reasoning_tokens=5)
    (entry,) = stored((2_000, replace(said("Twigs."), sent=SENT, wire="messages")), usage=usage, cost=0.5)
    (span,) = traced([entry])
    assert span.is_client
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "claude-sonnet-5",
        "gen_ai.conversation.id": "s",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 900,
        "server.address": "api.anthropic.com",
        "server.port": 443,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 60,
        "gen_ai.usage.cache_write.input_tokens": 7,
        "gen_ai.usage.reasoning.output_tokens": 5,
        "crow.cost": 0.5,
        "gen_ai.response.finish_reasons": ("stop",),
    }


def test_a_turn_belongs_to_the_trace_of_the_client() -> None:
    (span,) = traced(stored((1, user("Look."))), f"00-{'ab' * 16}-{'cd' * 8}-01")
    assert (f"{span.trace_id:x}", f"{span.parent_id:x}") == ("ab" * 16, "cd" * 8)
    (span,) = traced(stored((1, user("Look."))), "00-nonsense")
    assert span.parent_id is None


def test_a_subagent_belongs_to_the_call_that_it_carries_out() -> None:
    """Also if it ends first, in the background, or is continued."""
    turns, kinds = Turns(), {"agent": {"name": "scout", "instructions": "Look."}}
    place = {"conversation": 1, "leaf": None, "cwd": "/w", "model": "m", "mode": "ask"}
    turns.know(SessionRow(id="task-1", parent_id="s", config=kinds, **place))  # type: ignore[arg-type]
    background = {"raw_output": {"task": "task-1", "background": True}, "name": "task"}
    own = stored((1, user("Look.")), (2, said("", "c1", "c2")), first=1)
    other = stored((3, user("Look.")), (4, TurnEnd(stop="end_turn")), session="task-1", first=3)
    assert turns.add(own) == []
    assert turns.add(other) == [], "the call is not known yet"
    first, *_ = turns.add(stored((5, result_of(2, name="task", raw_output={"task": "task-1"})), first=5))
    assert (first.agent, first.parent_id) == ("scout", _id_of(2, 0))
    turns.add(stored((6, result_of(2, 1, **background)), first=6))  # type: ignore[arg-type]
    again = [replace(entry, turn=2) for entry in stored((7, user("Go on.")), session="task-1", first=7)]
    turns.add(again)
    (ended,) = turns.add(stored((8, TurnEnd(stop="end_turn")), first=8))
    end = [replace(one, turn=2) for one in stored((9, TurnEnd(stop="end_turn")), session="task-1", first=9)]
    (second,) = turns.add(end)
    assert second.parent_id == _id_of(2, 1)
    assert first.trace_id == second.trace_id == ended.trace_id


def _id_of(answer: int, index: int) -> int:
    return id_of_call(result_of(answer, index).call)


def test_content_is_there_if_asked_for_and_masked() -> None:
    secret = "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56"
    call = ToolCall(id="c1", name="read_file", arguments=json.dumps({"path": "/home/anna/x", "key": secret}))
    said = f"It is {secret}. " * 3_000  # much shorter when masked
    answer = Assistant(text=said, message_id="m", thought="Hm.", calls=(call,), finish="tool_calls")
    long = "moss " * 9_999 + secret  # the cut is in the middle of the secret
    entries = stored(
        (1, User(parts=(Text(text=f"Use {secret}, anna@example.org"),), message_id="m")),
        (2, answer),
        (3, result_of(2, 0, long)),
    )
    turns = Turns()
    turns.add(entries)
    found = spans_of(turns.rest()[0], redactor((), is_strict=True))
    text = json.dumps([dict(span.attributes) for span in found])
    for hidden in ("sk-proj", "anna"):
        assert hidden not in text
    asked = json.loads(str(found[0].attributes["gen_ai.input.messages"]))
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": "Use [hidden], [hidden]"}]}]
    (said_,) = json.loads(str(found[1].attributes["gen_ai.output.messages"]))
    assert [part["type"] for part in said_["parts"]] == ["reasoning", "text", "tool_call"]
    assert said_["finish_reason"] == "tool_call"


def test_providers_have_the_names_of_the_conventions() -> None:
    assert {
        url: provider_at(url)
        for url in (
            "https://nest.openai.azure.com/openai/v1",
            "https://bedrock-mantle.eu-west-1.api.aws/v1",
            "https://europe-west1-aiplatform.googleapis.com/v1",
            "https://api.anthropic.com.example.org/v1",
            "http://[broken",
        )
    } == {
        "https://nest.openai.azure.com/openai/v1": "azure.ai.openai",
        "https://bedrock-mantle.eu-west-1.api.aws/v1": "aws.bedrock",
        "https://europe-west1-aiplatform.googleapis.com/v1": "gcp.vertex_ai",
        "https://api.anthropic.com.example.org/v1": "",
        "http://[broken": "",
    }

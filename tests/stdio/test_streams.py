"""Streams of many models and servers through the real process: shown, stored and replayed."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_compaction import configure
from tests.stdio.test_turns import opened
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import CUT, FakeEndpoint, Gate, Recorded, Reply

ARGUMENTS = '{"path": "README.md"}'
CALL = f'{{"name": "read_file", "arguments": {ARGUMENTS}}}'
FORMS = {
    "Hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "Qwen-Coder": "<tool_call>\n<function=read_file>\n<parameter=path>\nREADME.md\n</parameter>\n</function>\n"
    "</tool_call>",
    "Llama": f"<|python_tag|>{CALL}<|eom_id|>",
    "Llama in Python": '<|python_start|>[read_file(path="README.md")]<|python_end|>',
    "Mistral": f"[TOOL_CALLS]read_file[ARGS]{ARGUMENTS}</s>",
    "DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Harmony": f"<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
}
WHOLE = {"bare JSON": CALL, "fenced JSON": f"```json\n{CALL}\n```", "bare Python": '[read_file(path="README.md")]'}

MOST_MB = 300
WORDS = "The nest is built of twigs and string. "


def streamed(text: str, *, field: str = "content") -> Iterator[bytes]:
    """The text in small deltas, one HTTP chunk each."""
    for at in range(0, len(text), 4):
        yield fake.sse(fake.chunk({field: text[at : at + 4]}), done=False)


def answer(text: str, *, thought: str = "") -> Reply:
    end = fake.sse(fake.chunk(finish="stop"), fake.usage())
    return Reply(steps=(*streamed(thought, field="reasoning_content"), *streamed(text), end))


def stored(home: Path, session: str, column: str = "content") -> list[str]:
    """The session's stored answers, oldest first."""
    query = f"SELECT {column} FROM messages WHERE role = 'assistant' AND session = ? ORDER BY id"
    with contextlib.closing(sqlite3.connect(f"{(home / 'crow.db').as_uri()}?mode=ro", uri=True)) as connection:
        return [text or "" for (text,) in connection.execute(query, (session,))]


def stored_kinds(home: Path, session: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"{(home / 'crow.db').as_uri()}?mode=ro", uri=True)) as connection:
        return [kind for (kind,) in connection.execute("SELECT kind FROM entries WHERE session = ?", (session,))]


def stored_arguments(home: Path, session: str) -> list[object]:
    """The arguments of the session's stored calls, oldest first."""
    query = "SELECT args FROM tool_calls WHERE session = ? ORDER BY assistant"
    with contextlib.closing(sqlite3.connect(f"{(home / 'crow.db').as_uri()}?mode=ro", uri=True)) as connection:
        return [json.loads(text) for (text,) in connection.execute(query, (session,))]


def peak_mb(agent: CrowProcess) -> float:
    """Peak memory of the process."""
    status = Path(f"/proc/{agent.pid}/status").read_text("ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


async def replayed_texts(agent: CrowProcess, session: str, place: Path) -> tuple[str, str]:
    """Text and thoughts of a replay."""
    since = len(agent.log)
    await agent.load_session(session, place)
    return agent.text(session, since=since), agent.text(session, "agent_thought_chunk", since=since)


async def test_calls_written_as_text_are_hidden_and_shown_text_equals_stored_and_replayed_text(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        for form, call in (FORMS | WHOLE).items():
            words = "I look at `it` first.\n" if form in FORMS else ""
            endpoint.script(answer(words + call, thought="Where is it?\n"), answer("Twigs and string."))
            session = await agent.new_session(place)
            await agent.prompt(session, "Read it.")
            shown, thought = agent.text(session), agent.text(session, "agent_thought_chunk")
            assert (form, shown, thought) == (form, f"{words}Twigs and string.", "Where is it?\n")
            assert agent.updates(session, "tool_call_update")[-1]["status"] == "completed"
            asked, result = endpoint.asked[-1].body["messages"][-2:]
            assert (asked.get("content") or "", result["role"]) == (words, "tool")
            assert ("".join(stored(home, session)), "".join(stored(home, session, "thought"))) == (shown, thought)
            assert await replayed_texts(agent, session, place) == (shown, thought)


async def test_text_that_only_looks_like_a_call_or_thought_stays_text(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        for text in (
            f"<tool_call>{CALL}</tool_call>\nis what it writes.",
            f"Like this:\n```\n<tool_call>{CALL}</tool_call>\n```",
            '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "read_file", "argu',
            '{"name": "read_file", "version": 2}',
            "Let me see.\n</think>\n\nFour.",
        ):
            endpoint.script(answer(text), answer("Again."))
            session = await agent.new_session(place)
            await agent.prompt(session, "How does Hermes write a call?")
            assert agent.text(session) == text
            assert agent.updates(session, "tool_call") == []
            await agent.prompt(session, "Again.")
            assert endpoint.asked[-1].body["messages"][-2]["content"] == text
            assert stored(home, session) == [text, "Again."]
            assert await replayed_texts(agent, session, place) == (f"{text}Again.", "")


async def test_half_a_call_of_a_broken_stream_is_dropped_and_made_again(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    half = f"I look.\n{FORMS['Hermes']}"[:-20]
    endpoint.script(Reply(steps=(*streamed(half), CUT)), answer(FORMS["Hermes"]), answer("Twigs."))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "Read it.")
        shown = agent.text(session)
        assert [update["status"] for update in agent.updates(session, "tool_call_update")][-1] == "completed"
    assert shown == "I look.\nTwigs."
    assert stored(home, session) == ["I look.\n", "", "Twigs."]


async def test_cancel_while_text_is_held_back_keeps_only_what_was_shown(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(Reply(steps=(*streamed("I look.\n<tool_call>\n{"), gate)))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        prompt = await agent.start_prompt(session, "Read it.")
        await gate.reached()
        await agent.wait_for_text(session, "I look.\n")
        await agent.notify("session/cancel", {"sessionId": session})
        assert (await prompt.result())["stopReason"] == "cancelled"
        assert agent.text(session) == "I look.\n"
    assert stored(home, session) == ["I look.\n"]


def endless(kind: str) -> Iterator[bytes]:
    """A stream without an end."""
    starts: dict[str, bytes] = {
        "a line": b'data: {"choices":[{"delta":{"content":"',
        "a call in text": fake.sse(fake.chunk({"content": '<tool_call>{"name": "read_file", "x": "'}), done=False),
    }
    many = "".join(f"{number}. {WORDS}" for number in range(100))
    call = {"index": 0, "id": "a", "function": {"name": "write_file", "arguments": many}}
    deltas: dict[str, dict[str, Any]] = {
        "thought": {"reasoning_content": many},
        "arguments": {"tool_calls": [call]},
        "wide text": {"content": "".join(f"{number}. 鳥の巣は小枝でできている。😀" for number in range(150))},
        "one passage": {"content": WORDS},
    }
    yield fake.sse(fake.chunk({"content": WORDS}), done=False)
    yield starts.get(kind, b"")
    piece = WORDS.encode() * 500 if kind == "a line" else None
    delta = deltas.get(kind, {"content": many})
    yield from itertools.repeat(piece or fake.sse(fake.chunk(delta), done=False))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["text", "wide text", "one passage", "thought", "arguments", "a line", "a call in text"]
)
async def test_an_endless_answer_is_stopped_with_a_message_and_its_text_kept(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, kind: str
) -> None:
    endpoint.script(Reply(steps=endless(kind)))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "Count the twigs.")
        shown, thought = agent.text(session), agent.text(session, "agent_thought_chunk")
        assert len(endpoint.asked) == 1
        assert ("".join(stored(home, session)), "".join(stored(home, session, "thought"))) == (shown, thought)
        assert (await agent.prompt(session, "And now?"))["stopReason"] == "end_turn"
        assert peak_mb(agent) <= MOST_MB
        assert (await replayed_texts(agent, session, place))[0].startswith(shown)
    words = {
        "a line": "sent more than 8,388,608 bytes as one event",
        "one passage": f"characters repeat the same {len(WORDS)} characters",
    }
    assert words.get(kind, "was cut off after 4,000,000 characters") in raised.value.message
    assert shown.startswith(WORDS)
    assert len(shown + thought) <= 4_000_000
    assert (home / "crow.db").stat().st_size < 64_000_000


@pytest.mark.long
@pytest.mark.parametrize("form", ["arguments", "text"])
async def test_a_call_with_900_kilobytes_of_arguments_runs_whole_and_is_sent_back_short(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, form: str
) -> None:
    configure(home, 32_000)
    content = WORDS * (900_000 // len(WORDS))
    arguments = json.dumps({"path": "long.txt", "content": content})
    cuts = [arguments[at : at + 40] for at in range(0, len(arguments), 40)]
    if form == "arguments":
        head = {"index": 0, "id": "a", "function": {"name": "write_file", "arguments": ""}}
        deltas: list[dict[str, Any]] = [{"tool_calls": [head]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": cut}}]} for cut in cuts]
    else:
        deltas = [{"content": piece} for piece in ('{"name": "write_file", "arguments": ', *cuts, "}")]
    chunks = tuple(fake.sse(fake.chunk(delta), done=False) for delta in deltas)

    def huge(request: Recorded) -> Reply:
        counted = {"choices": [], "usage": {"prompt_tokens": len(request.raw) // 4, "completion_tokens": 225_000}}
        return Reply(steps=(chunks, fake.sse(fake.chunk(finish="stop"), counted)))

    endpoint.script(huge, huge, huge, answer("Written."))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        assert (await agent.prompt(session, "Write it."))["stopReason"] == "end_turn"
        assert agent.updates(session, "tool_call_update")[-1]["status"] == "completed"
        assert "twigs" not in agent.text(session)
    assert (place / "long.txt").read_text("utf-8") == content
    assert not {"checkpoint", "mask"} & set(stored_kinds(home, session))
    assert stored_arguments(home, session) == [{"path": "long.txt", "content": content}] * 3
    (sent,) = endpoint.asked[1].body["messages"][-2]["tool_calls"]
    shown = json.loads(sent["function"]["arguments"])
    head, _, rest = shown["content"].partition("\n[... ")
    note, _, tail = rest.partition(" ...]\n")
    assert shown["path"] == "long.txt"
    assert content.startswith(head)
    assert content.endswith(tail)
    assert 8_000 < len(head) + len(tail) < 32_000
    left_out = len(content) - len(head) - len(tail)
    assert note.startswith(f"{left_out} of {len(content)} characters are left out here; recall with entry ")

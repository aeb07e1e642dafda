"""Calls as weak models make them, files that cannot be read, and loops, in the real process."""

from __future__ import annotations

import os
from pathlib import Path

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Reply

DEEP = '{"path": ' + "[" * 600 + "]" * 600 + "}"
TAKES = "Expected a JSON object with path (string)"
READ = "one"
CALLS: tuple[tuple[str, str, str], ...] = (
    # what arrives: the tool, the text of its arguments, and words of the result
    ("read_file", '{"path": "a.txt"', f"the arguments break off; send the whole JSON object again. {TAKES}"),
    ("read_file", "{'path': 'a.txt', 'line': None}", READ),
    ("read_file", "{'path': 'it's a.txt'}", f"send one JSON object. {TAKES}"),
    ("read_file", '{"path": "a.txt",}', READ),
    ("read_file", '"{\\"path\\": \\"a.txt\\"}"', READ),
    ("read_file", '```json\n{"path": "a.txt"}\n```', READ),
    ("read_file", '["a.txt"]', TAKES),
    ("read_file", "a.txt", TAKES),
    ("read_file", "", "path is missing"),
    ("read_file", DEEP, "nested too deeply"),
    ("read_file", '{"path": "a.txt", "line": "2", "limit": null}', "[lines 2-2 of 2]\ntwo"),
    ("read_file", '{"path": "a.txt", "line": "second"}', "expected a whole number"),
    ("read_file", '{"path": "a.txt", "line": "--5"}', "expected a whole number"),
    ("read_file", '{"path": 7}', "path is 7"),
    ("read_file", '{"path": "a\\u0000b"}', "expected the path of a file"),
    ("read_file", '{"path": "a.txt", "explanation": "to see it"}', READ),
    ("Read", '{"file_path": "a.txt"}', READ),
    ("str_replace_editor", '{"command": "view", "path": "a.txt"}', READ),
    ("bash", '{"command": "echo nest"}', "nest"),
    ("launch_rocket", "{}", "launch_rocket"),
    ("read_file", '{"path": "binary"}', "is binary"),
    ("read_file", '{"path": "latin"}', "Grüße"),
    ("read_file", '{"path": "src"}', "is a directory"),
    ("read_file", '{"path": "gone"}', "does not exist"),
    ("read_file", '{"path": "loop"}', "loop"),
    ("read_file", '{"path": "pipe"}', "expected a file"),
    ("edit_file", '{"path": "a.txt", "old_text": "two", "new_text": "2", "all": "false"}', "Edited a.txt"),
)


def answer_with(*named: tuple[str, str]) -> Reply:
    """An answer with calls whose arguments are sent as they are. All have the same id."""
    fragments = [
        {"index": index, "id": "same", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(named)
    ]
    chunks = [fake.chunk({"tool_calls": [fragment]}) for fragment in fragments]
    return Reply(steps=(fake.sse(*chunks, fake.chunk(finish="tool_calls"), fake.usage()),))


def fill(place: Path) -> None:
    (place / "a.txt").write_text("one\ntwo\n")
    (place / "binary").write_bytes(bytes(range(256)) * 8)
    (place / "latin").write_bytes("Grüße\n".encode("latin-1"))
    (place / "src").mkdir()
    (place / "gone").symlink_to(place / "nowhere")
    (place / "loop").symlink_to(place / "loop")
    os.mkfifo(place / "pipe")


async def test_every_malformed_call_gets_a_result_that_says_what_works(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    fill(place)
    endpoint.script(answer_with(*((name, given) for name, given, _ in CALLS)), fake.text("I see."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert await agent.prompt(session, "go") == {"stopReason": "end_turn"}
    sent = endpoint.asked[-1].body["messages"]
    results = [message["content"] for message in sent if message["role"] == "tool"]
    assert len(results) == len(CALLS)
    unlike = {
        f"{name} {given[:80]}": result[:300]
        for (name, given, words), result in zip(CALLS, results, strict=True)
        if words not in result
    }
    assert not unlike, "\n".join(map(str, unlike.items()))
    ids = [call["id"] for message in sent if message["role"] == "assistant" for call in message["tool_calls"]]
    assert len(set(ids)) == len(CALLS)
    assert (place / "a.txt").read_text() == "one\n2\n"


async def test_a_model_that_repeats_a_call_is_told_and_then_stopped(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    endpoint.answer_with(fake.calls(("read_file", {"path": "gone"})))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        shown = agent.text(session)
    assert "Stopped: read_file was called" in shown
    assert len(endpoint.asked) == 30
    told = str(endpoint.asked[-1].body["messages"])
    assert told.count("You have called read_file") == 3

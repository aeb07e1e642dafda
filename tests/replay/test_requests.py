"""Requests that are built again, and what is said about those that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.conversation import Projection
from crow.domain.entries import Assistant, Body, CallRef, Checkpoint, Entry, Prompt, Reminder, ToolResult, User
from crow.domain.messages import JsonObject, SentRequest, Text, ToolCall, ToolSpec, WireName
from crow.llm.dialect import Dialect
from crow.llm.sent import first_difference, read_dialect, sent_request
from crow.replay.requests import LoggedRequest, Rebuilder, request_of
from crow.version import __version__
from tests.store.scenes import ANNOUNCED

ENDPOINT = "http://127.0.0.1:1/v1 m1"
WORDS = "Twigs and string. " * 40
TOOL = ToolSpec(name="read_file", description="Reads.", input_schema={"type": "object"})
PROMPT = Prompt(system="Build a nest.", tools=(TOOL,), cwd="/repo", model="m1", recorded_here=True)
PATH: tuple[Body, ...] = (
    PROMPT,
    User(parts=(Text(text=f"First {WORDS}"),), message_id="u1"),
    Assistant(text=f"Second {WORDS}", message_id="a1", calls=(ToolCall(id="c1", name="read_file", arguments="{}"),)),
    ToolResult(call=CallRef(assistant=3, index=0), name="read_file", text=f"Third {WORDS}", announcement=ANNOUNCED),
    Reminder(text=f"Fourth {WORDS}"),
)
SUMMARY = Checkpoint(compaction_id="k1", summary=f"Fifth {WORDS}", first_kept=None)


def logged(bodies: tuple[Body, ...], sent: SentRequest | None = None) -> LoggedRequest:
    """The request after these entries."""
    entries = [
        Entry(id=number, conversation=1, session="s1", parent=number - 1 or None, turn=1, body=body)
        for number, body in enumerate(bodies, 1)
    ]
    projection = Projection(entries)
    answer = replace(entries[-1], id=len(entries) + 1, body=Assistant(text="Done.", message_id="a9", sent=sent))
    return LoggedRequest(entry=answer, context=projection.context(), projection=projection)


def sent_of(bodies: tuple[Body, ...], dialect: Dialect) -> SentRequest:
    """How the request after these entries was sent."""
    one = logged(bodies)
    plain = SentRequest(digest="", size=0, endpoint=ENDPOINT)
    body = Rebuilder().body(one, plain, dialect)
    assert body is not None
    return sent_request(body, request_of(one, None), endpoint=ENDPOINT, dialect=dialect, limit=None)


def changed(number: int) -> tuple[Body, ...]:
    """The path, with another text in this entry."""
    body = PATH[number - 1]
    match body:
        case Prompt():
            other: Body = replace(body, system="Build a next.")
        case User():
            other = replace(body, parts=(Text(text=f"Frist {WORDS}"),))
        case Assistant() | ToolResult() | Reminder():
            other = replace(body, text=body.text.replace("d ", "t ", 1).replace("Four", "Foul"))
        case _:
            raise AssertionError(body)
    return (*PATH[: number - 1], other, *PATH[number:])


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (2, "a prompt, with the text that crow joined to it (entry 2)"),
        (3, "an answer, with those of its calls, thoughts and opaque members that are sent back (entry 3)"),
        (4, "the result of read_file (entry 4)"),
        (5, "text that crow added for the model (entry 5)"),
    ],
)
def test_the_first_difference_is_named_with_its_rule(wire: WireName, number: int, words: str) -> None:
    sent = sent_of(changed(number), Dialect(wires=(wire,)))
    assert Rebuilder().replay(logged(changed(number), sent)).outcome == "identical"
    found = Rebuilder().replay(logged(PATH, sent))
    assert found.outcome == "different"
    assert words in found.words, found.words
    assert found.words.endswith("sent by this version of crow)")


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_what_comes_first_is_named(wire: WireName) -> None:
    short = (PATH[0], User(parts=(Text(text="Hello."),), message_id="u1"))
    prompt = Prompt(system=f"Build another nest. {WORDS}", tools=(TOOL,), cwd="/repo", model="m1")
    sent = sent_of((prompt, short[1]), Dialect(wires=(wire,)))
    words = Rebuilder().replay(logged(short, sent)).words
    assert "message 1 of 2 differs: the system message (the newest prompt entry)" in words
    sent = sent_of((replace(prompt, tools=()), short[1]), Dialect(wires=(wire,)))
    words = Rebuilder().replay(logged((prompt, short[1]), sent)).words
    assert "the model, the options or the tools differ; they come before the messages" in words


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_a_tool_that_became_shorter_is_not_taken_for_a_message(wire: WireName) -> None:
    prompt = replace(PROMPT, system=WORDS, tools=(TOOL, replace(TOOL, name="grep", description=WORDS)))
    short = replace(prompt, tools=(TOOL, replace(TOOL, name="grep", description=WORDS[:-100])))
    user = User(parts=(Text(text="Hello."),), message_id="u1")
    words = Rebuilder().replay(logged((short, user), sent_of((prompt, user), Dialect(wires=(wire,))))).words
    assert "tools" in words


def test_the_message_is_named_although_the_system_message_has_a_cache_mark() -> None:
    system = PROMPT.system + WORDS * 20
    path, other = ((replace(PROMPT, system=system), *bodies[1:]) for bodies in (PATH, changed(4)))
    words = Rebuilder().replay(logged(path, sent_of(other, Dialect(wires=("messages",))))).words
    assert "the result of read_file (entry 4)" in words


@pytest.mark.parametrize("marks_failures", [False, True])
def test_a_request_with_a_failed_result_is_the_same_whether_or_not_failures_were_marked(marks_failures: bool) -> None:
    result = PATH[3]
    assert isinstance(result, ToolResult)
    path = (*PATH[:3], replace(result, is_error=True))
    sent = sent_of(path, Dialect(wires=("messages",), marks_failures=marks_failures))
    assert ("marks_failures" in sent.dialect) == marks_failures
    assert Rebuilder().replay(logged(path, sent)).outcome == "identical"
    other = sent_of(path, Dialect(wires=("messages",), marks_failures=not marks_failures))
    assert other.digest != sent.digest


def test_a_compaction_is_named_as_the_rule() -> None:
    sent = sent_of((*PATH, replace(SUMMARY, summary=f"Other {WORDS}")), Dialect())
    found = Rebuilder().replay(logged((*PATH, SUMMARY), sent))
    assert "message 2 of 2 differs: the summary of a compaction (entry 6)" in found.words


def test_another_version_of_crow_is_named() -> None:
    sent = replace(sent_of(changed(5), Dialect()), version="0.0.1")
    assert "sent by crow 0.0.1)" in Rebuilder().replay(logged(PATH, sent)).words
    assert sent_of(PATH, Dialect()).version == __version__


def test_the_log_says_why_a_request_is_not_compared() -> None:
    def why(sent: SentRequest | None, bodies: tuple[Body, ...] = PATH) -> str:
        found = Rebuilder().replay(logged(bodies, sent))
        assert found.outcome == "unproven"
        return found.words

    sent = sent_of(PATH, Dialect())
    imported = (replace(PROMPT, recorded_here=False), *PATH[1:])
    assert "it was imported" in why(None, imported)
    assert "an older version" in why(None)
    assert "does not know" in why(replace(sent, dialect={"wires": ["telepathy"]}))
    assert "extra_body" in why(replace(sent, extra="0" * 32))
    assert Rebuilder(is_from_file=True).replay(logged(PATH, sent)).outcome == "unproven"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["chat", "opaque", "system"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    dialect=st.dictionaries(st.sampled_from([*Dialect.__dataclass_fields__, "other"]), JSON, max_size=4),
    size=st.integers(),
    checks=st.text(max_size=40),
    endpoint=st.text(max_size=20),
    limit=st.none() | st.integers(),
    level=st.text(max_size=6),
)
def test_a_hostile_record_is_compared_or_left_alone(
    dialect: JsonObject, size: int, checks: str, endpoint: str, limit: int | None, level: str
) -> None:
    sent = SentRequest(
        digest="f" * 32, size=size, checks=checks, endpoint=endpoint, dialect=dialect, limit=limit, thought_level=level
    )
    assert Rebuilder().replay(logged(PATH, sent)).outcome in ("different", "unproven")


@given(st.binary(max_size=3_000), st.integers(0, 3_000), st.binary(min_size=1, max_size=50))
def test_the_range_of_a_difference_contains_it(body: bytes, at: int, other: bytes) -> None:
    at = min(at, len(body))
    new = body[:at] + other + body[at + len(other) :]
    sent = sent_request(body, request_of(logged(PATH), None), endpoint=ENDPOINT, dialect=Dialect(), limit=None)
    if new != body:
        first = next((n for n, (a, b) in enumerate(zip(body, new, strict=False)) if a != b), min(len(body), len(new)))
        start, end, _ = first_difference(sent, new)
        assert start <= first <= end


def test_every_dialect_that_is_stored_is_read_again() -> None:
    for dialect in (Dialect(), Dialect(wires=("messages", "chat"), limit_field=None, parallel_calls=False)):
        assert read_dialect(sent_of(PATH, dialect).dialect) == dialect
    refused = Dialect(wires=("responses",), left_out=frozenset({"images", "store"}), refused=("responses.store",))
    assert read_dialect(sent_of(PATH, refused).dialect) == refused

"""Tests of how tool calls in text are held back, and for how long."""

from __future__ import annotations

import json
import re
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from crow.domain.messages import ToolSpec
from crow.llm.call_forms import CLOSING, STARTS
from crow.llm.text_tool_calls import CallDetector
from tests.llm.streams import TOOLS
from tests.support.amounts import examples

ROOT = Path(__file__).parents[2]
TOKEN = re.compile(r"\s?\w{1,6}|\s+|[^\w\s]{1,3}")

HTML = """<!DOCTYPE html>
<html lang="en">
<head><title>Nests</title><style>body { margin: 0 }</style></head>
<body>
<table><tr><td>1</td><td>a &lt; b</td></tr></table>
<form action="/x"><input type="text" name="q"><button>Go</button></form>
<footer>The <i>end</i> of <s>all</s> <small>things</small></footer>
</body>
</html>
"""
XML = """<?xml version="1.0"?>
<project xmlns="urn:example:nests">
  <dependencies>
<dependency><groupId>twigs</groupId><artifactId>string</artifactId></dependency>
  </dependencies>
<parameters><parameter name="a">b</parameter></parameters>
</project>
"""
LISTS = (
    "- [ ] twigs\n- [x] string\n\nSee [the nest](nest.md), [T1] and [1], where a < b and b > c; List<int> too.\n" * 20
)
RECORDS = json.dumps([{"id": number, "name": "Ann", "type": "user", "tag": "a"} for number in range(50)], indent=1)


def detector() -> CallDetector:
    return CallDetector(TOOLS, new_id=lambda: "minted")


def of_project(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def fenced(label: str, code: str) -> str:
    return f"```{label}\n{code}\n```\n"


ANSWERS = {
    "prose and Markdown": of_project("docs/sessions.md"),
    "more prose": of_project("CHANGELOG.md"),
    "tables": of_project("BENCHMARKS.md"),
    "Python": of_project("crow/agent/turns/turn.py"),
    "JavaScript": of_project("tests/interop/sdk.mjs"),
    "fenced Python": fenced("python", of_project("crow/protocol/updates.py")),
    "fenced HTML": fenced("html", HTML * 20),
    "fenced XML": f"Like this:\n\n{fenced('xml', XML * 20)}",
    "fenced JSON": fenced("json", of_project("schemas/config.schema.json")),
    "JSON": of_project("schemas/config.schema.json"),
    "records": RECORDS,
}
BRACKETS = {"lists and links": LISTS, "HTML": HTML * 20, "XML": XML * 20, "TOML": of_project("pyproject.toml")}


def delays(pieces: list[str]) -> list[int]:
    """For each delayed character, how many pieces later than it came it was shown."""
    watched, came, late = detector(), [], []
    given = 0
    for number, piece in enumerate(pieces):
        came += [number] * len(piece)
        after = given + len(watched.feed(piece))
        late += [number - came[at] for at in range(given, after) if came[at] < number]
        given = after
    assert given == len(came)
    return late


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("cut", [list, TOKEN.findall], ids=["characters", "tokens"])
def test_ordinary_answers_are_hardly_delayed(name: str, cut: object) -> None:
    assert callable(cut)
    text = ANSWERS[name]
    late = delays(cut(text))
    assert len(late) <= max(40, len(text) * 0.002)
    assert max(late, default=0) <= 40


@pytest.mark.parametrize("name", BRACKETS)
def test_text_full_of_brackets_waits_at_most_a_few_pieces(name: str) -> None:
    text = BRACKETS[name]
    brackets = text.count("<") + text.count("[")
    for late in (delays(list(text)), delays(TOKEN.findall(text))):
        assert len(late) <= 1.5 * brackets
        assert max(late) <= 3


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("<tool_call> is the tag that Qwen writes.", ""),
        ("It writes <tool_call> around it.", ""),
        ("`<tool_call>{", ""),
        ("```\n<tool_call>{", ""),
        ("    <tool_call>{", ""),
        ("> <tool_call>{", ""),
        ("<tool_call>{'path': 1} is wrong.", ""),
        ('<tool_call>{"name": "list_files", "arguments": {}}</tool_call>\nis what it writes.', ""),
        ('<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>', ""),
        ("<function=rm_rf>\n<parameter=path>" + "twigs " * 40, ""),
        ("<function_name> is a tag of its own.", ""),
        ("a < b, a <= b, a[i] <| b", ""),
        ("[TODO] and [Tools]", ""),
        ("<|im_start|>user", ""),
        ('{"name": "crow", "version": "1.0"}', ""),
        ('{"name": "shell", "version": "1.0"}', ""),
        ('{"id": 7, "total": 3}', ""),
        ('[{"id": 7, "total": 3}]', ""),
        ("[list_of_things()]", ""),
        ("[link](nest.md)", ""),
        ("```json\n{\"total\": 3}", ""),
        ("```python\nprint(1)", ""),
        ("functional programs", ""),
        ("to be or not", ""),
        ("Now. <", "<"),
        ("Now.\n<tool_c", "<tool_c"),
        ("Now: <tool_call>", "<tool_call>"),
        ("Now.[TOOL_CALLS]read_file[ARGS]{", "[TOOL_CALLS]read_file[ARGS]{"),
        ('Now.\n<tool_call>{"name": "list_files"', '<tool_call>{"name": "list_files"'),
        ("\n\n<function=shell>\n<parameter=command>\nls", "\n\n<function=shell>\n<parameter=command>\nls"),
        ('{"name": "read_file", "arguments": {"path"', '{"name": "read_file", "arguments": {"path"'),
        ("[read_file(path=", "[read_file(path="),
        ("```json\n{\"name\": \"read_", "```json\n{\"name\": \"read_"),
        ("to=functions.read_file<|channel|>commentary", "to=functions.read_file<|channel|>commentary"),
    ],
)  # fmt: skip
def test_only_text_that_may_become_a_call_is_held(text: str, held: str) -> None:
    for pieces in ([text], list(text)):
        watched = detector()
        given = "".join(map(watched.feed, pieces))
        assert (given, watched.held) == (text.removesuffix(held), held)


def test_an_example_call_is_shown_once_the_answer_goes_on() -> None:
    call = json.dumps({"name": "write_file", "arguments": {"path": "x", "content": "twigs " * 1000}})
    example = f"<tool_call>{call}</tool_call>\n"
    watched, given = detector(), ""
    for piece in [*re.findall(r".{1,20}", example, re.DOTALL), *["And so on. "] * 600]:
        given += watched.feed(piece)
    assert given.startswith(example)
    assert watched.held == ""


def test_after_twenty_false_starts_nothing_is_held() -> None:
    watched = detector()
    given = "".join(watched.feed(f"<tool_call> no {number}\n") for number in range(20))
    assert watched.feed("<tool_call>{") == "<tool_call>{"
    assert given == "".join(f"<tool_call> no {number}\n" for number in range(20))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('Now.\n<tool_call>\n{"name": "write_file", "argu', "Now.\n"),
        ("Now.\n<tool_call>\n{", "Now.\n"),
        ('{"name": "read_file", "arguments": {"pa', ""),
        ("Now.\n<tool_c", "Now.\n<tool_c"),
        ("a <", "a <"),
        ('{"na', '{"na'),
    ],
)
def test_a_broken_stream_drops_half_a_call_and_keeps_other_text(text: str, kept: str) -> None:
    watched = detector()
    assert watched.feed(text) + watched.interrupt() == kept
    assert watched.held == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<tool_call>\n{"name": "write_file", "arguments": {"path": "x", "content": "', '"}}\n</tool_call>'),
        ('{"name": "write_file", "arguments": {"path": "x", "content": "', '"}}'),
        ("<function=write_file>\n<parameter=path>x</parameter>\n<parameter=content>\n", "\n</parameter>\n</function>"),
    ],
    ids=["marked JSON", "bare JSON", "tags"],
)
def test_a_call_of_900_kilobytes_in_small_pieces_is_found(before: str, after: str) -> None:
    """Quadratic time would take minutes here."""
    content = "The nest is built of twigs. " * (900_000 // 28)
    watched = detector()
    shown = watched.feed(before)
    for at in range(0, len(content), 5):
        shown += watched.feed(content[at : at + 5])
    shown += watched.feed(after)
    rest, (call,) = watched.finish(may_call=True)
    assert shown + rest == ""
    assert json.loads(call.arguments) == {"path": "x", "content": content}


SECRET = "tw1gs"
ARGUMENTS = json.dumps({"path": SECRET})
JSON_CALL = f'{{"name": "read_file", "arguments": {ARGUMENTS}}}'
INNER = st.sampled_from(
    [
        JSON_CALL,
        f"read_file{ARGUMENTS}",
        f'[read_file(path="{SECRET}")]',
        f"<path>{SECRET}</path>",
        f"<function=read_file>\n<parameter=path>\n{SECRET}\n</parameter>\n</function>",
        f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        f'<invoke name="read_file"><parameter name="path">{SECRET}</parameter></invoke>',
        f"[TOOL_CALLS]read_file[ARGS]{ARGUMENTS}",
        f"<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    ]
)
WORDS_OF_TAGS = st.sampled_from(["call", "tool", "function_calls", "Invoke", "action"])
TAG_NAMES = st.builds(
    lambda before, word, after: f"{before}{word}{after}",
    st.text("abz_:", max_size=4),
    WORDS_OF_TAGS,
    st.text("sv_2", max_size=3),
)
SHAPES = st.sampled_from(
    [
        ("<{}>", "</{}>"),
        ("<|{}|>", "<|/{}|>"),
        ("<｜{}｜>", "<｜{}▁end｜>"),
        ("[{}]", "[/{}]"),
        ('<{} id="1">', "</{}>"),
    ]
)
KNOWN = frozenset((*STARTS, *CLOSING))


@given(
    before=st.sampled_from(["", "Now.\n", "Now. ", "\n"]),
    name=TAG_NAMES,
    shape=SHAPES,
    between=st.sampled_from(["", "\n", " \n\n"]),
    inner=INNER,
    is_closed=st.booleans(),
    after=st.sampled_from(["", "\n", "</s>", "</tool_call>", "\nDone."]),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    ends_at=st.integers(0, 400),
)
@settings(max_examples=examples(20))
def test_an_unknown_form_is_shown_whole_or_run_whole(
    before: str,
    name: str,
    shape: tuple[str, str],
    between: str,
    inner: str,
    is_closed: bool,
    after: str,
    cuts: list[int],
    ends_at: int,
) -> None:
    opening, closing = shape[0].format(name), shape[1].format(name) if is_closed else ""
    assume(opening not in KNOWN)
    text = f"{before}{opening}{between}{inner}{between}{closing}{after}"
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    watched = detector()
    shown = "".join(watched.feed(text[start:end]) for start, end in pairwise(at))
    rest, calls = watched.finish(may_call=True)
    assert (shown + rest, calls) == (text, ())
    broken = detector()
    shown = broken.feed(text[:ends_at]) + broken.interrupt()
    assert text.startswith(shown)
    assert shown == text[:ends_at] or len(shown) >= len(before) + len(opening)


def test_a_call_after_an_ordinary_tag_runs() -> None:
    for tag in ("<answer>", "<|assistant|>", "</tool_response>", "<br>"):
        watched = detector()
        shown = watched.feed(f"{tag}\n<tool_call>\n{JSON_CALL}\n</tool_call>")
        rest, (call,) = watched.finish(may_call=True)
        assert (shown + rest, call.name) == (f"{tag}\n", "read_file")


@pytest.mark.parametrize(("text", "value"), [("123", "123"), ("null", None), ('"a"', '"a"')])
def test_a_value_that_may_be_a_string_stays_one(text: str, value: object) -> None:
    schema = {"type": "object", "properties": {"o": {"type": ["string", "null"]}, "n": {"type": ["integer", "null"]}}}
    tools = {"f": ToolSpec(name="f", description="", input_schema=schema)}
    detector = CallDetector(tools, new_id=lambda: "c")
    detector.feed(f"<function=f>\n<parameter=o>\n{text}\n</parameter>\n<parameter=n>\nnull\n</parameter>\n</function>")
    (call,) = detector.finish(may_call=True)[1]
    assert json.loads(call.arguments) == {"o": value, "n": None}


@pytest.mark.parametrize("written", ["{0}", "<tool_call>\n{0}\n</tool_call>", "<|python_tag|>{0}", "[TOOL_CALLS][{0}]"])
def test_a_number_with_too_many_digits_makes_no_call_and_no_crash(written: str) -> None:
    text = written.format('{"name": "read_file", "arguments": {"path": ' + "1" * 5_000 + "}}")
    watched = detector()
    shown = watched.feed(text)
    rest, calls = watched.finish(may_call=True)
    assert (shown + rest, calls) == (text, ())


def test_a_call_in_python_prints_no_warning_and_gives_each_argument_once() -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        for text, count in (("[read_file(path='\\d')]", 1), ("[read_file(path='a', path='b')]", 0)):
            watched = detector()
            shown = watched.feed(text)
            rest, calls = watched.finish(may_call=True)
            assert (shown + rest, len(calls)) == ("" if count else text, count)
    assert warned == []

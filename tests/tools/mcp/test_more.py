"""MCP servers that ask the user, change their tools, offer too many, or are configured by the user."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_types import ElicitRequestURLParams, Tool

from crow.domain.entries import CallRef
from crow.domain.errors import ArgumentError
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, FormQuestion, UrlQuestion
from crow.domain.messages import ToolCall
from crow.tools import Outcome, Ports, ServerStatus
from crow.tools.mcp.calls import page_to_open, readable_form
from crow.tools.mcp.client import open_toolbox
from crow.tools.mcp.listing import ExternalTool, external_tool, schema_fault, tool_fault
from crow.tools.mcp.offers import Offers
from crow.tools.mcp.questions import ServerQuestions
from crow.tools.mcp.schemas import plain_schema
from crow.tools.process import HiddenKeys
from crow.tools.servers import THE_WORKSPACE, ServerOptions, StdioServer
from crow.tools.workspace import DiskWorkspace
from tests.tools.conftest import Box, FixedPlan, OpenBox, RecordingLog, call, skip_time, stdio

QUESTION = FormQuestion(
    message="srv: Who are you?",
    schema={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    call=CallRef(assistant=7, index=0),
)


class User:
    """Answers questions; keeps them."""

    def __init__(self, answer: ElicitationAnswer, *kinds: ElicitationKind) -> None:
        self.question_kinds = frozenset(kinds)
        self.questions: list[Elicitation] = []
        self._answer = answer

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        self.questions.append(question)
        return self._answer

    async def finish_question(self, question_id: str) -> None: ...


def names(box: Box) -> list[str]:
    return [spec.name for spec in box.toolbox.specs() if "__" in spec.name]


async def test_a_server_learns_of_the_workspace_by_roots_and_by_its_arguments(tmp_path: Path) -> None:
    root, other = tmp_path / "a %41 ü", tmp_path / "b#?"
    root.mkdir()
    other.mkdir()
    server = stdio("various.py", "where", f"--dir={THE_WORKSPACE}/x", env=(("TOLD", THE_WORKSPACE),))
    ports = Ports(log=RecordingLog(), plan=FixedPlan())

    async def unwatched(_text: str) -> None: ...

    async with open_toolbox(DiskWorkspace(root, [other]), ports, [server]) as toolbox:
        told = json.loads((await toolbox.run(call("srv__where"), "call_1_0", unwatched)).text)
    assert told["roots"] == [
        {"uri": f"file://{tmp_path}/a%20%2541%20%C3%BC", "name": "a %41 ü"},
        {"uri": f"file://{tmp_path}/b%23%3F", "name": "b#?"},
    ]
    assert (told["args"], told["told"]) == ([f"--dir={root}/x"], str(root))
    assert told["files"] == []
    assert not Path(told["cwd"]).is_relative_to(root)


async def test_a_question_of_a_server_goes_to_the_user_and_the_answer_back(open_box: OpenBox) -> None:
    user = User(ElicitationAnswer(action="accept", content={"name": "Ada"}), "form", "url")
    async with open_box(stdio("various.py", "asks"), elicitation=user) as box:
        form = await box.run("srv__ask")
        visit = await box.run("srv__visit")
    assert json.loads(form.text) == {"action": "accept", "content": {"name": "Ada"}}
    assert json.loads(visit.text) == {"action": "accept"}
    page = user.questions[-1]
    assert isinstance(page, UrlQuestion)
    assert user.questions == [
        QUESTION,
        UrlQuestion(
            message="srv: Sign in.\n\nThis opens a page on example.com.",
            url="https://example.com/",
            id=page.id,
            call=CallRef(assistant=7, index=0),
        ),
    ]


async def test_fields_that_the_user_left_out_come_back_with_their_defaults(open_box: OpenBox) -> None:
    user = User(ElicitationAnswer(action="accept", content={"given": "this"}), "form")
    async with open_box(stdio("various.py", "asks"), elicitation=user) as box:
        form = await box.run("srv__suggest")
    assert json.loads(form.text)["content"] == {
        "given": "this",
        "name": "nightly",
        "retries": 3,
        "ratio": 0.5,
        "verbose": False,
        "level": "high",
        "colour": "#f00",
        "parts": ["a"],
    }


async def test_a_form_that_is_declined_or_dismissed_gets_no_defaults(open_box: OpenBox) -> None:
    for action in ("decline", "cancel"):
        user = User(ElicitationAnswer(action=action), "form")
        async with open_box(stdio("various.py", "asks"), elicitation=user) as box:
            assert json.loads((await box.run("srv__suggest")).text) == {"action": action}


@pytest.mark.parametrize(
    ("url", "shown", "host"),
    [
        ("https://example.com/a?b=c#d", "https://example.com/a?b=c#d", "example.com"),
        ("HTTPS://EXAMPLE.com:443", "https://example.com/", "example.com"),
        ("http://127.0.0.1:8080/x", "http://127.0.0.1:8080/x", "127.0.0.1"),
        ("http://[::1]:8080/x", "http://[::1]:8080/x", "::1"),
        ("http://localhost/x", "http://localhost/x", "localhost"),
        ("https://exаmple.com/", "https://xn--exmple-4nf.com/", "xn--exmple-4nf.com"),
    ],
)
def test_a_page_is_shown_with_its_host_in_plain(url: str, shown: str, host: str) -> None:
    assert page_to_open(url) == (shown, host)


@pytest.mark.parametrize(
    "url",
    [
        *("javascript:alert(1)", "data:text/html,hi", "file:///etc/passwd", "vscode://x/y", "ftp://example.com/"),
        *("http://example.com/", "http://127.0.0.1.example.com/", "//example.com/", "example.com", "https://", ""),
        *("https://example.com@evil.example/", "https://u:p@example.com/", "https://example.com/\u202egnp.exe"),
        *("https://example.com/\nhttps://evil.example/", "https://example.com/ x", "https://exam\u200bple.com/"),
        *("https://a\t.example.com/", "https://" + "a" * 100 + ".com/", "https://example.com/" + "a" * 10_000),
        "https://[::1",
    ],
)
def test_a_page_that_could_mislead_the_user_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="url"):
        page_to_open(url)


def test_a_form_shows_no_hidden_characters_and_keeps_its_names() -> None:
    form = {"type": "object", "properties": {"a": {"type": "string", "title": "A\u202eB", "enum": ["x", "y"]}}}
    assert readable_form(form)["properties"]["a"] == {"type": "string", "title": r"A\u202eB", "enum": ["x", "y"]}
    for hidden in (
        {"properties": {"a\u200b": {"type": "string"}}},
        {"properties": {"a": {"enum": ["yes", "yes\u200b"]}}},
        {"properties": {"a": {"default": "\x1b"}}},
    ):
        with pytest.raises(ArgumentError, match="hidden characters"):
            readable_form(hidden)
    long = readable_form({"description": "x" * 5_000})["description"]
    assert long == "x" * 4_000 + "… (1,000 more characters)"


async def test_a_question_that_could_mislead_the_user_is_refused_with_words(open_box: OpenBox) -> None:
    user = User(ElicitationAnswer(action="accept"), "form", "url")
    async with open_box(stdio("various.py", "asks", "javascript:alert(1)"), elicitation=user) as box:
        said = json.loads((await box.run("srv__visit")).text)
    assert said["message"] == "url is 'javascript:alert(1)'; expected an http or https URL"
    assert user.questions == []


@pytest.mark.parametrize("depth", [250, 5_000])
async def test_an_answer_or_question_that_nests_without_end_is_answered(open_box: OpenBox, depth: int) -> None:
    user = User(ElicitationAnswer(action="accept"), "form")
    with anyio.fail_after(60):
        async with open_box(stdio("various.py", "deep", str(depth)), elicitation=user) as box:
            result = await box.run("srv__answer")
            behind = await box.run("srv__answer", last=True)
            asked = await box.run("srv__ask")
            fine = await box.run("srv__fine")
            given = await box.run("srv__fine", a=nested(150))
            given_too_deep = await box.toolbox.run(deep_call("srv__fine", depth), "call_7_0", box.show)
    words = "MCP server srv returned an unreadable result for answer: Invalid JSON: recursion limit exceeded"
    assert result.text.startswith(words)
    assert behind.text.startswith(words)
    assert json.loads(asked.text)["message"].startswith("Invalid JSON: recursion limit exceeded")
    assert user.questions == []
    assert (fine.text, given.text) == ("fine {}", f"fine {json.dumps({'a': nested(150)})}")
    assert "nested too deeply; expected at most 200 levels" in given_too_deep.text


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def deep_call(tool: str, depth: int) -> ToolCall:
    return ToolCall(id="c", name=tool, arguments='{"a": ' + "[" * depth + "]" * depth + "}")


@pytest.mark.parametrize("tool", ["read_file", "update_plan", "call_tool", "no_such_tool", "shell"])
@pytest.mark.parametrize("depth", [300, 600, 950, 5_000])
async def test_arguments_that_nest_without_end_are_a_fault(open_box: OpenBox, tool: str, depth: int) -> None:
    async with open_box() as box:
        planned = await box.toolbox.plan(deep_call(tool, depth))
        done = await box.toolbox.run(deep_call(tool, depth), "call_7_0", box.show)
    assert planned.fault is not None
    assert done.is_error


async def test_only_some_calls_of_a_server_run_at_once(open_box: OpenBox) -> None:
    async with open_box(stdio("various.py", "counts")) as box:
        await box.toolbox.wait_ready(120)
        said: list[str] = []

        async def run(number: int) -> None:
            said.append((await box.run("srv__hold", number=number)).text)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(96):
                    tasks.start_soon(run, number)
    assert said == ["32"] * 96


async def test_a_question_that_nobody_can_be_asked_is_declined(open_box: OpenBox) -> None:
    user = User(ElicitationAnswer(action="accept"), "form")
    async with open_box(stdio("various.py", "asks"), elicitation=user) as box:
        assert json.loads((await box.run("srv__visit")).text) == {"action": "decline"}
    async with open_box(stdio("various.py", "asks")) as box:
        assert json.loads((await box.run("srv__ask")).text) == {"action": "decline"}
    assert user.questions == []


async def test_a_question_that_the_server_takes_back_is_no_longer_asked(open_box: OpenBox) -> None:
    asked, ended = anyio.Event(), anyio.Event()

    class Undecided(User):
        async def elicit(self, question: Elicitation) -> ElicitationAnswer:
            asked.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()
            return await super().elicit(question)

    user = Undecided(ElicitationAnswer(action="accept"), "form")
    opened = open_box(stdio("various.py", "withdraws"), elicitation=user)
    async with opened as box, anyio.create_task_group() as tasks:
        tasks.start_soon(box.run, "srv__ask")
        with anyio.fail_after(60):
            await asked.wait()
            assert await box.run("srv__withdraw") == Outcome(text="withdrawn")
            await ended.wait()
        tasks.cancel_scope.cancel()


async def test_a_server_can_close_only_its_own_pages() -> None:
    class Visitor(User):
        async def finish_question(self, question_id: str) -> None:
            finished.append(question_id)

    finished: list[str] = []
    user = Visitor(ElicitationAnswer(action="accept"), "url")
    first, second = (
        ServerQuestions(StdioServer(name="srv", command="x"), "srv", HiddenKeys, user, None, is_starting=bool)
        for _ in range(2)
    )
    page = ElicitRequestURLParams(message="Sign in.", url="https://a.test/", elicitation_id="e7")
    await first.on_elicitation(None, page)  # type: ignore[arg-type]
    await second.on_elicitation(None, page)  # type: ignore[arg-type]
    ids = [question.id for question in user.questions if isinstance(question, UrlQuestion)]
    await second.finish_page(ids[0])
    await second.finish_page("e7")
    await second.finish_page("e7")
    assert finished == [ids[1]]
    await first.finish_page("e7")
    assert finished == [ids[1], ids[0]]
    assert ids[0] != ids[1]


async def test_a_server_that_refuses_in_very_many_words_is_quoted_in_part(open_box: OpenBox) -> None:
    program = (
        "import json\nmessage = json.loads(input())\n"
        "error = {'code': -1, 'message': 'no ' * 100_000}\n"
        "print(json.dumps({'jsonrpc': '2.0', 'id': message['id'], 'error': error}), flush=True)\ninput()"
    )
    server = StdioServer(name="srv", command=sys.executable, args=("-I", "-S", "-c", program))
    async with open_box(server) as box:
        await box.toolbox.wait_ready(120)
        (status,) = box.toolbox.servers()
    assert status.detail.startswith("no no ")
    assert len(status.detail) < 5_000


def test_a_server_with_very_many_invalid_tools_is_remembered_in_part() -> None:
    async def changed() -> None: ...

    offers = Offers("srv", "srv", ServerOptions(), changed)
    for number in range(1_000):
        offers.note_invalid(f"{number}{'x' * 10_000}", "y" * 10_000)
    assert sum(len(name) + len(fault) for name, fault in offers.left_out.items()) <= 100_000


async def test_a_change_of_tools_is_followed_over_the_newer_protocol_too(open_box: OpenBox) -> None:
    changed = anyio.Event()

    async def on_change() -> None:
        if len(names(box)) == 2:
            changed.set()

    async with open_box(stdio("various.py", "listens"), on_change=on_change) as box:
        assert (await box.run("srv__more")).text == "there are more now"
        with anyio.fail_after(60):
            await changed.wait()
        assert names(box) == ["srv__more", "srv__extra"]


async def test_a_tool_with_an_invalid_schema_does_not_affect_the_others(open_box: OpenBox) -> None:
    async with open_box(stdio("various.py", "faulty")) as box:
        await box.toolbox.wait_ready(120)
        assert box.toolbox.servers() == (ServerStatus(name="srv", state="ready", tools=2),)
        assert names(box) == ["srv__good", "srv__odd_output"]
        assert await box.run("srv__good", a=None) == Outcome(text='good {"a": null}')
        assert await box.run("srv__odd_output") == Outcome(text="odd output {}")
        assert "true" not in json.dumps(box.toolbox.specs()[-1].input_schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": "string"}},
        {"items": "x"},
        {"enum": "a"},
        {"anyOf": {}},
        {"type": ["string", 3]},
        {"$defs": {"x": {"type": "nothing"}}},
        None,
    ],
)
def test_a_schema_that_providers_refuse_has_a_fault(schema: object) -> None:
    assert schema_fault(schema) is not None


def test_a_valid_schema_has_no_fault() -> None:
    assert (
        schema_fault({"type": "object", "properties": {"a": True, "b": {"items": [{"type": "null"}, False]}}}) is None
    )


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, {}),
        (False, {"not": {}}),
        ({"items": True, "additionalProperties": True}, {"items": {}, "additionalProperties": True}),
        ({"anyOf": [True, {"type": "null"}]}, {"anyOf": [{}, {"type": "null"}]}),
        ({"type": [], "enum": [], "anyOf": [], "description": "d"}, {"description": "d"}),
        ({"type": "string", "minLength": -1, "maxLength": 9}, {"type": "string", "maxLength": 9}),
        ({"minimum": "0", "maximum": 1.5, "exclusiveMinimum": True}, {"maximum": 1.5}),
        ({"minimum": -math.inf, "maximum": math.nan, "multipleOf": 10**400}, {"multipleOf": 10**400}),
        ({"$ref": "#/properties/other"}, {"$ref": "#/properties/other"}),
        ({"$ref": "#/properties/other/enum/1", "title": "t"}, {"title": "t"}),
        ({"$ref": "#/properties/other/enum/" + "9" * 5000}, {}),
        ({"$ref": "#/properties/nothing"}, {}),
        ({"$ref": "#/properties/value"}, {}),  # it leads to itself
        ({"$ref": "https://example.com/schema.json"}, {}),
        ({"$ref": "#anchor"}, {}),
        ({"$ref": 3}, {}),
        (
            {"properties": {"enum": {"enum": ["a"]}, "items": True}},
            {"properties": {"enum": {"enum": ["a"]}, "items": {}}},
        ),
    ],
)
def test_schemas_are_rewritten_so_that_every_endpoint_accepts_them(value: object, plain: object) -> None:
    others = {"other": {"enum": ["a", "b"]}}
    schema = {"type": "object", "properties": {"value": value, **others}, "required": ["value"]}
    wanted = {**schema, "properties": {"value": plain, **others}}
    assert plain_schema(schema) == wanted
    assert plain_schema(wanted) == wanted


def test_a_schema_that_refers_to_itself_keeps_its_meaning() -> None:
    taken = {"root": {"type": "string"}}
    inner = {"type": "object", "properties": {"more": {"$ref": "#/$defs/root_"}}}
    schema = {"type": "object", "properties": {"more": {"$ref": "#"}}, "$defs": taken}
    assert plain_schema(schema) == {**inner, "$defs": {**taken, "root_": inner}}


def test_a_schema_that_is_nested_without_end_is_cut() -> None:
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"additionalProperties": schema}
    assert len(repr(plain_schema(schema))) < 5_000


def test_a_schema_that_would_fill_the_context_is_refused() -> None:
    giant = {"type": "object", "description": "x" * 100_000}
    assert tool_fault({"name": "a", "inputSchema": giant}) == (
        "its inputSchema has 100,037 characters, more than 50,000, and would fill the model's context"
    )


def test_the_definition_of_a_tool_can_be_stored_and_tells_every_change() -> None:
    def described(**changes: object) -> ExternalTool:
        listed = {
            "name": "say",
            "description": "Says it.",
            "inputSchema": {"type": "object", "properties": {}},
            **changes,
        }
        return external_tool(Tool.model_validate(listed, by_name=False), "srv__say", ServerOptions())

    schema = {"properties": {}, "type": "object"}
    assert described(inputSchema=schema).fingerprint == described().fingerprint
    odd = described(description="\ud83d and \0" + "x" * 20_000)
    assert odd.definition.startswith("say\n? and \ufffdxxx")
    assert len(odd.definition) == 8_000
    changes: tuple[dict[str, object], ...] = (
        {"title": "Say"},
        {"annotations": {"title": "Say it"}},
        {"description": "Says it\u200b."},
        {"inputSchema": {**schema, "required": []}},
        {"inputSchema": {"type": "object", "properties": {"a": {"description": "send it"}}}},
    )
    assert len({described(**change).fingerprint for change in ({}, *changes)}) == len(changes) + 1


async def test_the_user_says_which_tools_are_offered_which_only_read_and_how_long_they_may_take(
    open_box: OpenBox,
) -> None:
    options = ServerOptions(allow=("get_thing?",), deny=("*3",), read_only=("get_thing1",), call_timeout_s=5)
    async with open_box(stdio("various.py", "many", options=options, env=(("TOKEN", "t"),))) as box:
        await box.toolbox.wait_ready(120)
        assert names(box) == [f"srv__get_thing{number}" for number in (0, 1, 2, 4, 5, 6, 7, 8, 9)]
        assert (await box.plan("srv__get_thing1")).coverage.is_read_only
        assert not (await box.plan("srv__get_thing2")).coverage.is_read_only
        assert (await box.plan("srv__get_invoice")).fault is not None
        assert (await box.run("srv__get_thing1")).text == "get_thing1 {} t"


async def test_a_server_that_cannot_be_started_as_configured_says_so(open_box: OpenBox) -> None:
    options = ServerOptions(problem="environment variable TOKEN is not set")
    async with open_box(stdio("tiny.py", options=options)) as box:
        await box.toolbox.wait_ready(120)
        assert box.toolbox.servers() == (
            ServerStatus(name="srv", state="failed", detail="environment variable TOKEN is not set"),
        )


async def test_a_stuck_call_of_one_server_does_not_delay_the_others(open_box: OpenBox, tmp_path: Path) -> None:
    slow = ServerOptions(call_timeout_s=300)
    async with open_box(stdio("tiny.py", name="slow", options=slow), stdio("tiny.py", name="quick")) as box:
        await box.toolbox.wait_ready(120)
        said = {}

        async def keep(name: str) -> None:
            said[name] = await box.toolbox.run(call(name, text="hi"), "call_1_0", box.show)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep, "slow__wait")
            await keep("quick__echo")
            assert said.keys() == {"quick__echo"}
            skip_time(300)
    assert said == {
        "slow__wait": Outcome(text="MCP server slow did not answer the call of wait within 300 s", is_error=True),
        "quick__echo": Outcome(text="you said hi"),
    }

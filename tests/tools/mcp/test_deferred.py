"""Tools of MCP servers that are found by words and called by name, instead of being sent with each request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.entries import CallRef
from crow.domain.events import ElicitationAnswer, FormQuestion
from crow.domain.messages import ToolCall, ToolSpec
from crow.domain.tokens import estimate_tools
from crow.tools.mcp.deferred import (
    CALL_TOOL,
    FOUND_CHARS,
    LISTED_CHARS,
    best_tools,
    find_spec,
    find_tools,
    list_servers,
    understood_inner,
)
from crow.tools.servers import ServerOptions
from tests.support.amounts import some
from tests.support.tool_catalogue import catalogue
from tests.tools.conftest import Box, OpenBox, call, stdio
from tests.tools.mcp.test_more import User

TOOLS = catalogue()
SPECS = [ToolSpec(name=one.full_name, description=one.description, input_schema=one.schema) for one in TOOLS]
HAND_MADE = [
    ("open a ticket about the crash", "tracker__create_issue", "Create an issue in a project."),
    ("who is on call", "pager__get_oncall", "Get the people on call for a schedule."),
    ("send a message to a channel", "chat__post_message", "Post a message."),
    ("run a sql query", "warehouse__execute_statement", "Execute a SQL statement and return its rows."),
    ("merge the PR", "forge__merge_pull_request", "Merge a pull request."),
    ("take a picture of the page", "browser__take_screenshot", "Capture the visible page as an image."),
    ("fill in a form field", "browser__fill", "Type text into an input of a form."),
    ("what does the function look like in the docs", "docs__getLibraryDocs", "Fetch documentation of a library."),
    ("upload file to bucket", "storage__putObject", "Upload an object to a bucket."),
    ("restart the deployment", "cluster__rollout_restart", "Restart the pods of a deployment."),
]


def names(box: Box) -> list[str]:
    return [spec.name for spec in box.toolbox.specs()]


def spec(name: str, description: str = "", /, **properties: object) -> ToolSpec:
    schema = {"type": "object", "properties": properties}
    return ToolSpec(name=name, description=description, input_schema=schema)


@pytest.mark.long
def test_each_of_500_tools_is_among_the_ten_that_words_for_it_find() -> None:
    missed = [
        (words, tool.full_name)
        for place, tool in some([*enumerate(TOOLS)], 5)
        for words in some((tool.words, tool.name.replace("_", " "), tool.full_name), 3, first=place % 3)
        if tool.full_name not in [found.name for found in best_tools(words, SPECS)[:10]]
    ]
    assert missed == []


@pytest.mark.parametrize(("words", "name", "description"), HAND_MADE)
def test_words_of_people_find_tools_among_500_others(words: str, name: str, description: str) -> None:
    added = [spec(name, description) for _, name, description in HAND_MADE]
    assert name in [found.name for found in best_tools(words, [*SPECS, *added])[:10]]


def test_words_may_stand_in_the_name_the_server_the_description_or_the_arguments() -> None:
    specs = [spec("a__one"), spec("wren__two"), spec("a__three", "About moss."), spec("a__four", twig={}), spec("a__f")]
    found = {word: [one.name for one in best_tools(word, specs)] for word in ("one", "wren", "moss", "twigs", "zebra")}
    assert found == {"one": ["a__one"], "wren": ["wren__two"], "moss": ["a__three"], "twigs": ["a__four"], "zebra": []}
    assert [one.name for one in best_tools("x", [spec(f"s__x_{n}") for n in "bca"])] == ["s__x_b", "s__x_c", "s__x_a"]


def test_definitions_are_whole_and_long_ones_are_named_only() -> None:
    long = [spec(f"s__get_{n}", "Get it.", a={"description": "x" * 10_000}) for n in range(12)]
    text = find_tools("get", long)
    first, second, third, *_ = text.split("\n\n")
    for block, tool in ((first, long[0]), (second, long[1])):
        head, schema = block.split("\n")
        assert (head, json.loads(schema)) == (f"{tool.name}: Get it.", tool.input_schema)
    assert third == "s__get_2: Get it. [its definition is long; find_tools with this name alone shows it]"
    assert text.endswith("\n[2 more match; narrow the query]")
    giant = find_tools("get", [spec("s__get", "Get it.", a={"description": "x" * 45_000})])
    assert giant.endswith("\n[the definition is cut here]")
    assert len(giant) < FOUND_CHARS + 100


@given(st.text(max_size=300), st.lists(st.tuples(st.text(max_size=20), st.text(max_size=50)), max_size=20))
def test_no_query_and_no_text_of_a_server_breaks_the_search(query: str, tools: list[tuple[str, str]]) -> None:
    specs = [spec(f"s__{name}", description, **{name or "x": {}}) for name, description in tools]
    assert len(find_tools(query, specs)) <= FOUND_CHARS + LISTED_CHARS + 2_000
    assert len(find_spec(specs).description) <= LISTED_CHARS + 200


def test_servers_and_their_tools_are_told_in_bounded_lines() -> None:
    lines = list_servers(SPECS).split("\n")
    assert [line.split(" ")[0] for line in lines] == list(dict.fromkeys(tool.server for tool in TOOLS))
    assert lines[0].startswith("github (50): list_issue, get_issue, ")
    assert all(line.endswith(", ...") for line in lines)
    assert list_servers([spec("a__b"), spec("a__c"), spec("d__e")]) == "a (2): b, c\nd (1): e"
    many = list_servers([spec(f"server_number_{n}__{'x' * 30}") for n in range(500)])
    assert len(many) <= LISTED_CHARS + 30
    assert many.split("\n")[-1].startswith("and ")
    assert estimate_tools([find_spec(SPECS), CALL_TOOL]) < 500


KNOWN = {one.name: one for one in (spec("s__a"), spec("s__b"), spec("t__b", l={"type": "array"}))}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"name": "s__a", "arguments": {"x": 1}}, {"name": "s__a", "arguments": {"x": 1}}),
        ({"name": "a", "arguments": {"x": 1}}, {"name": "s__a", "arguments": {"x": 1}}),
        ({"tool_name": "a", "parameters": {"x": 1}}, {"name": "s__a", "arguments": {"x": 1}}),
        ({"name": "s__a", "x": 1}, {"name": "s__a", "arguments": {"x": 1}}),
        ({"name": "b", "arguments": {}}, {"name": "b", "arguments": {}}),
        ({"name": 7}, {"name": 7}),
        ({"name": "t__b", "arguments": {"l": "[1]"}}, {"name": "t__b", "arguments": {"l": [1]}}),
        (
            {"name": "t__b", "arguments": {"l": "{}", "x": "[1]"}},
            {"name": "t__b", "arguments": {"l": "{}", "x": "[1]"}},
        ),
        ({"name": "s__a", "args": 1, "input": 2}, {"name": "s__a", "arguments": {"args": 1, "input": 2}}),
    ],
)
def test_calls_in_other_forms_are_understood(given: dict[str, object], meant: dict[str, object]) -> None:
    told = understood_inner(call("call_tool", **given), KNOWN)
    assert json.loads(told.arguments) == meant
    assert understood_inner(replace(told, arguments="[1"), KNOWN).arguments == "[1"


async def test_tools_beyond_the_budget_are_found_by_search_and_called_by_name(open_box: OpenBox) -> None:
    async with open_box(stdio("various.py", "many")) as box:
        await box.toolbox.wait_ready(120)
        offered = names(box)
        listed = box.toolbox.specs()[-2].description
        found = await box.run("find_tools", query="invoice")
        nothing = await box.run("find_tools", query="zebra")
        own = await box.plan("call_tool", name="shell", arguments={"command": "true"})
        inner = call("call_tool", name="srv__get_thing9", arguments={"id": 4})
        plans = [await box.toolbox.plan(each) for each in (inner, call("srv__get_thing9", id=4))]
        called = [await box.toolbox.run(each, "call_1_0", box.show) for each in (inner, call("srv__get_thing9", id=5))]
        meant = box.toolbox.understood(call("get_thing9", id=4))
        near = await box.run("srv__get_thing999", id=1)
        faulty = await box.run("call_tool", name="srv__get_thing9", arguments="[1")
    assert offered[-2:] == ["find_tools", "call_tool"]
    assert not any("__" in name for name in offered)
    assert "\nsrv (100): get_weather, get_invoice, get_thing0, " in listed
    assert found.text == 'srv__get_invoice: Get one invoice.\n{"properties":{},"type":"object","required":["id"]}'
    assert nothing.text.startswith(
        'None of 100 tools matches "zebra". Try other words. Servers and tools:\nsrv (100): '
    )
    coverage = replace(plans[1].coverage, rule_tool="srv__get_thing9", inner_arguments='{"id": 4}')
    assert plans[0] == replace(plans[1], coverage=coverage)
    assert plans[0].announcement.title == "srv: get_thing9"
    assert [outcome.text for outcome in called] == ['get_thing9 {"id": 4}', 'get_thing9 {"id": 5}']
    assert meant.name == "srv__get_thing9"
    assert own.fault == "call_tool: shell is not a tool of an MCP server; call it directly"
    assert near.text == 'No tool "srv__get_thing999".'
    assert faulty.is_error
    assert faulty.text.endswith(
        '\nsrv__get_thing9: Get one thing9.\n{"properties":{},"type":"object","required":["id"]}'
    )


async def test_settings_say_which_tools_are_always_sent_and_how_many(open_box: OpenBox) -> None:
    server = stdio("various.py", "many")
    async with open_box(server, always_offered=("srv__get_w*", "srv__get_thing1?"), offered=5) as box:
        await box.toolbox.wait_ready(120)
        told = [name for name in names(box) if "__" in name]
        deferred = {spec.name for spec in box.toolbox.deferred()}
    assert told == ["srv__get_weather", *(f"srv__get_thing1{n}" for n in range(4))]
    assert len(deferred) == 95
    assert deferred.isdisjoint(told)
    async with open_box(server, offered_tokens=10_000) as box:
        await box.toolbox.wait_ready(120)
        assert len([name for name in names(box) if "__" in name]) == 100
        assert "find_tools" not in names(box)
        assert box.toolbox.deferred() == ()


async def test_a_narrowed_toolbox_finds_and_calls_only_its_own_tools(open_box: OpenBox) -> None:
    async with open_box(stdio("various.py", "many"), offered_tokens=100) as box:
        await box.toolbox.wait_ready(120)
        small = box.toolbox.narrowed(["read_file", "srv__get_invoice"])
        large = box.toolbox.narrowed(["grep", *(f"srv__get_thing{n}" for n in range(50))])
        assert [spec.name for spec in small.specs()] == ["read_file", "srv__get_invoice"]
        assert [spec.name for spec in large.specs()] == ["grep", "find_tools", "call_tool"]
        found = await large.run(call("find_tools", query="get weather invoice thing7"), "call_1_0", box.show)
        other = await large.plan(call("call_tool", name="srv__get_weather", arguments={"id": 1}))
        inner = await large.run(call("call_tool", name="srv__get_thing7", arguments={"id": 1}), "call_1_0", box.show)
    assert found.text.startswith("srv__get_thing7: ")
    assert "weather" not in found.text
    assert other.fault is not None
    assert other.fault.startswith('No tool "srv__get_weather".')
    assert inner.text == 'get_thing7 {"id": 1}'


async def test_questions_progress_and_read_only_tools_are_the_same_through_call_tool(open_box: OpenBox) -> None:
    user = User(ElicitationAnswer(action="accept", content={"name": "Ada"}), "form", "url")
    server = stdio("various.py", "asks", options=ServerOptions(read_only=("suggest",)))
    async with open_box(server, elicitation=user, offered_tokens=0) as box:
        await box.toolbox.wait_ready(120)
        asked = await box.run("call_tool", name="srv__ask")
        plans = [await box.plan("call_tool", name=f"srv__{name}") for name in ("ask", "suggest")]
        direct = [await box.plan(f"srv__{name}") for name in ("ask", "suggest")]
    assert json.loads(asked.text) == {"action": "accept", "content": {"name": "Ada"}}
    (question,) = user.questions
    assert isinstance(question, FormQuestion)
    assert question.message == "srv: Who are you?"
    assert question.call == CallRef(assistant=7, index=0)
    assert [plan.coverage.is_read_only for plan in plans] == [False, True]
    assert [
        replace(plan, coverage=replace(plan.coverage, rule_tool=None, inner_arguments=None)) for plan in plans
    ] == direct


async def test_a_tool_that_its_server_changed_after_it_was_found_is_not_called(
    open_box: OpenBox, tmp_path: Path
) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"name": "say", "description": "Says it.", "inputSchema": {"type": "object"}}]))
    async with open_box(stdio("various.py", "shifts", str(file)), offered_tokens=0) as box:
        await box.toolbox.wait_ready(120)
        inner = call("call_tool", name="srv__say", arguments={})
        plan = await box.toolbox.plan(inner)
        file.write_text(json.dumps([{"name": "say", "description": "Sends it.", "inputSchema": {"type": "object"}}]))
        await box.toolbox.restart("srv")
        outcome = await box.toolbox.run(inner, "call_1_0", box.show, planned=plan)
    assert outcome.text == (
        "srv__say was not called: its server changed the tool after the call was planned. Call it again."
    )


def test_a_broken_call_stays_as_it_is() -> None:
    broken = ToolCall(id="c", name="call_tool", arguments="{", fault="The arguments broke off.")
    assert understood_inner(broken, KNOWN) is broken

"""Modes, config options and what clients say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from crow.agent import PermissionQuestion
from crow.domain.entries import Announcement, CallRef, Diff
from crow.domain.errors import ArgumentError
from crow.frontend.client import permission_answer, permission_params
from crow.frontend.options import config_options, mode_named, mode_state, option_value
from crow.frontend.params import ClientCapabilities, client_capabilities, client_name, mcp_servers_from
from crow.tools import HttpServer, PlannedCall, StdioServer
from crow.trace.schema import validate


def test_modes_and_options_are_valid_and_agree() -> None:
    state = mode_state("plan")
    options = config_options(mode="plan", model="b", models=["a", "b"], config={}, booleans=True)
    validate("NewSessionResponse", {"sessionId": "s", "modes": state, "configOptions": options})
    modes = [mode["id"] for mode in state["availableModes"]]
    assert modes == ["ask", "accept-edits", "plan", "auto"]
    mode, model, level, compacts = options
    assert (mode["category"], mode["currentValue"]) == ("mode", "plan")
    assert [option["value"] for option in mode["options"]] == modes
    assert (model["category"], model["currentValue"]) == ("model", "b")
    assert [option["value"] for option in model["options"]] == ["a", "b"]
    assert (level["category"], level["currentValue"]) == ("thought_level", "default")
    assert (compacts["type"], compacts["currentValue"]) == ("boolean", True)


def test_what_the_session_keeps_is_the_current_value_and_booleans_need_their_gate() -> None:
    config = {"thought_level": "high", "auto_compact": False, "max_turns": 3}
    options = config_options(mode="ask", model="a", models=[], config=config, booleans=True)
    values = {option["id"]: option["currentValue"] for option in options}
    assert values == {"mode": "ask", "model": "a", "thought_level": "high", "auto_compact": False}
    gated = config_options(mode="ask", model="a", models=[], config=config, booleans=False)
    assert [option["id"] for option in gated] == ["mode", "model", "thought_level"]


@pytest.mark.parametrize(
    ("model", "models", "offered"),
    [("x", ["a"], ["a", "x"]), ("a", ["a", "a"], ["a"]), ("", ["a"], ["none", "a"]), ("x", [], ["x"])],
)
def test_the_current_model_is_always_among_those_offered(model: str, models: list[str], offered: list[str]) -> None:
    option = config_options(mode="ask", model=model, models=models, config={}, booleans=False)[1]
    assert [one["value"] for one in option["options"]] == offered
    assert option["currentValue"] in offered


def test_without_any_model_there_is_no_option_for_it() -> None:
    options = config_options(mode="ask", model="", models=[], config={}, booleans=False)
    assert [option["id"] for option in options] == ["mode", "thought_level"]


def test_choices_are_checked() -> None:
    assert mode_named("auto") == "auto"
    assert option_value("mode", "plan", model="a", models=[]) == "plan"
    assert option_value("model", "b", model="a", models=["b"]) == "b"
    assert option_value("model", "none", model="", models=["b"]) == ""
    assert option_value("thought_level", "high", model="", models=[]) == "high"
    assert option_value("thought_level", "default", model="", models=[]) == ""
    assert option_value("auto_compact", False, model="", models=[]) is False


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("mode", "yolo", 'No mode "yolo"; choose one of ask, accept-edits, plan, auto.'),
        ("mode", True, "No mode true; choose one of ask, accept-edits, plan, auto."),
        ("model", "c", 'No model "c"; choose one of b, a.'),
        ("thought_level", "huge", 'No thought level "huge"; choose one of default, off, low, medium, high.'),
        ("auto_compact", "no", 'auto_compact is "no"; expected true or false.'),
        (
            "effort",
            "high",
            'No config option "effort"; the options are mode, model, thought_level and auto_compact.',
        ),
    ],
)
def test_a_wrong_choice_names_the_value_and_what_can_be_chosen(option: str, value: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        option_value(option, value, model="a", models=["b"])
    assert str(raised.value) == words


def test_every_gate_is_read_from_the_raw_parameters() -> None:
    params = {
        "clientInfo": {"name": "zed", "version": "1.2"},
        "clientCapabilities": {
            "fs": {"readTextFile": True, "writeTextFile": True},
            "terminal": True,
            "auth": {"terminal": True},
            "session": {"configOptions": {"boolean": {}}, "notices": {}, "compaction": {}},
            "elicitation": {"form": {}, "url": {}},
            "_meta": {"terminal_output": True, "terminal-auth": True},
        },
    }
    assert client_capabilities(params) == ClientCapabilities(
        reads_files=True,
        writes_files=True,
        terminals=True,
        terminal_output=True,
        terminal_auth=True,
        terminal_auth_by_meta=True,
        notices=True,
        compaction=True,
        boolean_options=True,
        elicits_by_form=True,
        elicits_by_url=True,
    )
    assert client_name(params) == "zed 1.2"


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        "x",
        {"fs": None, "terminal": "true", "session": {"notices": None, "compaction": True}, "elicitation": {}},
        {"fs": {"readTextFile": 1}, "_meta": [], "session": {"configOptions": {"boolean": None}}, "auth": []},
    ],
)
def test_null_and_wrong_types_offer_nothing(given: Any) -> None:
    assert client_capabilities({"clientCapabilities": given}) == ClientCapabilities()
    assert client_name({"clientInfo": given}) == ""


def test_servers_are_read_with_and_without_what_may_be_missing() -> None:
    given = [
        {"name": "a", "command": "/bin/a", "args": ["-x"], "env": [{"name": "K", "value": "V"}]},
        {"name": "b", "command": "b", "args": None, "env": None},
        {"type": "http", "name": "c", "url": "http://localhost/", "headers": [{"name": "H", "value": "v"}]},
        {"type": "sse", "name": "d", "url": "http://localhost/sse"},
    ]
    assert mcp_servers_from(given) == (
        StdioServer(name="a", command="/bin/a", args=("-x",), env=(("K", "V"),)),
        StdioServer(name="b", command="b"),
        HttpServer(name="c", url="http://localhost/", headers=(("H", "v"),)),
        HttpServer(name="d", url="http://localhost/sse", transport="sse"),
    )
    assert mcp_servers_from(None) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "mcpServers is an object; expected a list of servers."),
        (["x"], 'mcpServers[0] is "x"; expected an object with name and command or url.'),
        ([{"command": "x"}], "mcpServers[0].name: expected a string that is not empty."),
        ([{"name": "a"}], "mcpServers[0].command: expected a string that is not empty."),
        ([{"name": "a", "command": "x", "args": "y"}], "mcpServers[0].args (a): expected a list of strings."),
        (
            [{"name": "a", "command": "x", "env": {"TOKEN": "secret"}}],
            "mcpServers[0].env: expected a list of objects with name and value, both strings.",
        ),
        ([{"type": "ws", "name": "a"}], 'mcpServers[0].type (a) is "ws"; expected stdio, http or sse.'),
        (
            [{"name": "a", "command": "x"}, {"name": "a", "command": "y"}],
            'mcpServers contains "a" twice; give each server its own name.',
        ),
    ],
)
def test_a_server_that_cannot_be_understood_is_named_without_its_secrets(given: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        mcp_servers_from(given)
    assert str(raised.value) == words


def test_a_permission_request_repeats_the_call_and_offers_one_option_of_each_kind() -> None:
    announcement = Announcement(
        title="Edit a.py", kind="edit", diffs=(Diff(path="/w/a.py", old_text="a", new_text="b"),)
    )
    question = PermissionQuestion(
        call=CallRef(assistant=3, index=1),
        name="edit_file",
        arguments='{"path": "a.py"}',
        offer=PlannedCall(announcement=announcement, access="write"),
        always="edit_file in this session",
    )
    params = permission_params("s", question)
    validate("RequestPermissionRequest", params)
    assert params["toolCall"] == {
        "toolCallId": "call_3_1",
        "status": "pending",
        "title": "Edit a.py",
        "kind": "edit",
        "name": "edit_file",
        "locations": [],
        "rawInput": {"path": "a.py"},
        "content": [{"type": "diff", "path": "/w/a.py", "oldText": "a", "newText": "b"}],
        "_meta": {"tool_name": "edit_file"},
    }
    kinds = ["allow_once", "allow_always", "reject_once", "reject_always"]
    assert [(option["kind"], option["optionId"]) for option in params["options"]] == [(kind, kind) for kind in kinds]
    assert params["options"][1]["name"] == "Always allow edit_file in this session"


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ({"outcome": {"outcome": "selected", "optionId": "allow_always"}}, "allow_always"),
        ({"outcome": {"outcome": "selected", "optionId": "reject_always"}}, "reject_always"),
        ({"outcome": {"outcome": "cancelled"}}, "cancelled"),
        ({"outcome": {"outcome": "selected", "optionId": "cancelled"}}, "reject_once"),
        ({"outcome": {"outcome": "selected", "optionId": ["allow_once"]}}, "reject_once"),
        ({"outcome": "selected"}, "reject_once"),
        ({}, "reject_once"),
        (None, "reject_once"),
    ],
)
def test_whatever_is_no_clear_yes_is_a_no(answer: Any, meaning: str) -> None:
    assert permission_answer(answer) == meaning

"""Capabilities and MCP servers in the parameters of requests."""

from __future__ import annotations

from typing import Any

import pytest

from crow.domain.errors import ArgumentError
from crow.protocol.params import ClientCapabilities, client_capabilities, mcp_servers_from
from crow.tools.servers import HttpServer, StdioServer


def test_every_capability_is_read_from_the_raw_parameters() -> None:
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
        question_kinds=frozenset({"form", "url"}),
        client={"name": "zed", "version": "1.2"},
    )


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
def test_null_and_wrong_types_mean_no_capability(given: Any) -> None:
    assert client_capabilities({"clientCapabilities": given}) == ClientCapabilities()
    assert client_capabilities({"clientInfo": given}) == ClientCapabilities()


def test_servers_are_read_with_and_without_optional_members() -> None:
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
        (["x"], 'mcpServers[0] is "x"; expected an object with "name" and either "command" or "url".'),
        ([{"command": "x"}], "mcpServers[0].name: expected a string that is not empty."),
        ([{"name": "a"}], "mcpServers[0].command: expected a string that is not empty."),
        ([{"name": "a", "command": "x", "args": "y"}], "mcpServers[0].args (a): expected a list of strings."),
        (
            [{"name": "a", "command": "x", "env": {"TOKEN": "secret"}}],
            'mcpServers[0].env: expected a list of objects in which "name" and "value" are strings.',
        ),
        ([{"type": "ws", "name": "a"}], 'mcpServers[0].type (a) is "ws"; expected stdio, http or sse.'),
        (
            [{"name": "a", "command": "x"}, {"name": "a", "command": "y"}],
            'mcpServers contains "a" twice; give each server its own name.',
        ),
    ],
)
def test_an_invalid_server_is_named_without_its_secrets(given: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        mcp_servers_from(given)
    assert str(raised.value) == words

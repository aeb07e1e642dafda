"""What a client says of itself at `initialize`, and the MCP servers it gives, read from the raw parameters.

Strategy: the SDK's models drop what they do not know, and list items that they do not understand; so each gate and
each server is looked up in the raw object. A gate that is absent, null or of the wrong type counts as not offered; a
server that cannot be understood is an error. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crow.domain.errors import ArgumentError

if TYPE_CHECKING:
    from crow.tools import McpServer

__all__ = ["ClientCapabilities", "client_capabilities", "client_name", "mcp_servers_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCapabilities:
    """The gates: what crow may send to or ask of this client."""

    reads_files: bool = False
    writes_files: bool = False
    terminals: bool = False
    terminal_output: bool = False
    terminal_auth: bool = False
    terminal_auth_by_meta: bool = False
    notices: bool = False
    compaction: bool = False
    boolean_options: bool = False
    elicits_by_form: bool = False
    elicits_by_url: bool = False


def client_capabilities(params: Mapping[str, Any]) -> ClientCapabilities:
    """The gates that the parameters of `initialize` open."""
    given = _object(params, "clientCapabilities")
    files, session = _object(given, "fs"), _object(given, "session")
    elicitation, meta = _object(given, "elicitation"), _object(given, "_meta")
    return ClientCapabilities(
        reads_files=files.get("readTextFile") is True,
        writes_files=files.get("writeTextFile") is True,
        terminals=given.get("terminal") is True,
        terminal_output=meta.get("terminal_output") is True,
        terminal_auth=_object(given, "auth").get("terminal") is True or meta.get("terminal-auth") is True,
        terminal_auth_by_meta=meta.get("terminal-auth") is True,
        notices=isinstance(session.get("notices"), dict),
        compaction=isinstance(session.get("compaction"), dict),
        boolean_options=isinstance(_object(session, "configOptions").get("boolean"), dict),
        elicits_by_form=isinstance(elicitation.get("form"), dict),
        elicits_by_url=isinstance(elicitation.get("url"), dict),
    )


def client_name(params: Mapping[str, Any]) -> str:
    """`name version` as the client gives them, or an empty string; for the log."""
    info = _object(params, "clientInfo")
    return " ".join(str(info[key]) for key in ("name", "version") if isinstance(info.get(key), str))


def mcp_servers_from(given: object) -> tuple[McpServer, ...]:
    """The `mcpServers` of a request that opens a session; None is none.

    :raises ArgumentError: an entry that names no server, or two of one name; the message says which.
    """
    if given is None:
        return ()
    if not isinstance(given, list):
        raise ArgumentError(f"mcpServers is {type(given).__name__}; expected a list of servers.")
    servers = tuple(_server(f"mcpServers[{index}]", entry) for index, entry in enumerate(given))
    names = [server.name for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f'mcpServers names "{name}" twice; give each server a name of its own.')
    return servers


def _server(where: str, entry: object) -> McpServer:
    if not isinstance(entry, dict):
        raise ArgumentError(f"{where} is {type(entry).__name__}; expected an object with name and command or url.")
    from crow.tools import HttpServer, StdioServer

    name = _text(where, entry, "name")
    match entry.get("type"):
        case None | "stdio":
            args = entry.get("args")
            if not isinstance(args, list | None) or not all(isinstance(arg, str) for arg in args or ()):
                raise ArgumentError(f"{where}.args ({name}): expected a list of strings.")
            command = _text(where, entry, "command")
            return StdioServer(name=name, command=command, args=tuple(args or ()), env=_pairs(where, entry, "env"))
        case "http" | "sse" as transport:
            url, headers = _text(where, entry, "url"), _pairs(where, entry, "headers")
            return HttpServer(name=name, url=url, headers=headers, transport=transport)
        case kind:
            raise ArgumentError(f'{where}.type ({name}) is "{kind}"; crow takes stdio, http and sse.')


def _text(where: str, entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{where}.{key}: expected a string that is not empty.")
    return value


def _pairs(where: str, entry: Mapping[str, Any], key: str) -> tuple[tuple[str, str], ...]:
    """`[{"name": …, "value": …}]` as pairs; values are never shown in errors, they may be secrets."""
    given = entry.get(key)
    pairs = []
    for item in [] if given is None else given if isinstance(given, list) else [given]:
        match item:
            case {"name": str(name), "value": str(value)}:
                pairs.append((name, value))
            case _:
                raise ArgumentError(f"{where}.{key}: expected a list of objects with name and value, both strings.")
    return tuple(pairs)


def _object(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key)
    return value if isinstance(value, dict) else {}

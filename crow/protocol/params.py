"""Reads the parameters of `initialize` and of requests that open or list sessions.

This module reads the raw objects and not the SDK's models, because the models drop members and list items that they do
not know.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crow.domain.entries import PromptName
from crow.domain.errors import ArgumentError
from crow.domain.events import ElicitationKind
from crow.domain.messages import JsonObject
from crow.domain.text import TITLE_CHARS, on_one_line, shorten
from crow.domain.trace_context import trace_context_from
from crow.protocol.frames import describe_member
from crow.store import SessionSetup
from crow.store.codec import merged_metadata
from crow.tools.servers import HttpServer, McpServer, StdioServer

_MAX_DIRECTORIES = 100
_MAX_NAME_CHARS = 200
_PROGRAM_CHARS = 80
_ARCHIVED_FILTERS: Mapping[str, bool | None] = {"exclude": False, "include": None, "only": True}
_ELICITATION_KINDS: tuple[ElicitationKind, ...] = ("form", "url")


_CODE_COMPANION = "CodeCompanion.nvim"
"""The name that this client sends in `clientInfo`. The client authenticates at every start, and if this fails, shows
the user the whole error object. So the user would see the same sentence twice, in `message` and in `data`. Crow puts it
into both, because some clients show only one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCapabilities:
    """The capabilities of a client: what it can show, and which requests it can answer."""

    reads_files: bool = False
    """Whether the editor reads files for crow."""
    writes_files: bool = False
    """Whether the editor writes files for crow."""
    terminals: bool = False
    """Whether the editor runs commands in its terminals."""
    terminal_output: bool = False
    """Whether the client can show the output of a command as a terminal within a call. Crow sends the output."""
    terminal_auth: bool = False
    """Whether the client can start a login in a terminal."""
    terminal_auth_by_meta: bool = False
    """Whether the client reads the command of such a login from `_meta`, as in an older form of the protocol."""
    notices: bool = False
    """Whether the client shows notices."""
    compaction: bool = False
    """Whether the client shows compactions."""
    plans: bool = False
    """Whether the client shows plans that have ids."""
    boolean_options: bool = False
    """Whether the client shows config options that are on or off."""
    marked_remarks: bool = False
    """Whether the client can tell crow's remarks from the model's answers, if they are marked."""
    subagents: bool = False
    """Whether the client shows subagents as sessions."""
    cancelled_calls: bool = False
    """Whether crow may give a tool call the status `cancelled`."""
    cursors: bool = False
    """Whether each update carries a cursor, from which the client can resume the session."""
    shows_error_objects: bool = False
    """Whether the client shows its user the whole error object, with the sentence in `message` and again in `data`, for
    every error except an internal one."""
    question_kinds: frozenset[ElicitationKind] = frozenset()
    """The kinds of questions by MCP servers that the client can ask its user."""
    client: JsonObject = field(default_factory=dict)
    """The client's `name` and `version`, as far as it states them."""
    is_translated: bool = False
    """Whether the updates are translated into those of version 2 of the protocol (see `v2.py`). The translation needs
    more than a client of version 1 does: updates with the client's own prompts and the states of its turns, and a mark
    on each update of a load."""


def client_capabilities(params: Mapping[str, Any]) -> ClientCapabilities:
    """Read the capabilities in the parameters of `initialize`. A member that is missing, null or of the wrong type
    counts as not supported."""
    offered = _object(params, "clientCapabilities")
    files, session = _object(offered, "fs"), _object(offered, "session")
    meta = _object(offered, "_meta")
    return ClientCapabilities(
        reads_files=files.get("readTextFile") is True,
        writes_files=files.get("writeTextFile") is True,
        terminals=offered.get("terminal") is True,
        terminal_output=meta.get("terminal_output") is True,
        terminal_auth=_object(offered, "auth").get("terminal") is True or meta.get("terminal-auth") is True,
        terminal_auth_by_meta=meta.get("terminal-auth") is True,
        notices=isinstance(session.get("notices"), dict),
        compaction=isinstance(session.get("compaction"), dict),
        subagents=isinstance(offered.get("subagents"), dict),
        plans=isinstance(offered.get("plan"), dict),
        cursors=meta.get("acp/cursor") is True,
        shows_error_objects=_object(params, "clientInfo").get("name") == _CODE_COMPANION,
        marked_remarks=_crow_meta(offered).get("remarks") is True,
        boolean_options=isinstance(_object(session, "configOptions").get("boolean"), dict),
        question_kinds=question_kinds(_object(offered, "elicitation")),
        client=client_in(_object(params, "clientInfo")),
    )


def question_kinds(offered: Mapping[str, Any]) -> frozenset[ElicitationKind]:
    """Return the kinds of questions that a client offers to ask its user."""
    return frozenset(kind for kind in _ELICITATION_KINDS if isinstance(offered.get(kind), dict))


def client_in(info: Mapping[str, Any]) -> dict[str, object]:
    """Return `ClientCapabilities.client` from the client's description of itself."""
    return {
        key: shorten(on_one_line(info[key]), _PROGRAM_CHARS)
        for key in ("name", "version")
        if isinstance(info.get(key), str)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest(SessionSetup):
    """A request that opens a session."""

    servers: tuple[McpServer, ...]
    """The MCP servers that the client gives to the session."""
    is_watcher: bool = False
    """Whether the client only watches the session, and may not send prompts to it."""
    missing: str = ""
    """An error message if `cwd` does not exist, else empty."""


def open_request_from(params: Mapping[str, Any], *, may_be_missing: bool = False) -> OpenRequest:
    """Read the parameters of a request that opens a session. Unknown members of `_meta` are ignored.

    If `cwd` does not exist and `may_be_missing` is true, set `missing` in the result instead of raising an error.

    :raises ArgumentError: a parameter cannot be used. The message names the parameter.
    """
    directories = params.get("additionalDirectories") or ()
    if not isinstance(directories, list | tuple) or len(directories) > _MAX_DIRECTORIES:
        raise ArgumentError(f"additionalDirectories: expected a list of at most {_MAX_DIRECTORIES} absolute paths.")
    meta = _object(params, "_meta")
    options = _object(_object(meta, "claudeCode"), "options")
    cwd, missing = _absolute_path("cwd", params["cwd"]), ""
    if not os.path.isdir(cwd):
        missing = f'cwd is "{cwd}", which is not an existing directory.'
        if not may_be_missing:
            raise ArgumentError(missing)
    check = _absolute_path if missing else _existing_directory
    return OpenRequest(
        cwd=cwd,
        missing=missing,
        directories=tuple(check("additionalDirectories", path) for path in directories),
        servers=mcp_servers_from(params.get("mcpServers")),
        model=_model("_meta.model", meta) or _model("_meta.claudeCode.options.model", options),
        config={
            **_meta_system_prompt(meta.get("systemPrompt")),
            **_system_prompt(params.get("systemPrompt")),
            **_max_turns(options.get("maxTurns")),
        },
        metadata=session_metadata(params),
        is_watcher=_crow_meta(params).get("watch") is True,
    )


def wants_directories(params: Mapping[str, Any]) -> bool:
    """Return whether a `session/list` also asks for the directories of all sessions. Only the first page has them."""
    return _crow_meta(params).get("directories") is True and params.get("cursor") is None


def mcp_servers_from(servers: object) -> tuple[McpServer, ...]:
    """Read the parameter `mcpServers` of a request that opens a session. None means that there are no servers.

    :raises ArgumentError: an entry is not a valid server, or two servers have the same name.
    """
    if servers is None:
        return ()
    if not isinstance(servers, list):
        raise ArgumentError(f"mcpServers is {describe_member(servers)}; expected a list of servers.")
    found: dict[str, McpServer] = {}
    for index, entry in enumerate(servers):
        server = _server(f"mcpServers[{index}]", entry)
        if server.name in found:
            raise ArgumentError(f'mcpServers contains "{server.name}" twice; give each server its own name.')
        found[server.name] = server
    return tuple(found.values())


def session_alias(params: Mapping[str, Any]) -> str | None:
    """Read `_meta.crow.alias`, the alias of the session to open or create. Return None if the request has no alias.

    :raises ArgumentError: the alias is not a valid name.
    """
    alias = _crow_meta(params).get("alias")
    if alias is None:
        return None
    if not isinstance(alias, str) or not alias.strip() or len(alias) > _MAX_NAME_CHARS or not alias.isprintable():
        raise ArgumentError(
            f'_meta.crow.alias: expected a name of 1 to {_MAX_NAME_CHARS} characters, such as "cli:default".'
        )
    return alias


def session_name(params: Mapping[str, Any]) -> str | None:
    """Read `_meta.crow.name` of a `session/list`: the id, alias or title of the sessions to list, or the start of
    their ids. Return None to list all sessions."""
    name = _crow_meta(params).get("name")
    return name if isinstance(name, str) and name else None


def session_metadata(params: Mapping[str, Any]) -> JsonObject:
    """Read `_meta.crow.metadata`, an object to merge into the session's metadata. If a member is null, merging removes
    that member.

    :raises ArgumentError: the value is not an object, is too large, or is nested too deeply.
    """
    metadata = _crow_meta(params).get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ArgumentError(
            f'_meta.crow.metadata is {describe_member(metadata)}; expected an object such as {{"task": "42"}}.'
        )
    merged_metadata({}, metadata)
    return metadata


def prompt_name(params: Mapping[str, Any]) -> PromptName | None:
    """Read `_meta.crow.promptId`, the client's id for the prompt of the request. Return None if there is none.

    :raises ArgumentError: the id is not a valid name.
    """
    prompt_id = _crow_meta(params).get("promptId")
    if prompt_id is None:
        return None
    if not isinstance(prompt_id, str) or not 0 < len(prompt_id) <= _MAX_NAME_CHARS or not prompt_id.isprintable():
        raise ArgumentError(
            f"_meta.crow.promptId is {describe_member(prompt_id)}; expected a string of 1 to {_MAX_NAME_CHARS} "
            "printable characters that no other prompt of the session has, such as a UUID."
        )
    text = json.dumps(params.get("prompt"), sort_keys=True)
    return PromptName(id=prompt_id, digest=hashlib.sha256(text.encode()).hexdigest())


def sent_prompts(params: Mapping[str, Any]) -> frozenset[str]:
    """Read `_meta.crow.promptIds`, the ids of prompts that the client has sent and therefore shows already.

    :raises ArgumentError: the value is not a list of strings.
    """
    ids = _crow_meta(params).get("promptIds", ())
    if not isinstance(ids, list | tuple) or not all(isinstance(each, str) for each in ids):
        raise ArgumentError(f"_meta.crow.promptIds is {describe_member(ids)}; expected a list of the ids of prompts.")
    return frozenset(ids)


def fork_entry(params: Mapping[str, Any]) -> int | None:
    """Read `_meta.crow.entry`, the id of the entry to fork from. Return None if the request has no such member.

    :raises ArgumentError: the value is not a positive whole number.
    """
    entry = _crow_meta(params).get("entry")
    if entry is None:
        return None
    if not isinstance(entry, int) or isinstance(entry, bool) or not 0 < entry < 2**63:
        raise ArgumentError(
            f"_meta.crow.entry is {describe_member(entry)}; expected the id of an entry, a positive number."
        )
    return entry


def trace_context(params: Mapping[str, Any]) -> dict[str, str]:
    """Read the trace context in `_meta`. Return an empty dict if there is none."""
    return trace_context_from(_object(params, "_meta"))


def archived_filter(params: Mapping[str, Any]) -> bool | None:
    """Return which sessions to list: True for archived sessions only, False for sessions that are not archived, and
    None for both.

    `_meta.crow.archived` is the older way to ask for archived sessions. This member is ignored if `archived` is
    present.

    :raises ArgumentError: `archived` has an unknown value.
    """
    wanted = params.get("archived")
    if wanted is None:
        return _crow_meta(params).get("archived") is True
    if not isinstance(wanted, str) or wanted not in _ARCHIVED_FILTERS:
        raise ArgumentError(f"archived is {describe_member(wanted)}; expected one of {', '.join(_ARCHIVED_FILTERS)}.")
    return _ARCHIVED_FILTERS[wanted]


def new_title(text: str) -> str:
    """Turn `text` into a title to store: one line without hidden characters, shortened if it is too long.

    :raises ArgumentError: the text has no visible characters.
    """
    title = on_one_line(text)
    if not title:
        raise ArgumentError("title contains no visible characters.")
    return shorten(title, TITLE_CHARS)


def wants_full_replay(params: Mapping[str, Any]) -> bool:
    """Return whether `_meta.crow.replay` is "full". In that case, `session/load` sends whole tool results even in a
    long session.

    :raises ArgumentError: the value is neither "full" nor "short".
    """
    replay = _crow_meta(params).get("replay")
    if replay not in (None, "full", "short"):
        raise ArgumentError(
            f'_meta.crow.replay is {describe_member(replay)}; expected "full" or "short" (the default).'
        )
    return replay == "full"


def _server(where: str, entry: object) -> McpServer:
    if not isinstance(entry, dict):
        raise ArgumentError(
            f'{where} is {describe_member(entry)}; expected an object with "name" and either "command" or "url".'
        )
    name = _text(where, entry, "name")
    match entry.get("type"):
        case None | "stdio":
            args = [] if entry.get("args") is None else entry["args"]
            if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
                raise ArgumentError(f"{where}.args ({name}): expected a list of strings.")
            command = _text(where, entry, "command")
            return StdioServer(name=name, command=command, args=tuple(args), env=_pairs(where, entry, "env"))
        case "http" | "sse" as transport:
            url, headers = _text(where, entry, "url"), _pairs(where, entry, "headers")
            return HttpServer(name=name, url=url, headers=headers, transport=transport)
        case kind:
            raise ArgumentError(f"{where}.type ({name}) is {describe_member(kind)}; expected stdio, http or sse.")


def _text(where: str, entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{where}.{key}: expected a string that is not empty.")
    return value


def _pairs(where: str, entry: Mapping[str, Any], key: str) -> tuple[tuple[str, str], ...]:
    """Read a list of `{"name": ..., "value": ...}` as pairs. Error messages do not show the values, because they may
    be secrets."""
    items = entry.get(key)
    pairs = []
    for item in [] if items is None else items if isinstance(items, list) else [items]:
        match item:
            case {"name": str(name), "value": str(value)}:
                pairs.append((name, value))
            case _:
                raise ArgumentError(
                    f'{where}.{key}: expected a list of objects in which "name" and "value" are strings.'
                )
    return tuple(pairs)


def _absolute_path(name: str, path: object) -> str:
    if not isinstance(path, str):
        raise ArgumentError(f"{name}: expected an absolute path as a string.")
    if not os.path.isabs(path):
        raise ArgumentError(f'{name} is "{path}"; expected an absolute path, such as "/home/me/project".')
    return path


def _existing_directory(name: str, path: object) -> str:
    directory = _absolute_path(name, path)
    if not os.path.isdir(directory):
        raise ArgumentError(f'{name} is "{directory}", which is not an existing directory.')
    return directory


def _system_prompt(prompt: object) -> dict[str, object]:
    """Read `systemPrompt` as a change of the session's configuration. Null changes nothing.

    With the mode `override`, the text replaces crow's role in the system prompt. With the mode `append`, the text is
    added to the end of the system prompt.
    """
    if prompt is None:
        return {}
    if not isinstance(prompt, dict):
        raise ArgumentError(f'systemPrompt is {describe_member(prompt)}; expected an object with "mode" and "content".')
    mode, content = prompt.get("mode"), prompt.get("content")
    if mode not in ("append", "override"):
        raise ArgumentError(f'systemPrompt.mode is {describe_member(mode)}; expected "append" or "override".')
    if not isinstance(content, list):
        raise ArgumentError(f"systemPrompt.content is {describe_member(content)}; expected a list of text blocks.")
    texts = []
    for index, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                example = '{"type": "text", "text": "Be brief."}'
                raise ArgumentError(f"systemPrompt.content[{index}]: expected a text block, such as {example}.")
    if not "".join(texts).strip():
        raise ArgumentError("systemPrompt.content contains no text. To send no instructions, omit systemPrompt.")
    return _prompt_config(mode, "\n\n".join(texts))


def _meta_system_prompt(prompt: object) -> dict[str, object]:
    """Read `_meta.systemPrompt`, which some clients send instead of `systemPrompt`. A string counts as the mode
    `override`, and `{"append": text}` counts as the mode `append`."""
    match prompt:
        case None:
            return {}
        case str():
            return _prompt_config("override", prompt) if prompt.strip() else {}
        case {"append": str(text)}:
            return _prompt_config("append", text) if text.strip() else {}
        case _:
            raise ArgumentError('_meta.systemPrompt: expected a string, or an object such as {"append": "Be brief."}.')


def _prompt_config(mode: object, text: str) -> dict[str, object]:
    """Return a change of the configuration that stores `text` for `mode` and removes any text for the other mode."""
    appended = mode == "append"
    return {"system_prompt": None if appended else text, "system_prompt_append": text if appended else None}


def _max_turns(count: object) -> dict[str, object]:
    if count is None:
        return {}
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError("_meta.claudeCode.options.maxTurns: expected a whole number above 0.")
    return {"max_turns": count}


def _model(name: str, options: Mapping[str, Any]) -> str | None:
    value = options.get("model")
    if value is not None and (not isinstance(value, str) or len(value) > _MAX_NAME_CHARS):
        raise ArgumentError(f"{name}: expected the name of a model, at most {_MAX_NAME_CHARS} characters.")
    return value or None


def _crow_meta(params: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(_object(params, "_meta"), "crow")


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}

"""What a request that opens a session asks for: where it works, with which servers, and what `_meta` adds.

Strategy: read from the raw parameters once, into one frozen value; what would make the session useless is an error
that names the parameter, what `_meta` holds that crow does not know is left alone. Looks at directories, opens nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.frontend.params import mcp_servers_from
from crow.store import SessionRow

if TYPE_CHECKING:
    from crow.tools import McpServer

__all__ = ["NULLABLE", "Opening", "opening_from", "session_info", "with_users_own"]

NULLABLE = {"mcpServers": (), "additionalDirectories": ()}
"""Parameters for which null means their default; the SDK's models refuse it."""

MOST_DIRECTORIES = 100
MODEL_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """`model` None: as configured. `config` is what the session keeps of `_meta`."""

    cwd: str
    directories: tuple[str, ...]
    servers: tuple[McpServer, ...]
    model: str | None = None
    config: JsonObject = field(default_factory=dict)


def opening_from(params: Mapping[str, Any]) -> Opening:
    """The opening that `params` of session/new, load or resume ask for.

    :raises ArgumentError: a directory, a server or a value of `_meta` that cannot be used.
    """
    given = params.get("additionalDirectories") or ()
    if not isinstance(given, list | tuple) or len(given) > MOST_DIRECTORIES:
        raise ArgumentError(f"additionalDirectories: expected a list of at most {MOST_DIRECTORIES} absolute paths.")
    meta = _object(params, "_meta")
    options = _object(_object(meta, "claudeCode"), "options")
    return Opening(
        cwd=existing_directory("cwd", params["cwd"]),
        directories=tuple(existing_directory("additionalDirectories", path) for path in given),
        servers=mcp_servers_from(params.get("mcpServers")),
        model=_model("_meta.model", meta) or _model("_meta.claudeCode.options.model", options),
        config=_system_prompt(meta.get("systemPrompt")) | _most_turns(options.get("maxTurns")),
    )


def with_users_own(own: Sequence[McpServer], given: Sequence[McpServer]) -> tuple[McpServer, ...]:
    """The user's servers, then those of the editor that are not the same; of two with one name both stay, as the
    user's rules about a server of theirs must never hold for another."""
    known = {(server.name, address(server)) for server in own}
    return (*own, *(server for server in given if (server.name, address(server)) not in known))


def address(server: McpServer) -> tuple[str, ...]:
    """What tells whether two servers are the same one."""
    from crow.tools import StdioServer

    return (server.command, *server.args) if isinstance(server, StdioServer) else (server.url,)


def existing_directory(name: str, path: object) -> str:
    """`path`, if sessions can work there. :raises ArgumentError: relative, missing, or no directory."""
    if not isinstance(path, str):
        raise ArgumentError(f"{name}: expected an absolute path as a string.")
    if not Path(path).is_absolute():
        raise ArgumentError(f'{name} is "{path}"; expected an absolute path, such as "/home/me/project".')
    try:
        found = Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL in it
        found = False
    if not found:
        raise ArgumentError(f'{name} is "{path}", which is not a directory that exists here.')
    return path


def session_info(row: SessionRow) -> dict[str, Any]:
    """A row as `session/list` shows it."""
    updated = datetime.datetime.fromtimestamp(row.updated_ms / 1000, datetime.UTC)
    info: dict[str, Any] = {
        "sessionId": row.id,
        "cwd": row.cwd,
        "updatedAt": updated.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    if row.title is not None:
        info["title"] = row.title
    if row.additional_directories:
        info["additionalDirectories"] = list(row.additional_directories)
    return info


def _system_prompt(given: object) -> dict[str, object]:
    """A text stands in for crow's own role; `{"append": text}` comes after everything else."""
    match given:
        case None:
            return {}
        case str():
            return {"system_prompt": given} if given.strip() else {}
        case {"append": str(text)}:
            return {"system_prompt_append": text} if text.strip() else {}
        case _:
            raise ArgumentError('_meta.systemPrompt: expected a text, or an object such as {"append": "Be brief."}.')


def _most_turns(given: object) -> dict[str, object]:
    if given is None:
        return {}
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ArgumentError("_meta.claudeCode.options.maxTurns: expected a whole number above 0.")
    return {"max_turns": given}


def _model(name: str, given: Mapping[str, Any]) -> str | None:
    value = given.get("model")
    if value is not None and (not isinstance(value, str) or len(value) > MODEL_CHARS):
        raise ArgumentError(f"{name}: expected the name of a model, of at most {MODEL_CHARS} characters.")
    return value or None


def _object(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key)
    return value if isinstance(value, dict) else {}

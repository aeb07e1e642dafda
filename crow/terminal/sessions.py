"""Finds, lists and opens the sessions that a terminal client works in."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from crow.agent.permissions.rules import MODES
from crow.domain.errors import ArgumentError
from crow.store.admin import SessionMatch, only_match
from crow.terminal.connection import Connection, Params

_LOOKS_LIKE_ID = re.compile(
    r"crow-.*"
    r"|task-[0-9a-f]{3,16}"
    r"|(claude-code|codex|pi|opencode|goose|openai-json)-(ses_.*|[0-9a-f_-]*[0-9][0-9a-f_-]*)"
    r"|[0-9a-f]{8}-[0-9a-f-]{4,27}|[0-9a-f]{12,}",
    re.DOTALL,
)
"""Matches the id, or the start of the id, of a session, of a subagent, of an imported session, or of another tool's
session. A new session does not get such a text as its alias, because the user probably meant a stored session."""

_NAMED_DIRECTORIES = 5


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the session and its workspace."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--session",
        metavar="SESSION",
        help="continue this session, named by its id, the start of its id, its alias or its title; if there is none,"
        " start a session with this alias",
    )
    which.add_argument("--continue", dest="newest", action="store_true", help="continue the newest session of --cwd")
    parser.add_argument(
        "--cwd", metavar="DIR", help="the workspace (default: the workspace of the --session, or the current directory)"
    )


def check_session_options(options: argparse.Namespace, *, is_remote: bool = False) -> str | None:
    """Check --mode, --session and --cwd, and return the directory of --cwd. If `is_remote` is true, only the server can
    check this directory. :raises ArgumentError: one of the options cannot be used."""
    if options.mode is not None and options.mode not in MODES:
        raise ArgumentError(f'--mode is "{options.mode}"; expected one of {", ".join(MODES)}.')
    if options.session is not None and not options.session.strip():
        raise ArgumentError("--session is empty; expected the id, alias or title of a session.")
    if options.cwd is None or is_remote:
        return options.cwd or None
    if not os.path.isdir(options.cwd):
        raise ArgumentError(f'--cwd is "{options.cwd}", which is not an existing directory.')
    return str(Path(options.cwd).resolve())


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """An open session."""

    id: str
    cwd: str
    response: Params
    """The response to the request that opened the session."""
    is_new: bool
    """Whether the session has just been created, so that it has no messages yet."""
    alias: str = ""
    """The alias that the user gave to a new session with `--session`. Empty for other sessions."""

    @property
    def notice(self) -> str:
        """A sentence for the user about a new session with an alias, or an empty text."""
        return f'No session "{self.alias}" exists, so a new one with this alias begins.' if self.alias else ""


async def open_session(
    connection: Connection, options: argparse.Namespace, cwd: str | None, *, is_replayed: bool = False
) -> OpenedSession:
    """Open the session that the options name. If `is_replayed` is true, the client first gets the history of a stored
    session.

    :raises ArgumentError: the session to continue or to copy does not exist, or there is no workspace for a new one.
    :raises RequestError: the session cannot be opened.
    """
    is_fork = getattr(options, "fork", False)
    here = cwd or connection.cwd
    known: Params | None = None
    if options.newest:
        known = await _newest_session(connection, here)
    elif options.session:
        known = await find_session(connection, options.session)
        if known is None and is_fork:
            raise ArgumentError(
                f'There is no session "{options.session}" to copy. Run "crow sessions" to list the sessions.'
            )
    if known is None:
        return await _new_session(connection, options, cwd)
    session_id, here = known["sessionId"], cwd or known["cwd"]
    params: dict[str, Any] = {"cwd": here, "mcpServers": [], "sessionId": session_id} | _chosen_model(options)
    method = "session/fork" if is_fork else "session/load" if is_replayed else "session/resume"
    opened = await connection.call(method, params)
    session_id = opened["sessionId"] if is_fork else session_id
    if is_fork and options.model:
        value = {"configId": "model", "value": options.model}
        await connection.call("session/set_config_option", {"sessionId": session_id, **value})
    await _set_mode(connection, session_id, opened, options.mode)
    return OpenedSession(session_id, here, opened, is_new=False)


async def _new_session(connection: Connection, options: argparse.Namespace, cwd: str | None) -> OpenedSession:
    here = cwd or connection.cwd
    if here is None:
        raise ArgumentError(f"Choose a directory on the server with --cwd DIR.{await _known_directories(connection)}")
    meta = {"crow": {"alias": options.session}} if options.session else {}
    params = {"cwd": here, "mcpServers": [], "_meta": meta | _chosen_model(options).get("_meta", {})}
    opened = await connection.call("session/new", params)
    await _set_mode(connection, opened["sessionId"], opened, options.mode)
    return OpenedSession(opened["sessionId"], here, opened, is_new=True, alias=options.session or "")


def _chosen_model(options: argparse.Namespace) -> dict[str, Any]:
    return {"_meta": {"model": options.model}} if options.model else {}


async def _set_mode(connection: Connection, session_id: str, opened: Params, mode: str | None) -> None:
    if mode and (opened.get("modes") or {}).get("currentModeId") != mode:
        await connection.call("session/set_mode", {"sessionId": session_id, "modeId": mode})


async def _newest_session(connection: Connection, cwd: str | None) -> Params:
    listed = await list_sessions(connection, 1, cwd)
    if not listed:
        place = "on the server" if cwd is None else f"in {cwd}"
        raise ArgumentError(f"There is no session {place} to continue. To start one, leave out --continue.")
    return listed[0]


async def _known_directories(connection: Connection) -> str:
    """Return a sentence with the directories of the server's sessions, or an empty text."""
    listed = await connection.call("session/list", {"_meta": {"crow": {"directories": True}}})
    found = listed.get("_meta", {}).get("crow", {}).get("directories", ())
    names = [str(each["cwd"]) for each in found][:_NAMED_DIRECTORIES]
    return f" The server has sessions in {', '.join(names)}." if names else ""


async def find_session(connection: Connection, name: str) -> Params | None:
    """Return the session that `name` means, as an item of `session/list`: by its id, its alias, its title or the start
    of its id. Return None if there is no such session, so that `name` can become the alias of a new one.

    :raises ~crow.domain.errors.ArgumentError: `name` may mean several sessions, or it looks like an id that no session
        has.
    """
    listed: Sequence[Params] = (await connection.call("session/list", {"_meta": {"crow": {"name": name}}}))["sessions"]
    if not listed and not _LOOKS_LIKE_ID.fullmatch(name):
        return None
    found = only_match(name, [SessionMatch(id=each["sessionId"], title=each.get("title")) for each in listed])
    return next(each for each in listed if each["sessionId"] == found.id)


async def list_sessions(connection: Connection, most: int, cwd: str | None = None) -> list[Params]:
    """Return at most `most` sessions of a directory, or of all directories, as items of `session/list`."""
    found: list[Params] = []
    params: dict[str, Any] = {} if cwd is None else {"cwd": cwd}
    while True:
        page = await connection.call("session/list", params)
        found += page["sessions"]
        if len(found) >= most or not page["sessions"] or page.get("nextCursor") is None:
            return found[:most]
        params["cursor"] = page["nextCursor"]


def alias_of(session: Mapping[str, Any]) -> str:
    """Return the alias of an item of `session/list`, or an empty text."""
    return str(session.get("_meta", {}).get("crow", {}).get("alias", ""))


def line_of(session: Params) -> str:
    """Return a session as a line of a list: when it was used, its title, its alias and its workspace."""
    when = datetime.fromisoformat(session["updatedAt"]).astimezone().strftime("%b %d %H:%M")
    title = session.get("title") or session["sessionId"]
    return f"{when}  " + " · ".join(filter(None, [title, alias_of(session), session["cwd"]]))

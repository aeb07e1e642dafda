"""`crow mcp`: lists, adds, removes and tries the MCP servers in the user's config.toml, and logs in to them."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from crow import adapters
from crow.cli.loading import load_and_log
from crow.cli.output import Column, in_terminal, print_json, print_table, say
from crow.domain.errors import ArgumentError, ConfigError, CrowError, ToolServerError
from crow.domain.text import on_one_line, plural
from crow.settings import Loaded
from crow.settings.values import McpServerSettings, expectation
from crow.settings.write import remove_server, save_server
from crow.terminal.browser import open_page
from crow.tools.servers import HttpServer, LoginQuestion, McpServer, OAuthOptions, ServerReport, StdioServer

_NAME_CHARS = 64
_INPUT_BYTES = 65_536


def run_command(options: argparse.Namespace) -> int | None:
    """`crow mcp`: run one of its commands."""
    loaded = load_and_log(options)
    match options.mcp:
        case "add":
            _add_server(loaded, options)
        case "remove":
            remove(loaded, options)
        case "login":
            return asyncio.run(_log_in(loaded, options))
        case "logout":
            asyncio.run(_log_out(loaded, options))
        case "test":
            return asyncio.run(_try_servers(loaded, options))
        case _:
            _list_servers(loaded, options)
    return None


def _list_servers(loaded: Loaded, options: argparse.Namespace) -> None:
    """`crow mcp list`: print each server in the user's config.toml with its state: disabled, logged in, or the problem
    with the server."""
    if loaded.problem is not None:
        raise loaded.problem
    rows = [_describe_server(loaded, name) for name in _servers_of(loaded)]
    if options.json:
        return print_json(rows)
    columns = (Column("Name", "fixed"), Column("Server", "text"), Column("State", "text"))
    cells = [(row["name"], row["server"], ", ".join(row["state"])) for row in rows]
    return print_table(columns, cells, empty='There are no MCP servers. Add one: crow mcp add NAME "URL or command"')


def _describe_server(loaded: Loaded, name: str) -> dict[str, Any]:
    settings = loaded.settings.mcp_servers[name]
    where = str(settings.masked()["url"]).partition("?")[0] if settings.url else settings.command or ""
    state = [] if settings.enabled else ["disabled"]
    server = _server_named(loaded, name)
    if server.options.problem:
        state.append(server.options.problem)
    elif isinstance(server, HttpServer):
        try:
            if (login := adapters.read_login(loaded, server)) is not None:
                state.append(f"logged in at {login.issuer}" if login.issuer else "logged in")
        except CrowError as error:
            state.append(str(error))
    return {"name": name, "server": where, "state": state}


def _add_server(loaded: Loaded, options: argparse.Namespace) -> None:
    """`crow mcp add`: write a server into the user's config.toml."""
    name, target, args = options.name, options.target, options.args
    if not 1 <= len(name) <= _NAME_CHARS:
        raise ArgumentError(f"The name of a server has 1 to {_NAME_CHARS} characters, and {name!r} has {len(name)}.")
    values: dict[str, Any] = {}
    if "://" in target:
        if args or options.env or options.sandbox:
            raise ArgumentError(f"{target} is a URL, which takes no arguments, no --env and no --sandbox.")
        values["url"] = target
        if options.header:
            values["headers"] = dict(_pairs(options.header, ":", "--header", "'Authorization: Bearer ${TOKEN}'"))
        if options.transport:
            values["transport"] = options.transport
    else:
        if options.header or options.transport:
            raise ArgumentError(f"{target} is a command: --header and --transport are for URLs.")
        values["command"] = os.path.abspath(os.path.expanduser(target)) if os.path.dirname(target) else target
        if args:
            values["args"] = args
        if options.env:
            values["env"] = dict(_pairs(options.env, "=", "--env", "TOKEN=${TOKEN}"))
        if options.sandbox:
            values["sandbox"] = options.sandbox
    _check_values(name, values)
    save_server(loaded.paths.config_file, name, values, replace=options.replace)
    say(f"Added {name} to {loaded.paths.config_file}. To try it: crow mcp test {name}")


def _pairs(given: Sequence[str], sign: str, option: str, example: str) -> Iterator[tuple[str, str]]:
    for text in given:
        name, found, value = text.partition(sign)
        if not found or not name.strip():
            raise ArgumentError(f"{option} is {name!r}; expected a name and a value, such as {example}.")
        yield name.strip(), value.strip() if sign == ":" else value


def _check_values(name: str, values: Mapping[str, Any]) -> None:
    """Check the values for a server's settings. :raises ConfigError: a value is not valid for its setting."""
    try:
        McpServerSettings.model_validate(values)
    except ValueError as error:
        keys = [str(detail["loc"][0]) for detail in getattr(error, "errors", list)() if detail["loc"]]
        known = [key for key in keys if key in McpServerSettings.model_fields]
        expected = expectation(McpServerSettings.model_fields[known[0]]) if known else "a command or a URL"
        raise ConfigError(f"{known[0] if known else name} cannot be used; expected {expected}.") from None


def remove(loaded: Loaded, options: argparse.Namespace) -> None:
    """`crow mcp remove`: remove a server from the user's config.toml."""
    server = _server_named(loaded, options.name) if options.name in _servers_of(loaded) else None
    remove_server(loaded.paths.config_file, options.name)
    say(f"Removed {options.name} from {loaded.paths.config_file}.")
    if isinstance(server, HttpServer):
        try:
            login = adapters.read_login(loaded, server)
        except CrowError:
            return
        if login is not None:
            say(f"Its login is still stored; to revoke and remove it: crow mcp logout {login.account.url}")


async def _log_in(loaded: Loaded, options: argparse.Namespace) -> int:
    """`crow mcp login`: let the user log in to a server in a browser. Return 0. :raises ToolServerError: the server
    cannot be used afterwards."""
    server = _http_server(loaded, options.server)
    if any(name.casefold() == "authorization" for name, _ in server.headers):
        raise ArgumentError(
            f"{server.name} has an Authorization header in the settings; to log in instead, remove this header."
        )
    try:
        old = await anyio.to_thread.run_sync(adapters.read_login, loaded, server)
    except ToolServerError:  # a damaged file is useless, so it may be replaced
        old = None
        await anyio.to_thread.run_sync(adapters.remove_login, loaded, server)
    report = await _try_one(loaded, server, _TerminalAsker(opens_browser=options.browser))
    new = await anyio.to_thread.run_sync(adapters.read_login, loaded, server)
    if new is None or new == old:
        if report.problem:
            raise ToolServerError(f"{server.name}: {report.problem}")
        say(f"{server.name} asked for no login; it is ready.")
        return 0
    say(f"Logged in to {server.name}{f' at {new.issuer}' if new.issuer else ''}.")
    if report.problem:
        raise ToolServerError(f"{server.name} still does not work: {report.problem}")
    return 0


async def _log_out(loaded: Loaded, options: argparse.Namespace) -> None:
    """`crow mcp logout`: delete the tokens of a login. If the authorization server can revoke tokens, they are revoked
    too."""
    server = _http_server(loaded, options.server)
    try:
        login = await anyio.to_thread.run_sync(adapters.read_login, loaded, server)
    except ToolServerError as error:
        await anyio.to_thread.run_sync(adapters.remove_login, loaded, server)
        say(f"Deleted the login of {server.name}. Its tokens were not revoked: {error}")
        return
    if login is None:
        say(f"Crow is not logged in to {server.name}.")
        return
    await anyio.to_thread.run_sync(adapters.remove_login, loaded, server)
    try:
        if await adapters.revoke_login(login):
            say(f"Logged out of {server.name}: its tokens are revoked and deleted.")
        else:
            say(f"Deleted the login of {server.name}. {login.issuer or 'Its server'} does not offer to revoke tokens.")
    except CrowError as error:
        say(f"Deleted the login of {server.name}. Its tokens were not revoked: {error}")


async def _try_servers(loaded: Loaded, options: argparse.Namespace) -> int:
    """`crow mcp test`: start servers, and print what they list and what is wrong. Return 1 if any server failed,
    otherwise 0."""
    if loaded.problem is not None:
        raise loaded.problem
    names = options.names or [name for name, each in loaded.settings.mcp_servers.items() if each.enabled]
    if not names:
        print("There are no enabled MCP servers. Add one: crow mcp add NAME URL, or crow mcp add NAME COMMAND")
    failed = False
    for name in names:
        report = await _try_one(loaded, _server_named(loaded, name), None)
        is_bad = bool(report.problem or any(each.problem for each in report.listings))
        failed = failed or is_bad
        if options.json:
            print_json([{"ok": not is_bad, **asdict(report)}])
        else:
            for line in _lines_of(report):
                say(line)
    return 1 if failed else 0


def _lines_of(report: ServerReport) -> Iterator[str]:
    """Yield the lines of a report for a person to read."""
    if report.problem:
        yield f"{report.name}: failed after {_time_text(report.seconds)}: {report.problem}"
        return
    what = ", ".join(filter(None, (report.implementation, f"protocol {report.protocol}")))
    yield f"{report.name}: ready after {_time_text(report.seconds)} ({what})"
    for each in report.listings:
        if each.problem:
            yield f"  {each.kind}: not listed: {each.problem}"
        else:
            names = f": {', '.join(each.names)}" if each.names else ""
            yield f"  {plural(len(each.names), each.kind[:-1])} in {_time_text(each.seconds)}{names}"
    tools = next(len(each.names) for each in report.listings if each.kind == "tools")
    if tools != len(report.offered):
        yield f"  the settings offer {len(report.offered)} of these tools to the model"
    for fault in report.faults:
        yield f"  left out: {fault}"


def _time_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


async def _try_one(loaded: Loaded, server: McpServer, asker: _TerminalAsker | None) -> ServerReport:
    workspace = adapters.open_workspace(lambda: loaded, os.getcwd(), ())
    try:
        return await adapters.try_server(loaded, server, asker=asker, workspace=workspace)
    finally:
        await workspace.reap()
        await workspace.close()


def _servers_of(loaded: Loaded) -> Sequence[str]:
    return tuple(loaded.settings.mcp_servers)


def _server_named(loaded: Loaded, name: str) -> McpServer:
    """Return the server with this name. :raises ConfigError: the settings are not valid. :raises ArgumentError: there
    is no such server."""
    if loaded.problem is not None:
        raise loaded.problem
    settings = loaded.settings.mcp_servers.get(name)
    if settings is None:
        known = f"; the servers are {', '.join(_servers_of(loaded))}" if _servers_of(loaded) else "; there are none"
        raise ArgumentError(f"There is no MCP server {on_one_line(name)} in {loaded.paths.config_file}{known}.")
    return adapters.mcp_server(name, settings, loaded.paths.config_file.parent)


def _http_server(loaded: Loaded, given: str) -> HttpServer:
    """Return the server with this URL, or with this name in the user's config.toml. A server that the editor sends to
    crow has to be given by its URL, because config.toml does not contain it."""
    if "://" in given and given not in _servers_of(loaded):
        return HttpServer(name=urlsplit(given).hostname or given, url=given, oauth=OAuthOptions(login=given))
    server = _server_named(loaded, given)
    if isinstance(server, StdioServer):
        raise ArgumentError(f"{given} is started by a command; only a server with a URL can have a login.")
    if server.options.problem:
        raise ConfigError(f"{given}: {server.options.problem}")
    return server


class _TerminalAsker:
    """Asks the user at the terminal to log in, and opens the browser. See :class:`crow.tools.servers.LoginAsker`."""

    def __init__(self, *, opens_browser: bool) -> None:
        self._opens_browser = opens_browser

    @property
    def can_ask(self) -> bool:
        """See :class:`crow.tools.servers.LoginAsker`."""
        return True

    async def ask(self, question: LoginQuestion) -> Literal["accept", "decline", "gone"]:
        """See :class:`crow.tools.servers.LoginAsker`."""
        say(f"To log in to {question.server} ({question.server_host}), open this page on {question.place}:")
        print()
        say(f"  {question.page}")
        print()
        print("If the browser runs on another machine, it cannot open the last page of the login. In that case, paste")
        print("the address of that page here.", flush=True)
        if self._opens_browser and _has_browser():
            await anyio.to_thread.run_sync(open_page, question.page, abandon_on_cancel=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_addresses, question)
            await question.wait()
            tasks.cancel_scope.cancel()
        return "accept"

    async def _read_addresses(self, question: LoginQuestion) -> None:
        """Read the addresses that the user pastes, until one of them belongs to this login."""
        rest = b""
        while True:
            try:
                await anyio.wait_readable(sys.stdin)
            except (NotImplementedError, OSError, ValueError):
                return  # crow cannot wait for this input: it is a file, or the system is Windows
            data = os.read(sys.stdin.fileno(), _INPUT_BYTES)
            if not data:
                return
            *lines, rest = (rest + data)[-_INPUT_BYTES:].split(b"\n")
            for line in lines:
                if line.strip() and not question.take(line.decode("utf-8", "replace")):
                    print("That is not the address of the last login page. Paste the whole address.", flush=True)


def _has_browser() -> bool:
    """Return whether a browser with a window can be opened."""
    if sys.platform.startswith("linux"):
        return in_terminal() and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return in_terminal()

"""The command line: what a person types, and what an editor starts.

Strategy: parse, load the settings, hand over. Everything heavy is imported by the command that needs it, so that
`crow acp` pays for the protocol alone. A failure is one plain sentence on stderr: exit code 2 when the user can mend
it, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crow import __version__
from crow.cli import admin as keeping
from crow.cli import sessions as looking
from crow.cli.output import show
from crow.cli.sessions import Act, OpenStore
from crow.domain.errors import ArgumentError, CrowError, UserError

if TYPE_CHECKING:
    from crow.settings import Loaded

__all__ = ["add_commands", "main", "run"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's own) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(arguments)
    options = parser.parse_args(arguments)
    command: str | None = "login" if options.setup else options.command
    if command is None:
        if sys.stdin is None or sys.stdin.isatty():
            parser.print_help()
            return 0
        command = "acp"
    try:
        return _COMMANDS[command](options)
    except UserError as error:
        return _fail(error, 2)
    except CrowError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        # The reader of our output has gone (`crow sessions | head`); the interpreter must not say so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crow",
        description="A coding agent for editors that speak the Agent Client Protocol.",
        epilog="Without a command, and with stdin not a terminal, crow serves the protocol: what an editor starts.",
    )
    parser.add_argument("--version", action="version", version=f"crow {__version__}")
    parser.add_argument("--setup", action="store_true", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    settings = argparse.ArgumentParser(add_help=False)
    settings.add_argument("--model", metavar="NAME", help="the model to use")
    settings.add_argument("--base-url", metavar="URL", help="the OpenAI-compatible endpoint to use")
    settings.add_argument("--mode", metavar="MODE", help="ask, accept-edits, plan or auto")
    settings.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")

    acp = commands.add_parser("acp", parents=[settings], help="serve the Agent Client Protocol on stdin and stdout")
    # Editors append this to the command line that they start crow with, wherever that ends.
    acp.add_argument("--setup", action="store_true", default=argparse.SUPPRESS, help="the same as crow login")
    commands.add_parser("login", help="ask for endpoint, key and model, try them, and keep them")
    commands.add_parser("demo", help="show what crow does, in a scratch directory")
    sessions = commands.add_parser(
        "sessions", aliases=["session"], help="list, search, show, export, back up and remove sessions"
    )
    if "sessions" in arguments or "session" in arguments:  # a dozen commands of its own: not for an editor to wait for
        add_commands(sessions)
    doctor = commands.add_parser("doctor", parents=[settings], help="try everything that a prompt needs")
    doctor.add_argument("--mcp", metavar="COMMAND", action="append", default=[], help="an MCP server to try, too")
    doctor.add_argument("--repair", action="store_true", help="rebuild a damaged database; a copy of it is kept")
    doctor.add_argument("--json", action="store_true", help="one JSON object a line")
    models = commands.add_parser("models", parents=[settings], help="list the models that an endpoint offers")
    models.add_argument("provider", nargs="?", help="a [providers.NAME]; without it, the endpoint in use")
    models.add_argument("--json", action="store_true", help="one JSON object a line")
    commands.add_parser("config", parents=[settings], help="print the settings in effect, and where each came from")
    trace = commands.add_parser("trace", help="read a recording of an ACP connection (CROW_TRACE=FILE makes one)")
    trace.add_argument("action", choices=["show", "check"], help="show it, or say what the protocol does not allow")
    trace.add_argument("file", metavar="FILE", type=Path, help="one JSON object a line, of crow or of any agent")
    return parser


def _fail(error: Exception | str, code: int) -> int:
    print(f"crow: {error}", file=sys.stderr)
    return code


def _load(options: argparse.Namespace) -> Loaded:
    from crow.settings import load_settings

    given = {
        "model.name": getattr(options, "model", None),
        "model.base_url": getattr(options, "base_url", None),
        "permissions.mode": getattr(options, "mode", None),
        "log.level": getattr(options, "log_level", None),
    }
    return load_settings({key: text for key, text in given.items() if text}, os.environ)


def _acp(options: argparse.Namespace) -> int:
    import logging

    from crow.runtime import importing

    with importing():
        from crow.log import start_logging

        loaded = _load(options)
    start_logging(loaded.paths.log_file, loaded.settings.log.level, loaded.settings.secrets())
    try:
        with importing():
            from crow.app import serve

        return asyncio.run(serve(loaded, lambda: _load(options)))
    except CrowError:
        raise
    except Exception as error:  # editors show stderr to their users: the traceback belongs in the log
        logging.getLogger(__name__).exception("crow acp ended")
        kind = type(error).__name__
        return _fail(f"internal error: {kind}: {error}; the log {loaded.paths.log_file} says more", 1)


def _login(options: argparse.Namespace) -> int:
    from crow.login import log_in

    return asyncio.run(log_in(_load(options)))


def _trace(options: argparse.Namespace) -> int:
    from crow.trace.record import read_recording

    if options.action == "show":
        from crow.trace.show import shown

        for line in shown(read_recording(options.file)):
            print(line)
        return 0
    from crow.trace.check import check

    verdict = check(read_recording(options.file))
    for fault in verdict.faults:
        print(fault)
    for fault in verdict.client_faults:
        print(f"(the client, {fault})")
    if verdict.unanswered:
        print(f"(not answered when the recording ended: {', '.join(verdict.unanswered)})")
    print(f"{verdict.messages} messages, {len(verdict.faults)} faults")
    return 1 if verdict.faults else 0


def _demo(_options: argparse.Namespace) -> int:
    from crow.demo import run_demo

    run_demo()
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from crow.doctor import doctor, repair
    from crow.log import start_logging

    loaded = _load(options)
    start_logging(loaded.paths.log_file, loaded.settings.log.level, loaded.settings.secrets())
    if options.repair:
        return asyncio.run(repair(loaded, as_json=options.json))
    return asyncio.run(doctor(loaded, commands=options.mcp, as_json=options.json))


def _models(options: argparse.Namespace) -> int:
    from crow.doctor import models

    return asyncio.run(models(_load(options), provider=options.provider, as_json=options.json))


def _sessions(options: argparse.Namespace) -> int:

    return run(options, _load(options))


def _config(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if loaded.problem is not None:
        raise loaded.problem
    for line in _config_lines(loaded):
        print(line)
    return 0


def _config_lines(loaded: Loaded) -> Iterator[str]:
    """TOML, as it could stand in the file, but for the masked secrets; the comment says where a value came from."""
    paths = loaded.paths
    there = "" if paths.config_file.exists() else " (does not exist)"
    yield f"# settings   {paths.config_file}{there}"
    yield f"# sessions   {paths.database}"
    yield f"# log        {paths.log_file}"
    yield ""
    width = max(len(key) for key in loaded.sources)
    for key, source in loaded.sources.items():
        value = loaded.value(key)
        if value is None:
            yield f"# {key:<{width}}  # unset"
        else:
            yield f"{f'{key:<{width}} = {_as_toml(value)}':<{width + 32}}  # {source}"


def _as_toml(value: object) -> str:
    from pydantic import SecretStr

    if isinstance(value, SecretStr):
        return json.dumps(_masked(value.get_secret_value()), ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(name))} = {_as_toml(inner)}" for name, inner in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    return json.dumps(value, ensure_ascii=False)


def _masked(secret: str) -> str:
    """Enough to tell two keys apart."""
    return f"{secret[:3]}…{secret[-4:]}" if len(secret) >= 16 else "…"


_COMMANDS = {
    "acp": _acp,
    "login": _login,
    "trace": _trace,
    "demo": _demo,
    "sessions": _sessions,
    "session": _sessions,
    "config": _config,
    "doctor": _doctor,
    "models": _models,
}


# FROM cli.sessions: `crow sessions`: its commands and what each takes.
#
# Strategy: commands are declared here and done in `looking` (what only reads) and `keeping` (what writes). A session
# is
# named by its id, its alias, or the beginning of its id. Looking makes no database.


def add_commands(sessions: argparse.ArgumentParser) -> None:
    """Declare what follows `crow sessions`."""
    sessions.description = (
        "List sessions, newest first, or do something with them. ID is a session's id, its alias, or the beginning of"
        " its id."
    )
    _add_listing(sessions)
    sessions.set_defaults(act=looking.list_sessions, cwd=None, all=False, archived=False, newest=False, json=False)
    commands = sessions.add_subparsers(dest="action", metavar="COMMAND")

    json = argparse.ArgumentParser(add_help=False)
    json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line")
    one = argparse.ArgumentParser(add_help=False, parents=[json])
    one.add_argument("ids", metavar="ID", nargs=1)
    some = argparse.ArgumentParser(add_help=False, parents=[json])
    some.add_argument("ids", metavar="ID", nargs="+")
    scope = argparse.ArgumentParser(add_help=False, parents=[json])
    _add_cwd(scope)
    scope.add_argument("--model", metavar="NAME", help="only of models whose name holds NAME")
    scope.add_argument("--since", metavar="DATE", help="only from this day (or time) on, such as 2026-11-01")
    scope.add_argument("--until", metavar="DATE", help="only up to this day, with it")

    def add(name: str, act: Act, parent: argparse.ArgumentParser, words: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[parent], help=words, description=f"{words[0].upper()}{words[1:]}.")
        command.set_defaults(act=act)
        return command

    listed = argparse.ArgumentParser(add_help=False)
    _add_listing(listed)
    add("list", looking.list_sessions, listed, "list sessions, newest first, as without a command")
    shown = add("show", looking.show_session, one, "show a session as a transcript")
    shown.add_argument("--full", action="store_true", help="with all that tools gave, and what the model thought")
    search = add("search", looking.search, scope, "search what was said, word for word")
    search.add_argument("query", metavar="WORD", nargs="+", help="all must be in the text; any script, no operators")
    search.add_argument("--limit", metavar="N", type=int, default=20, help="at most so many (20)")
    stats = add("stats", looking.stats, scope, "sum tokens and cost")
    stats.add_argument("--by", metavar="GROUPS", default="session", help="session (default), model, day, or some: a,b")

    export = add("export", keeping.export, json, "write sessions to a file")
    export.add_argument("ids", metavar="ID", nargs="*")
    export.add_argument("--all", action="store_true", help="every session")
    export.add_argument(
        "--format", choices=("jsonl", "markdown"), default="jsonl", help="jsonl loses nothing (default)"
    )
    export.add_argument("-o", "--output", metavar="FILE", help="a new file, readable by you alone; else stdout")
    imported = add("import", keeping.import_file, json, "take in sessions that were exported as JSONL")
    imported.add_argument("file", metavar="FILE")
    add("archive", keeping.archive, some, "take sessions off the list; nothing is removed")
    add("unarchive", keeping.unarchive, some, "put them back on the list")
    add("delete", keeping.delete, some, "remove sessions for good, with their sub-agents")
    prune = add("prune", keeping.prune, json, "remove sessions that were not used for long, for good")
    prune.add_argument("--older-than", metavar="AGE", required=True, help="such as 30d, 12h, 8w, 6m, 2y, or a date")
    _add_cwd(prune)
    prune.add_argument("--dry-run", action="store_true", help="only list them")
    add("vacuum", keeping.vacuum, json, "give the space of removed sessions back to the disk")
    backup = add("backup", keeping.back_up, json, "copy the database while it is in use, and verify the copy")
    backup.add_argument("path", metavar="PATH", help="a new file, or a directory to make one in")


def run(options: argparse.Namespace, loaded: Loaded) -> int:
    """Run the command that was parsed; the exit code. Errors are raised."""
    act: Act = options.act
    if loaded.paths.database.exists() or act is keeping.import_file:
        asyncio.run(_run(act, options, loaded))
        return 0
    # looking must not make a database
    if getattr(options, "ids", None) or options.newest or act is keeping.back_up:
        raise ArgumentError(f"There are no sessions yet: {loaded.paths.database} does not exist.")
    if not options.json:
        show((), (), empty="No sessions yet.")
    return 0


def _add_listing(parser: argparse.ArgumentParser) -> None:
    """The options of a list; what is not given leaves no trace, so that they may stand on both sides of `list`."""
    _add_cwd(parser)

    def add(flag: str, words: str, name: str | None = None) -> None:
        name = name or flag.removeprefix("--")
        parser.add_argument(flag, dest=name, action="store_true", default=argparse.SUPPRESS, help=words)

    add("--all", f"every one, not just the newest {looking.LISTED}")
    add("--archived", "those that are archived")
    add("--continue", "print the id of the newest of --cwd (this directory)", "newest")
    add("--json", "one JSON object a line")


def _add_cwd(parser: argparse.ArgumentParser) -> None:
    words = "only those of DIR (of this directory)"
    parser.add_argument("--cwd", metavar="DIR", nargs="?", const=".", default=argparse.SUPPRESS, help=words)


async def _run(act: Act, options: argparse.Namespace, loaded: Loaded) -> None:
    from crow.app import open_store, upkeep_of

    store = await open_store(loaded)
    try:
        await act(OpenStore(options, loaded, store, upkeep_of(store)))
    finally:
        await store.close()

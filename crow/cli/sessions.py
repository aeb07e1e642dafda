"""`crow sessions`: its commands and what each takes.

Strategy: commands are declared here and done in `looking` (what only reads) and `keeping` (what writes). A session is
named by its id, its alias, or the beginning of its id. Looking makes no database.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from crow.cli import keeping, looking
from crow.cli.opened import Act, Opened
from crow.cli.output import show
from crow.domain.errors import ArgumentError

if TYPE_CHECKING:
    from crow.settings import Loaded

__all__ = ["add_commands", "run"]


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
        await act(Opened(options, loaded, store, upkeep_of(store)))
    finally:
        await store.close()

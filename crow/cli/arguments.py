"""The arguments of each command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from crow.version import __version__

_AddCommand: TypeAlias = Callable[..., argparse.ArgumentParser]
"""Adds a command of `crow sessions`. The arguments are the command's name, function and help, and how many sessions the
command takes, if any."""

_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Talk": {
        "chat": "talk with crow in the terminal",
        "run": "run one prompt; the answer goes to stdout",
        "demo": "see crow at work, without a key",
    },
    "Set up": {
        "login": "choose an endpoint, a key and a model",
        "models": "list the models of an endpoint",
        "mcp": "list, add and try MCP servers, and log in to them",
        "config": "print the settings, and where each comes from",
        "doctor": "check configuration, database, model and tools",
    },
    "Look back": {
        "sessions": "list, show, search, export and remove sessions",
        "replay": "run a session again, and compare what it sends",
        "trace": "print a recording of an ACP connection",
    },
    "Serve": {
        "acp": "serve an editor on stdin and stdout",
        "serve": "serve several clients over WebSocket",
    },
    "Shell": {
        "completion": "print a completion script for bash, zsh or fish",
        "man": "print the manual page; to read it: crow man | man -l -",
    },
}
"""The commands in groups, with a few words about each, for a help that fits into a terminal of 24 lines."""

_ABOUT = """\
A coding agent for editors that speak the Agent Client Protocol. Without a
command, crow opens the chat in a terminal, and runs crow acp for an editor."""

_EVERY_COMMAND = ("run", "chat", "serve", "sessions", "replay", "mcp")
"""The commands whose arguments are added only if the command line names them."""


class _CrowParser(argparse.ArgumentParser):
    """The parser of the whole command line, with a help that fits into one screen."""

    def format_help(self) -> str:
        """See `ArgumentParser`."""
        commands = [
            f"{group if number == 0 else '':<11}{name:<12}{words}"
            for group, commands in _GROUPS.items()
            for number, (name, words) in enumerate(commands.items())
        ]
        end = "Details: crow COMMAND --help, crow man. Version: crow --version."
        return "\n".join(["usage: crow [COMMAND] [OPTION ...]", "", _ABOUT, "", *commands, "", end, ""])


def whole_parser() -> argparse.ArgumentParser:
    """Build the parser with the arguments of every command."""
    return command_parser(_EVERY_COMMAND)


def command_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser of a command line. It stores the name of the command in `command`.

    Some commands have arguments whose definitions import other modules. These arguments are added only if `arguments`
    names the command.
    """
    parser = _CrowParser(
        prog="crow",
        description="A coding agent for editors that speak the Agent Client Protocol.",
        epilog="Without a command, crow opens the chat in a terminal, and runs crow acp if an editor starts it.",
    )
    parser.add_argument("--version", action="version", version=f"crow {__version__}")
    parser.add_argument("--setup", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(command=None)
    parsers = parser.add_subparsers(metavar="COMMAND", parser_class=argparse.ArgumentParser)

    settings = _settings_arguments()

    def add(
        name: str, words: str, parents: Sequence[argparse.ArgumentParser] = (), aliases: Sequence[str] = ()
    ) -> argparse.ArgumentParser:
        description = f"{words[0].upper()}{words[1:]}."
        added = parsers.add_parser(name, parents=parents, aliases=aliases, help=words, description=description)
        added.set_defaults(command=name)
        return added

    run = add("run", "run one prompt: the answer on stdout, what happens on stderr", [settings])
    if "run" in arguments:
        _add_run_arguments(run)
    chat = add("chat", "talk with crow at the terminal", [settings])
    if "chat" in arguments:
        _add_chat_arguments(chat)
    _add_acp_arguments(add("acp", "serve the Agent Client Protocol on stdin and stdout", [settings]))
    if arguments[:1] == ["acp"]:
        return parser  # an editor waits, and the parsers of the other commands would take 3 ms
    serving = add("serve", "serve the Agent Client Protocol over WebSocket to several clients", [settings])
    if "serve" in arguments:
        _add_serve_arguments(serving)
    add("login", "choose an endpoint, a key and a model; try them and save them")
    add("demo", "show crow at work in a scratch directory, without a key")
    sessions = add("sessions", "list, show, search, export, back up and remove sessions", (), ["session"])
    if "sessions" in arguments or "session" in arguments:
        _add_sessions_commands(sessions)
    replay = add("replay", "build the requests of a stored session again, and compare them with what was sent")
    if "replay" in arguments:
        _add_replay_arguments(replay)
    _add_doctor_arguments(add("doctor", "check the configuration, the database, the model and the tools", [settings]))
    _add_models_arguments(add("models", "list the models that an endpoint offers", [settings]))
    mcp = add("mcp", "list, add, remove and try MCP servers, and log in to them")
    if "mcp" in arguments:
        _add_mcp_commands(mcp)
    add("config", "print the settings in effect, and where each comes from", [settings])
    trace = add("trace", "print a recording of an ACP connection (CROW_TRACE=FILE makes one)")
    _add_trace_arguments(trace)
    _add_completion_arguments(add("completion", "print a completion script for bash, zsh or fish"))
    add("man", "print the manual page; to read it: crow man | man -l -")
    return parser


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    words = "print a recording"
    show = commands.add_parser("show", help=words, description=f"{words.capitalize()}.")
    show.add_argument("file", metavar="FILE", help="a recording by crow")


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], nargs="?", help="the shell")
    parser.add_argument("--sessions", metavar="WORD", help=argparse.SUPPRESS)


def _settings_arguments() -> argparse.ArgumentParser:
    """Return a parser with the options that change settings. Other parsers take these options from it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", metavar="NAME", help="the model to use")
    parser.add_argument("--base-url", metavar="URL", help="the OpenAI-compatible endpoint to use")
    parser.add_argument("--mode", metavar="MODE", help="ask, accept-edits, plan or auto")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    return parser


def _add_acp_arguments(parser: argparse.ArgumentParser) -> None:
    # Editors append this option to the command that starts crow. This command may or may not end with `acp`.
    parser.add_argument("--setup", action="store_true", default=argparse.SUPPRESS, help="the same as crow login")
    parser.add_argument(
        "--experimental-v2",
        action="store_true",
        help="also serve the draft of protocol version 2 to clients that ask for it",
    )
    _add_connect_arguments(parser, "connect the editor to the crow serve at ADDRESS")


def _add_connect_arguments(parser: argparse.ArgumentParser, words: str) -> None:
    """Add the options that name a server. `words` says what the command does with it."""
    parser.add_argument(
        "--connect", metavar="ADDRESS", help=f"{words}: a ws:// or wss:// URL, or the path of a Unix socket"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the file with the token for --connect, readable only by you (default: the token in CROW_TOKEN)",
    )


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mcp", metavar="COMMAND", action="append", default=[], help="also try the MCP server that COMMAND starts"
    )
    parser.add_argument(
        "--repair", action="store_true", help="rebuild a damaged database; the damaged file is kept as a copy"
    )
    _add_json(parser)


def _add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "provider", nargs="?", help="the NAME of a table [providers.NAME] in config.toml (default: the endpoint in use)"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="also store the context windows and prices of the models in use"
    )
    _add_json(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    from crow.terminal.run import add_arguments

    _add_connect_arguments(parser, "run it through the crow serve at ADDRESS")
    add_arguments(parser)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    from crow.terminal.chat import add_arguments

    _add_connect_arguments(parser, "chat through the crow serve at ADDRESS")
    add_arguments(parser)


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    from crow.cli.replay import add_arguments

    add_arguments(parser)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="listen on HOST:PORT, or on the Unix socket with this path (default: 127.0.0.1:7431)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="the certificate for TLS, with its chain, as PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="the private key of the certificate, as PEM")
    parser.add_argument("--log-file", metavar="FILE", help="the file for the log, as JSON lines (default: stderr)")
    parser.add_argument(
        "--experimental-v2",
        action="store_true",
        help="also serve the draft of protocol version 2 to clients that ask for it",
    )
    user = parser.add_argument_group("one server for all editors of this user")
    user.add_argument(
        "--user",
        action="store_true",
        help="serve only your own editors, on a Unix socket that crow acp finds by itself",
    )
    actions = user.add_mutually_exclusive_group()
    for name, words in (
        ("start", "with --user: start the server in the background if it does not run yet"),
        ("stop", "with --user: let running turns end, then end the server"),
        ("status", "with --user: say whether the server runs, and what it does"),
    ):
        actions.add_argument(f"--{name}", dest="action", action="store_const", const=name, help=words)

    from crow.cli.tokens import add_token_commands

    parser.set_defaults(token_command=None)
    add_token_commands(parser)


def _add_sessions_commands(parser: argparse.ArgumentParser) -> None:
    from crow.cli import sessions

    parser.description = (
        "List sessions, most recently used first, or run a command on them. SESSION is the id of a session, the start"
        " of its id, its alias, or its whole title."
    )
    parser.set_defaults(run=sessions.list_sessions, all=False, archived=False, newest=False, receipts=False, json=False)
    parser.set_defaults(cwd=None, repo=None, model=None, since=None, until=None, title=None, tag=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, run: Callable[..., object], words: str, ids: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        added.set_defaults(run=run)
        if ids is not None:
            added.add_argument("ids", metavar="SESSION", nargs=1 if ids == "1" else ids)
        return added

    _add_reading_commands(parser, add)
    _add_file_commands(add)
    _add_changing_commands(add)
    for each in (parser, *commands.choices.values()):
        _add_json(each, default=argparse.SUPPRESS)


def _add_reading_commands(parser: argparse.ArgumentParser, add: _AddCommand) -> None:
    from crow.cli import sessions

    listing = add("list", sessions.list_sessions, "list sessions, most recently used first; the same as crow sessions")
    for each in (parser, listing):
        _add_list_options(each)
    show = add("show", sessions.show_session, "show a session as a transcript", "1")
    show.add_argument("--as-model", action="store_true", help="print the messages that the model would get now")
    words = (
        "jsonl prints one entry per line, with keys and tokens masked; openai prints the messages of --as-model as the "
        "JSON array of a Chat Completions request"
    )
    show.add_argument("--format", choices=("markdown", "jsonl", "openai"), default="markdown", help=words)
    show.add_argument("--follow", action="store_true", help="go on with each new entry; Ctrl-C ends it")
    show.add_argument("--full", action="store_true", help="include thoughts, diffs and complete tool results")
    show.add_argument("--call", metavar="CALL", help="print only the whole output of this tool call, such as call_12_0")
    search = add("search", sessions.search, "find words in the sessions")
    search.add_argument(
        "query",
        metavar="WORD",
        nargs="+",
        help="a word to find; all words must occur, and search operators are not supported",
    )
    search.add_argument("--limit", metavar="N", type=int, default=20, help="show at most N matches (default: 20)")
    stats = add("stats", sessions.stats, "sum up tokens and cost")
    stats.add_argument(
        "--by",
        metavar="GROUPS",
        default="session",
        help="session (default), model or day, or several of these, such as model,day",
    )
    stats.add_argument(
        "--disk", action="store_true", help="show what takes up space in the database, instead of tokens and cost"
    )
    stats.add_argument(
        "--breakdown",
        action="store_true",
        help="show what was read from the cache, cache breaks, the outputs and tools that cost the most, and times",
    )
    stats.add_argument("--session", metavar="SESSION", help="the breakdown of this session and its subagents")
    for each in (search, stats):
        _add_limits(each)


def _add_list_options(parser: argparse.ArgumentParser) -> None:
    from crow.cli.sessions import LISTED

    # SUPPRESS lets options come before or after `list`: a default would overwrite an option given before `list`.
    _add_limits(parser)
    words = "only sessions in any directory of the Git repository that contains DIR (default: .)"
    parser.add_argument("--repo", metavar="DIR", nargs="?", const=".", default=argparse.SUPPRESS, help=words)
    parser.add_argument("--title", metavar="TEXT", default=argparse.SUPPRESS, help="only titles that contain TEXT")
    words = "also show the state of each session's newest receipt"
    parser.add_argument("--receipts", action="store_true", default=argparse.SUPPRESS, help=words)
    words = "only sessions with this tag; repeat the option to require several tags"
    parser.add_argument("--tag", metavar="TAG", action="append", default=argparse.SUPPRESS, help=words)
    for flag, name, words in (
        ("--all", "all", f"every session, not only the newest {LISTED}"),
        ("--archived", "archived", "only archived sessions"),
        (
            "--continue",
            "newest",
            "print the id of the newest session of --cwd (default: .), for crow run --session",
        ),
    ):
        parser.add_argument(flag, dest=name, action="store_true", default=argparse.SUPPRESS, help=words)


def _add_cwd(parser: argparse.ArgumentParser) -> None:
    words = "only sessions of DIR (default: the current directory)"
    parser.add_argument("--cwd", metavar="DIR", nargs="?", const=".", default=argparse.SUPPRESS, help=words)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    _add_cwd(parser)
    for name, value, words in (
        ("--model", "NAME", "only models whose name contains NAME"),
        (
            "--since",
            "AGE",
            "only from this time on: an age such as 12h, 7d, 8w, 6m, 2y, or a date such as 2026-11-01",
        ),
        ("--until", "AGE", "only up to this time: an age, or a date (the whole day is included)"),
    ):
        parser.add_argument(name, metavar=value, default=argparse.SUPPRESS, help=words)


def _add_file_commands(add: _AddCommand) -> None:
    from crow.cli import admin, imports

    export = add("export", admin.export, "write sessions to a file", "*")
    export.add_argument("--all", action="store_true", help="every session")
    export.add_argument(
        "--format",
        choices=("jsonl", "markdown", "html", "case", "otlp"),
        default="jsonl",
        help="jsonl (default) is complete; markdown and html are for reading; case is redacted, for crow replay; "
        "otlp has OpenTelemetry traces",
    )
    export.add_argument("-o", "--output", metavar="FILE", help="a new file that only you can read; default: stdout")
    view = add("view", admin.view, "show a session in the browser, as one private HTML file", "1")
    for each in (export, view):
        words = "also hide e-mail addresses, home directories, and text that looks like a token or password"
        each.add_argument("--redact", action="store_true", help=words)
    imported = add(
        "import", imports.import_sessions, "import sessions of other tools, or sessions that crow exported as JSONL"
    )
    imported.add_argument(
        "file",
        metavar="PATH",
        nargs="?",
        help="a file or a directory (default: the place where TOOL keeps its sessions)",
    )
    imported.add_argument(
        "--from",
        dest="tool",
        metavar="TOOL",
        help="import only from TOOL: claude-code, codex, pi, opencode, goose or openai-json",
    )
    imported.set_defaults(creates_database=True)
    copy = add("copy", admin.copy, "copy all sessions from one database to another, and verify the copy")
    for flag, name, words in (
        ("--from", "source", "the database to read: a file, or postgresql://USER@HOST/NAME; it is not changed"),
        ("--to", "target", "the database to copy to; sessions that it already has are not changed"),
    ):
        copy.add_argument(flag, dest=name, metavar="URL", help=f"{words} (default: the database in use)")
    copy.set_defaults(opens_databases=True)


def _add_changing_commands(add: _AddCommand) -> None:
    from crow.cli import admin

    add("archive", partial(admin.set_archived, archived=True), "hide sessions from the list; nothing is removed", "+")
    add("unarchive", partial(admin.set_archived, archived=False), "put archived sessions back on the list", "+")
    rename = add("rename", admin.rename, "set the title of a session; its id and alias stay the same", "1")
    rename.add_argument("title", metavar="TITLE", nargs="+", help="the new title")
    tag = add("tag", admin.tag, "add and remove tags; without SESSION, list the tags of all sessions", "?")
    tag.add_argument("tags", metavar="TAG", nargs="*", help="a tag to add: one word")
    tag.add_argument("--remove", metavar="TAG", action="append", default=[], help="a tag to remove")
    _add_share_commands(add)
    add("delete", admin.delete, "permanently remove sessions and their subagents", "+")
    prune = add("prune", admin.prune, "permanently remove sessions that were not used for a long time")
    prune.add_argument(
        "--older-than", metavar="AGE", required=True, help="an age such as 30d, 12h, 8w, 6m, 2y, or a date"
    )
    _add_cwd(prune)
    prune.add_argument("--dry-run", action="store_true", help="only list these sessions")
    add("vacuum", admin.vacuum, "free the disk space of removed sessions")
    backup = add("backup", admin.back_up, "copy the database, even while it is in use, and verify the copy")
    backup.add_argument("path", metavar="PATH", help="a new file, or the directory in which crow creates one")


def _add_share_commands(add: _AddCommand) -> None:
    from crow.cli import admin

    words = "let another principal of crow serve see a session and its subagents, or share it as a page"
    share = add("share", admin.share, words, "1")
    unshare = add("unshare", admin.share, "no longer share a session with another principal", "1")
    for each in (share, unshare):
        nargs = "?" if each is share else None
        words = "the name of the principal, as given to crow serve token add"
        each.add_argument("principal", metavar="PRINCIPAL", nargs=nargs, help=words)
        each.set_defaults(access=None, is_page=False)
    accesses = share.add_mutually_exclusive_group(required=True)
    words = "PRINCIPAL may read and fork the session"
    accesses.add_argument("--read", dest="access", action="store_const", const="read", help=words)
    words = "PRINCIPAL may also send prompts, and change title, model, mode and options"
    accesses.add_argument("--write", dest="access", action="store_const", const="write", help=words)
    words = "write the session as one HTML file, and publish it with share.command if that is set"
    accesses.add_argument("--html", dest="is_page", action="store_true", help=words)
    share.add_argument(
        "-o", "--output", metavar="FILE", help="with --html: a new file (default: in a private directory)"
    )
    words = "with --html: crow serve shows the page to anyone who has its secret link"
    share.add_argument("--link", action="store_true", help=words)
    share.add_argument("--expires", metavar="AGE", help="with --link: how long, such as 12h or 8w (default: 7d)")
    words = "with --html: also hide e-mail addresses, home directories, and what looks like a token or password"
    share.add_argument("--redact", action="store_true", help=words)
    links = add("links", admin.list_links, "list the links to pages that crow serve shows, or revoke some")
    links.add_argument("--revoke", metavar="LINK", action="append", default=[], help="revoke this link")


def _add_mcp_commands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(mcp="list", json=False)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, words: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        added.set_defaults(mcp=name)
        return added

    _add_json(add("list", "list the servers in config.toml; the same as crow mcp"), default=argparse.SUPPRESS)
    adding = add("add", "add a server to config.toml")
    adding.epilog = "Example: crow mcp add files -- npx -y some-server --root /srv"
    adding.add_argument("name", metavar="NAME", help="a name for the server")
    adding.add_argument("target", metavar="URL|COMMAND", help="the URL of the server, or the program to start")
    adding.add_argument("args", metavar="ARG", nargs="*", help="the program's arguments; write -- before the program")
    for flag, value, words in (
        ("--env", "NAME=VALUE", "an environment variable for the program; ${NAME} stands for one of your variables"),
        ("--header", "NAME:VALUE", "an HTTP header for the URL; ${NAME} stands for an environment variable"),
    ):
        adding.add_argument(flag, metavar=value, action="append", default=[], help=words)
    adding.add_argument("--transport", choices=("http", "sse"), help="how to call the URL (default: http)")
    adding.add_argument(
        "--sandbox",
        choices=("read", "write"),
        help="confine the program to this access, in the same sandbox as a shell command",
    )
    adding.add_argument("--replace", action="store_true", help="replace a server with this name")
    add("remove", "remove a server from config.toml").add_argument("name", metavar="NAME", help="the server")
    login = add("login", "log in to a server, in the browser")
    login.add_argument(
        "--no-browser",
        dest="browser",
        action="store_false",
        help="print the address of the login page, but do not open a browser",
    )
    logout = add("logout", "revoke and delete the tokens of a login")
    for each in (login, logout):
        each.add_argument(
            "server", metavar="NAME|URL", help="the name of a server in config.toml, or the URL of any server"
        )
    test = add("test", "start servers, and show what they list, how long it takes and what is wrong")
    test.add_argument("names", metavar="NAME", nargs="*", help="the names of servers (default: all enabled servers)")
    _add_json(test, default=argparse.SUPPRESS)
    _add_json(parser, default=argparse.SUPPRESS)


def _add_json(parser: argparse.ArgumentParser, default: object = False) -> None:
    parser.add_argument("--json", action="store_true", default=default, help="print one JSON object per line")

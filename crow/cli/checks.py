"""`crow doctor` and `crow models`: print what the checks find and which models endpoints offer."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import textwrap
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from crow.cli.loading import load, load_and_log
from crow.cli.output import Column, print_json, print_table
from crow.doctor import Finding, check_everything, list_models, repair_database, store_models
from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line
from crow.settings import Loaded
from crow.tools.servers import StdioServer

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}

_INDENT = 25
"""The number of columns before the words of a finding."""

_WIDE = 60
"""In a terminal of at least this many columns, all lines of a finding are indented by `_INDENT` columns."""


def doctor(options: argparse.Namespace) -> int:
    """`crow doctor`: print each finding as soon as it is known. Return 1 if a check failed, otherwise 0."""
    return asyncio.run(_run_doctor(load_and_log(options), options))


def models(options: argparse.Namespace) -> None:
    """`crow models`: print the models that an endpoint offers."""
    asyncio.run(_print_models(load(options), options))


async def _run_doctor(loaded: Loaded, options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    states = set()

    def report(finding: Finding) -> None:
        states.add(finding.state)
        if options.json:
            print_json([asdict(finding)])
            return
        line = Text(f"{finding.state:<8} ", style=_COLOURS[finding.state])
        line.append(f"{on_one_line(finding.check):<15} ", "bold").append(_folded(finding.words, console), "")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<{_INDENT}}{_folded(finding.advice, console)}"), soft_wrap=True)

    if options.repair:
        await repair_database(loaded, report)
    else:
        await check_everything(loaded, report, servers=[_server(command) for command in options.mcp])
    return 1 if "failed" in states else 0


def _folded(words: str, console: Console) -> str:
    """Return `words` on one line. For a terminal, return them on several lines that fit, broken between words. The
    caller prints the first line after `_INDENT` columns."""
    line = on_one_line(words)
    if not console.is_terminal:
        return line
    rest = " " * (_INDENT if console.width >= _WIDE else 2)
    start = " " * _INDENT
    lines = textwrap.wrap(
        line,
        console.width - 1,
        initial_indent=start,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(lines).removeprefix(start)


async def _print_models(loaded: Loaded, options: argparse.Namespace) -> None:
    offered = await list_models(loaded, options.provider)
    if options.refresh:
        await store_models(loaded, options.provider, offered)
    if options.json:
        return print_json({key: value for key, value in asdict(each).items() if value is not None} for each in offered)
    rows = [
        (
            each.name,
            "" if each.context_window is None else str(each.context_window),
            "" if each.input_price is None else f"{each.input_price:g}",
            "" if each.output_price is None else f"{each.output_price:g}",
        )
        for each in offered
    ]
    columns = (Column("Model"), Column("Window", "number"), Column("USD per million in", "number"))
    return print_table((*columns, Column("out", "number")), rows, empty="The endpoint lists no models.")


def _server(command: str) -> StdioServer:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ArgumentError(f"--mcp {command}: {error}; quote the command as in a shell.") from None
    if not words:
        raise ArgumentError('--mcp is empty; expected a command, such as "npx -y some-server".')
    program = os.path.abspath(words[0]) if os.path.dirname(words[0]) else words[0]
    return StdioServer(name=os.path.basename(program), command=program, args=tuple(words[1:]))

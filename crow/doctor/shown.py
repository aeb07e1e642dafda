"""Findings and lists of models, as a person or a program reads them: colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

from crow.doctor.checks import Finding
from crow.llm.listing import Offered

__all__ = ["show_findings", "show_models"]

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


async def show_findings(findings: AsyncIterator[Finding], *, as_json: bool) -> int:
    """Print each as it is found; the exit code: 1 if any check failed."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    failed = False
    async for finding in findings:
        failed = failed or finding.state == "failed"
        if as_json:
            sys.stdout.write(json.dumps(asdict(finding), ensure_ascii=False) + "\n")
            continue
        line = Text()
        line.append(f"{finding.state:<8} ", style=_COLOURS[finding.state])
        line.append(f"{finding.check:<15} ", style="bold")
        line.append(finding.words)
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<24} {finding.advice}"), soft_wrap=True)
    return 1 if failed else 0


def show_models(offered: Sequence[Offered], *, default: str, as_json: bool) -> None:
    """Print what an endpoint offers; `default` is the model in use there."""
    if as_json:
        for each in offered:
            known = {key: value for key, value in asdict(each).items() if value is not None}
            sys.stdout.write(json.dumps(known, ensure_ascii=False) + "\n")
    elif sys.stdout.isatty():
        _show_table(offered, default)
    else:
        for each in offered:
            sys.stdout.write("\t".join(_row(each)) + "\n")


def _show_table(offered: Sequence[Offered], default: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("Model", "Window", "USD per million in", "out"):
        table.add_column(title, justify="left" if title == "Model" else "right", overflow="fold")
    for each in offered:
        table.add_row(*map(Text, _row(each)), style="bold" if each.name == default else "")
    Console().print(table)


def _row(offered: Offered) -> tuple[str, str, str, str]:
    """Name, window, price in, price out."""
    window = "" if offered.context_window is None else str(offered.context_window)
    price_in = "" if offered.input_price is None else f"{offered.input_price:g}"
    price_out = "" if offered.output_price is None else f"{offered.output_price:g}"
    return offered.name, window, price_in, price_out

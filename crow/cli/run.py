"""The command `crow run`."""

from __future__ import annotations

import argparse

from crow.cli.loading import load, load_and_log
from crow.terminal.run import run_prompt


def run(options: argparse.Namespace) -> int:
    """`crow run`: run one prompt."""
    load_and_log(options)
    return run_prompt(lambda: load(options), options)

"""The commands `crow chat`, `crow login` and `crow demo`."""

from __future__ import annotations

import argparse
import asyncio

from crow import demo, login
from crow.cli.loading import load, load_and_log
from crow.terminal.chat import run_chat


def chat(options: argparse.Namespace) -> int:
    """`crow chat`: talk with crow at the terminal."""
    load_and_log(options)
    return run_chat(lambda: load(options), options, lambda loaded: asyncio.run(login.log_in(loaded)))


def log_in(options: argparse.Namespace) -> int:
    """`crow login`: choose an endpoint, a key and a model."""
    return asyncio.run(login.log_in(load(options)))


def run_demo(_options: argparse.Namespace) -> None:
    """`crow demo`: show crow at work."""
    demo.run_demo()

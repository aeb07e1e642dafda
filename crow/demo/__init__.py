"""`crow demo`: what crow does, shown on a real process, in a minute and without a key.

A scratch directory holds the workspace and crow's own files and is gone afterwards. The offline model answers, unless
the environment names an endpoint or a model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio
from rich.console import Console
from rich.text import Text

from crow.demo.page import Page
from crow.demo.process import DemoFailed
from crow.demo.story import Story

__all__ = ["show"]


def show() -> None:
    """Run the demo on stdout. :raises DemoFailed: a step went wrong."""
    console = Console(highlight=False, emoji=False)
    page = Page(console)
    environment = dict(os.environ)
    offline = not _names_an_endpoint(environment)
    with tempfile.TemporaryDirectory(prefix="crow-demo-") as scratch:
        environment.pop("CROW_CONFIG", None)
        environment["CROW_HOME"] = str(Path(scratch) / "home")
        if offline:
            environment["CROW_MODEL"] = "offline"
        console.print(Text(_welcome(environment, offline=offline)), soft_wrap=True)
        story = Story(page, Path(scratch).resolve(), environment, offline=offline)
        try:
            anyio.run(story.tell)
        except DemoFailed as failure:
            page.line("")
            log = Path(environment["CROW_HOME"]) / "crow.log"
            if log.exists():  # it goes with the scratch directory
                page.line(log.read_text("utf-8", "replace")[-4000:], "dim")
            scene = page.scenes[-1] if page.scenes else "the start"
            raise DemoFailed(f'the demo failed in "{scene}": {failure}') from failure
    page.line("")
    console.rule(Text("What you saw", style="bold"), align="left", style="dim")
    for number, scene in enumerate(page.scenes, start=1):
        console.print(Text(f"  {number}. {scene}{' (not all of it, with this model)' if scene in page.missed else ''}"))
    console.print(Text(_farewell()), soft_wrap=True)


def _names_an_endpoint(environment: Mapping[str, str]) -> bool:
    """Whether the user wants to see crow with a model of theirs; a key alone may be meant for other programs."""
    model = environment.get("CROW_MODEL", "")
    return model != "offline" and bool(model or environment.get("OPENAI_BASE_URL"))


def _welcome(environment: Mapping[str, str], *, offline: bool) -> str:
    if not offline:
        return f"crow, with the model {environment.get('CROW_MODEL') or '(none: set CROW_MODEL)'}"
    words = "crow, with its offline model: it follows rules and is no language model."
    if environment.get("OPENAI_API_KEY"):
        words += "\nOPENAI_API_KEY is set; name a model in CROW_MODEL to see crow with it."
    return words


def _farewell() -> str:
    beside = Path(sys.executable).with_name("crow")
    command = str(beside) if beside.exists() else shutil.which("crow") or "crow"
    server = {"agent_servers": {"Crow": {"type": "custom", "command": command, "args": ["acp"], "env": {}}}}
    return (
        "\nThe scratch directory is gone. To use crow in Zed, put this into its settings.json"
        " (README.md has the other editors):\n\n"
        + json.dumps(server, indent=2)
        + '\n\nThen name an endpoint and a model: README.md, "Configuration".'
    )

"""Crow-channels knows crow only through the protocol."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = {"acp", "aiohttp", "crow_channels", "discord", "yarl"}
ONLY_IN = {
    "acp": {"link.py", "worker.py"},
    "aiohttp": {"discord_chat.py", "webhook_chat.py"},
    "discord": {"discord_chat.py"},
}


def imported(path: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module).partition(".")[0])
    return names


def test_no_module_imports_crow() -> None:
    paths = [*(ROOT / "crow_channels").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert len(paths) > 15
    for path in paths:
        foreign = imported(path) - sys.stdlib_module_names
        assert foreign <= ALLOWED, path
        assert {name for name, files in ONLY_IN.items() if name in foreign and path.name not in files} == set(), path

"""docs/errors.md lists messages that crow really has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def texts_in_crow() -> str:
    """Every text in crow's code. What an f-string inserts is a line break here."""
    found: list[str] = []
    for path in (ROOT / "crow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n\n".join(found)


@pytest.mark.long
def test_every_message_on_the_page_is_one_of_crows() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    pieces = [piece for row in rows for piece in re.findall(r"`([^`]+)`", row)]
    texts = texts_in_crow()
    assert [piece for piece in pieces if piece not in texts] == []
    assert len(rows) > 30

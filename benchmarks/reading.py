"""Thirty questions about files: whether one call of a reading tool answers them, and how many tokens that takes.

The tree has what misleads: long files and lines, several encodings, ignored and hidden files, links, equal names. A
question is answered if the result has what a person would look for, and nothing that is not so. Calls are made as
models make them, also with the names and arguments of other agents. Tokens are crow's own estimate.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, arguments, report
from benchmarks.tools import call, toolbox, unwatched
from crow.domain.tokens import estimate_text

__all__ = ["QUESTIONS"]

MAX_TOKENS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One call and what its result must tell."""

    name: str
    tool: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the call."""
    tells: Sequence[str]
    """Patterns that the result must match."""
    hides: Sequence[str] = ()
    """Patterns that the result must not match."""


def ask(name: str, tool: str, tells: str | Sequence[str], /, *hides: str, **given: Any) -> Question:
    wanted = (tells,) if isinstance(tells, str) else tuple(tells)
    return Question(name=name, tool=tool, given=given, tells=wanted, hides=hides)


QUESTIONS = (
    ask("a whole file", "read_file", r"\Aimport twigs\n\ndef build", path="src/nest.py"),
    ask("a part", "read_file", [r"\A\[lines 10-12 of 3,000\]\n", r"\nvalue = 12\Z"],
        path="src/long.py", line=10, limit=3),
    ask("the rest of a long file", "read_file",
        r"\A\[lines 2990-3000 of 3,000\]\nvalue = 2990\n(?:.*\n)*value = 3000\Z",
        path="src/long.py", line=2990),
    ask("more than one answer holds", "read_file",
        [r"\A\[lines 1-2000 of 3,000\]\n", r"\[continue with line=2001\]\Z"],
        path="src/long.py"),
    ask("a line after the end", "read_file", "has only", path="src/nest.py", line=500),
    ask("a place as programs print it", "read_file", r"\A\[lines 20-\d+ of 3,000\]\nvalue = 20\n",
        path="src/long.py:20"),
    ask("a mention", "read_file", "import twigs", path="@src/nest.py"),
    ask("a wrong directory", "read_file", "src/nest.py", path="lib/nest.py"),
    ask("a wrong ending", "read_file", "src/nest.py", path="src/nest.js"),
    ask("a directory", "read_file", "directory", path="src"),
    ask("an empty file", "read_file", "is empty", path="empty.txt"),
    ask("a binary file", "read_file", "binary", "\0", path="data.bin"),
    ask("Latin-1", "read_file", ["Grüße", "latin|iso8859|cp1252|windows-1252"], path="latin.txt"),
    ask("UTF-16", "read_file", ["vögel", "utf-16"], path="wide.txt"),
    ask("CRLF", "read_file", r"\Aone\ntwo\Z", "\r", path="dos.txt"),
    ask("one long line", "read_file", [r"\Ax+\[\.\.\. [\d,]+ more bytes"], path="minified.js"),
    ask("another agent's reader", "Read", r"\A\[lines 10-11 of 3,000\]\nvalue = 10\n",
        file_path="src/long.py", offset=10, limit=2),
    ask("a viewer", "str_replace_editor", "import twigs", command="view", path="src/nest.py"),
    ask("where a function is called", "grep", [r"src/nest\.py", "other/nest.py"], r"node_modules", pattern=r"build\("),
    ask("lines around", "grep", [r"3: def build", r"4-"], pattern="def build", path="src/nest.py", context=1),
    ask("one kind of file", "grep", r"notes\.md:1", r"nest\.py", pattern="build", glob="*.md"),
    ask("another case", "grep", "notes.md", pattern="THE NEST", ignore_case=True),
    ask("a pattern that is no pattern", "grep", "not a Python regular expression", pattern="build("),
    ask("nothing", "grep", r"\ANo matches", pattern="penguin"),
    ask("too many matches", "grep", "only the first", pattern="value"),
    ask("another agent's search", "Grep", r"3: def build", pattern="def build", path="src/nest.py", **{"-A": 1}),
    ask("a match in a long line", "grep", r"minified\.js:1: .*needle", "x{2000}", pattern="needle"),
    ask("the files", "list_files", ["src/nest.py", "notes.md"], "node_modules", path="src/.."),
    ask("files by name", "list_files", ["src/nest.py", "other/nest.py"], "notes.md", pattern="nest.py"),
    ask("3,000 files", "list_files", [r"many/", r"3,0\d\d files"], path="."),
)  # fmt: skip


def make_tree(root: Path) -> None:
    texts = {
        "src/nest.py": "import twigs\n\ndef build(nest):\n    return twigs.add(nest)\n\nbuild(1)\n",
        "other/nest.py": "from src.nest import build\nbuild(2)\n",
        "src/long.py": "".join(f"value = {number}\n" for number in range(1, 3_001)),
        "notes.md": "How to build the nest.\n",
        "empty.txt": "",
        "minified.js": "x" * 50_000 + "needle" + "x" * 50_000,
        "node_modules/m/index.js": "build()\n",
        ".gitignore": "node_modules/\n",
    }
    texts |= {f"many/d{number % 60}/f{number}.json": json.dumps(number) for number in range(3_000)}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "data.bin").write_bytes(bytes(range(256)) * 20)
    (root / "latin.txt").write_bytes("Grüße aus dem Nest\n".encode("latin-1"))
    (root / "wide.txt").write_bytes("vögel\n".encode("utf-16"))
    (root / "dos.txt").write_bytes(b"one\r\ntwo\r\n")


async def rows(root: Path, *, is_shown: bool) -> list[Row]:
    """Ask all questions."""
    await asyncio.to_thread(make_tree, root)
    tokens: list[int] = []
    missed: list[str] = []
    async with toolbox(root) as box:
        await box.run(call("shell", command="git init -q .", access="full"), "call_1_0", unwatched)
        for question in QUESTIONS:
            made = box.understood(call(question.tool, **question.given))
            planned = await box.plan(made)
            text = planned.fault or (await box.run(made, "call_1_0", unwatched, planned=planned)).text
            is_answered = all(re.search(each, text) for each in question.tells)
            is_answered = is_answered and not any(re.search(each, text) for each in question.hides)
            tokens.append(estimate_text(text))
            missed += [] if is_answered else [question.name]
            if is_shown or not is_answered:
                print(
                    f"--- {question.name}: {'answered' if is_answered else 'MISSED'}\n{text[:800]}\n", file=sys.stderr
                )
    total = len(QUESTIONS)
    return [
        Row(f"reading: questions of {total} that are not answered", len(missed), len(missed), "", 0),
        Row(f"reading: tokens of {total} results", sum(tokens), max(tokens), "", MAX_TOKENS),
    ]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--show", action="store_true", help="print each result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).resolve()) as place:
        made = asyncio.run(rows(Path(place), is_shown=options.show))
    report(made, options.json)
    sys.exit(any(row.is_over for row in made))

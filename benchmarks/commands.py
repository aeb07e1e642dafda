"""Commands whose output misleads or floods: what the model can understand of them, and how many tokens that takes.

Each command runs confined in a small repository, with the access that a model chooses by default. It is understood if
the result says what a person at a terminal would see or come to know, and nothing that is not so. Tokens are crow's own
estimate. Nothing here depends on time.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row, arguments, report
from benchmarks.tools import call, unwatched
from crow.domain.tokens import estimate_text, head_and_tail
from crow.tools import Ports
from crow.tools.mcp.client import McpToolbox, open_toolbox
from crow.tools.no_session import NoSession
from crow.tools.sandbox.confiner import KernelConfiner
from crow.tools.sandbox.policy import SandboxOptions
from crow.tools.workspace import DiskWorkspace
from tests.tools.conftest import FixedPlan

__all__ = ["COMMANDS"]

MAX_TOKENS = 16_000
SETUP = (
    "git init -q . && git config user.email a@b.c && git config user.name A && printf 'one\\ntwo\\n' >a.txt && "
    "printf 'x = 1\\n' >app.py && git add . && git commit -qm first && printf '\\351t\\351\\n' >latin.txt && "
    "head -c 3000 /dev/zero >zeros.bin"
)
LOG = (
    'for n in $(seq {count}); do echo "$n: compiled module_$n.o from module_$n.c"; '
    '[ $n = {at} ] && echo "module_{at}.c:7: error: no nest"; done; exit {code}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command line."""

    name: str
    line: str
    tells: Sequence[str]
    """Patterns that the result must match."""
    hides: Sequence[str] = ()
    """Patterns that the result must not match."""
    access: str = ""
    """The access that the call asks for; if empty, it says nothing."""
    timeout_s: int = 0
    reads: str = ""
    """A text that the file with the whole output must contain."""


COMMANDS = (
    Command(name="success without output", line="true", tells=[r"\A\(no output\)\Z"]),
    Command(name="an exit code", line="(exit 7)", tells=[r"exit code 7"]),
    Command(name="both streams", line="echo out; echo err >&2; exit 1", tells=["out", "err", "exit code 1"]),
    Command(name="no such command", line="nestify --all", tells=["nestify: command not found", "exit code 127"]),
    Command(name="a syntax error", line="if true; then echo", tells=["syntax error", "exit code 2"]),
    Command(name="a signal", line="kill -SEGV $$", tells=["SIGSEGV"]),
    Command(name="a timeout", line="echo begun; sleep 60", tells=["begun", "timed out after 1 s"], timeout_s=1),
    Command(name="input is asked for", line="read -p 'name? ' x; echo got $?", tells=["got 1"]),
    Command(name="an interactive program", line="python3 -c 'input()'", tells=["EOFError", "exit code 1"]),
    Command(name="a pager", line="git log", tells=["first"], hides=["\x1b"]),
    Command(name="an error at the end of a log", line=LOG.format(count=5_000, at=5_000, code=2),
            tells=["no nest", "exit code 2", r"whole output is in \S+; use read_file or grep"], reads="2500: compiled"),
    Command(name="an error in the middle of a log", line=LOG.format(count=5_000, at=2_500, code=2),
            tells=["exit code 2", r"whole output is in \S+"], reads="module_2500.c:7: error: no nest"),
    Command(name="an error at the beginning of a log", line=LOG.format(count=5_000, at=1, code=2),
            tells=["no nest", "exit code 2"], reads="5000: compiled"),
    Command(name="a long line", line="head -c 300000 /dev/zero | tr '\\0' x; echo; echo the end", tells=["the end"]),
    Command(name="colours", line="for n in 1 2 3; do printf '\\033[32mok\\033[0m %s\\n' $n; done",
            tells=[r"\Aok 1\nok 2\nok 3\Z"]),
    Command(name="a progress bar",
            line="for n in $(seq 3000); do printf '\\rBuilding %s of 3000' $n; done; echo; echo built",
            tells=[r"\ABuilding 3000 of 3000\nbuilt\Z"]),
    Command(name="repeated lines", line="for n in $(seq 5000); do echo 'warning: old nest'; done; echo done",
            tells=["5,000 times", "done"]),
    Command(name="binary output", line="cat zeros.bin; echo; echo end", tells=[r"\A\[binary data\]\nend\Z"]),
    Command(name="Latin-1 output", line="cat latin.txt; echo end", tells=["t.*\nend"]),
    Command(name="a failure before a pipe", line="(echo broken; exit 2) | tail -1", tells=["broken", "2, 0"]),
    Command(name="a failure before an earlier pipe", line="(exit 4) | tail -1 && echo fine", tells=["fine", "4, 0"]),
    Command(name="a pipe that ends early", line="yes | head -2", tells=[r"\Ay\ny\Z"]),
    Command(name="a download that may fail", line="curl -sS https://crow.invalid/x || true", tells=["network", "full"]),
    Command(name="a silent download", line="curl -s https://crow.invalid/x || true", tells=["network", "full"]),
    Command(name="an installation before a pipe", line="python3 -m pip install --retries 0 nests 2>&1 | tail -1",
            tells=["network|No module named pip", "1, 0"]),
    Command(name="a local service", line="curl -s http://127.0.0.1:9/ || echo down", tells=["down", "network"]),
    Command(name="sed -i", line="sed -i s/one/1/ a.txt", tells=["a.txt", "write"]),
    Command(name="mv", line="mv a.txt b.txt && ls", tells=["write|Read-only"]),
    Command(name="a commit", line="echo three >>a.txt; git commit -qam second || true", tells=["write|full"]),
    Command(name="a generated file", line="python3 -c 'open(\"made.py\", \"w\").write(\"x\")' || true",
            tells=["write"]),
    Command(name="a change outside of the workspace", line="touch /etc/nest || true", access="write",
            tells=["Read-only|denied", "full"]),
    Command(name="changes that are kept", line="sed -i s/one/1/ a.txt && cat a.txt", access="write",
            tells=["1\ntwo"], hides=["write", "Discarded"]),
    Command(name="failing tests", line="python3 -m unittest discover -s tests 2>&1 | tail -40",
            tells=["AssertionError: 1 != 2", r"FAILED \(failures=1\)", "1, 0"]),
    Command(name="a process that is left over", line="sleep 600 & echo started", tells=["started"]),
    Command(name="text about failures",
            line="printf 'a.py:3:raise PermissionError\\n' >$TMPDIR/l; cat $TMPDIR/l; echo Permission denied",
            tells=["raise PermissionError"], hides=[r"\[Access"]),
)  # fmt: skip


async def result_of(box: McpToolbox, command: Command) -> tuple[str, bool]:
    """Return the result as the model gets it, and whether it was understood."""
    options: dict[str, object] = {"access": command.access} if command.access else {}
    options |= {"timeout_s": command.timeout_s} if command.timeout_s else {}
    outcome = await box.run(call("shell", command=command.line, **options), "call_1_0", unwatched)
    text = head_and_tail(outcome.text, min(48_000, outcome.max_chars or 48_000), 1)
    is_clear = all(re.search(each, text) for each in command.tells)
    is_clear = is_clear and not any(re.search(each, text) for each in command.hides)
    if command.reads:
        named = re.search(r"whole output is in (\S+);", text)
        found = "" if named is None else (
            await box.run(call("grep", pattern=command.reads, path=named[1]), "call_1_1", unwatched)
        ).text  # fmt: skip
        is_clear = is_clear and command.reads in found
    return text, is_clear


async def rows(directory: Path, *, is_shown: bool) -> list[Row]:
    """Run all commands."""
    root = directory / "work"
    root.mkdir()
    confiner = KernelConfiner([root], SandboxOptions(caches=directory / "caches"))
    workspace = DiskWorkspace(root, confiner=confiner)
    tokens: dict[str, int] = {}
    missed = []
    async with open_toolbox(workspace, Ports(log=NoSession(), plan=FixedPlan()), ()) as box:
        await box.run(call("shell", command=SETUP, access="full"), "call_1_0", unwatched)
        (root / "tests").mkdir()
        (root / "tests" / "test_nest.py").write_text(
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(1, 2)\n"
        )
        for command in COMMANDS:
            text, is_clear = await result_of(box, command)
            tokens[command.name] = estimate_text(text)
            missed += [] if is_clear else [command.name]
            if is_shown or not is_clear:
                print(f"--- {command.name}: {'clear' if is_clear else 'NOT CLEAR'}\n{text[:1500]}\n", file=sys.stderr)
        await workspace.reap()
    await workspace.close()
    total = len(COMMANDS)
    found = [Row(f"commands of {total} that are not understood", len(missed), len(missed), "", 0)]
    found.append(Row(f"tokens of {total} results", sum(tokens.values()), max(tokens.values()), "", MAX_TOKENS))
    return found


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--show", action="store_true", help="print each result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).resolve()) as place:
        made = asyncio.run(rows(Path(place), is_shown=options.show))
    report(made, options.json)
    sys.exit(any(row.is_over for row in made))

"""The commands in docs/cookbook.md and docs/tour.md print what these pages say."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.fork_server import put_on_path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```console\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "cookbook-ends-here"


def commands_of(page: str) -> list[tuple[str, str]]:
    """Return the commands of the page that begin with `$ `, each with the output that the page shows. `...` stands for
    any text, also none."""
    found: list[tuple[str, str]] = []
    for block in BLOCK.findall((DOCS / page).read_text("utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def run(commands: list[str], folder: Path) -> list[str]:
    """Run the commands one after the other in one bash in `folder`. Return what each printed on stdout."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CROW_", "OPENAI_", "GIT_", "MAKE", "MFLAGS"))
    }
    programs = folder / "programs"
    put_on_path(programs)
    env |= {
        "CROW_HOME": str(folder / "home"),
        "PATH": f"{programs}:{env['PATH']}",
        "LC_ALL": "C.UTF-8",
    }
    script = "\n".join(f"{command}\n(exit_code=$?; echo; echo {MARK}; exit $exit_code)" for command in commands)
    done = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        timeout=600,
    )
    outputs = done.stdout.split(f"\n{MARK}\n")
    assert len(outputs) == len(commands) + 1, done.stderr
    return outputs[:-1]


@pytest.mark.long
@pytest.mark.parametrize(("page", "tasks"), [("cookbook.md", 12), ("tour.md", 5)])
def test_the_commands_of_a_page_print_what_the_page_says(page: str, tasks: int, tmp_path: Path) -> None:
    shown = commands_of(page)
    assert len(re.findall(r"^## \d+\. ", (DOCS / page).read_text("utf-8"), re.MULTILINE)) == tasks
    assert len(shown) >= 2 * tasks
    printed = run([command for command, _ in shown], tmp_path)
    checker = doctest.OutputChecker()
    wrong = [
        f"$ {command}\n{got}\n-- instead of --\n{wanted}"
        for (command, wanted), got in zip(shown, printed, strict=True)
        if wanted.strip() and not checker.check_output(wanted.strip(), got.strip(), doctest.ELLIPSIS)
    ]
    assert wrong == [], "\n\n".join(wrong)

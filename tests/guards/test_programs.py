"""Only `crow/programs.py` looks up programs, and only known modules start them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STARTING_MODULES = {
    "crow/bridge/__init__.py": "crow's own server, with the Python that runs crow",
    "crow/demo.py": "crow itself",
    "crow/programs.py": "the api_key_command and the share.command of the user's settings",
    "crow/serve/resident.py": "crow's own server",
    "crow/terminal/browser.py": "the user's browser",
    "crow/tools/builtin/scan.py": "the ripgrep whose path crow passes to it",
    "crow/tools/process.py": "the commands, servers and hooks that other modules pass to it",
    "crow/tools/sandbox/bubblewrap.py": "bubblewrap and its helpers, by absolute path",
    "crow/tools/sandbox/landlock.py": "the model's commands",
    "crow/tools/sandbox/launcher.py": "the model's commands, inside the sandbox",
    "crow/tools/sandbox/seatbelt.py": "/usr/bin/sandbox-exec",
}
"""The modules that start programs, and what they start."""

STARTING = {
    *(f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")),
    *("asyncio.create_subprocess_exec", "*.subprocess_exec", "anyio.run_process", "anyio.open_process"),
    *("os.execv", "os.execve", "os.posix_spawn", "os.spawnv", "os.spawnve", "os.startfile"),
}
"""These start a program. `*` stands for any object."""

FORBIDDEN = {
    *("shutil.which", "os.system", "os.popen", "os.posix_spawnp", "asyncio.create_subprocess_shell"),
    *("*.subprocess_shell", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *(f"os.{kind}{end}" for kind in ("exec", "spawn") for end in ("l", "le", "lp", "lpe", "vp", "vpe")),
    *("platform.platform", "platform.processor", "platform.architecture", "uuid.getnode", "uuid.uuid1"),
    *("webbrowser", "pydoc", "pty", "multiprocessing", "ctypes.util", "concurrent.futures.ProcessPoolExecutor"),
}
"""These look up a program on PATH, or start one by its bare name."""


def dotted(node: ast.expr) -> str:
    """Return the text of a name, also of one with dots. Return an empty text for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if (inner := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def full_names(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """All uses of imported names with a dot, and all imports, by the names that the modules themselves have."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names
            yield from ((node, name) for name in (node.module or "", *names.values()))
    types = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}  # such as Popen[bytes]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in types:
            inner = dotted(node.value)
            yield node, f"{imported.get(inner, inner)}.{node.attr}"
            yield node, f"*.{node.attr}"


def findings(code: str, module: str) -> list[str]:
    """What is wrong with a module."""
    tree = ast.parse(code)
    found = []
    for node, name in full_names(tree):
        if name in FORBIDDEN:
            found.append(f"line {node.lineno}: {name} looks up a program on PATH; use crow/programs.py")
        elif name in STARTING and module not in STARTING_MODULES:
            found.append(f"line {node.lineno}: {name} starts a program; add the module to this test if it must")
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        first = call.args[0]
        if isinstance(first, (ast.List, ast.Tuple)) and first.elts:
            first = first.elts[0]
        starts = getattr(call.func, "attr", getattr(call.func, "id", "")) in {"run", "Popen", "start"}
        is_bare = isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value[:1] != "/"
        if starts and is_bare and module in STARTING_MODULES:
            found.append(f"line {call.lineno}: a program is started by its bare name")
    return found


def may_start(code: str) -> bool:
    """Return whether the text has all words of one of the names: parsing every module takes seconds."""
    words = {"*", *re.findall(r"\w+", code)}
    return any(words.issuperset(name.split(".")) for name in STARTING | FORBIDDEN)


@pytest.mark.long
def test_no_module_looks_up_programs_or_starts_them_unexpectedly() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(ROOT.glob("crow/**/*.py"))}
    assert len(texts) > 400
    found = {name: findings(text, name) for name, text in texts.items() if may_start(text)}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_table_names_no_module_that_starts_nothing() -> None:
    idle = [
        module
        for module in STARTING_MODULES
        if not any(name in STARTING for _, name in full_names(ast.parse((ROOT / module).read_text("utf-8"))))
    ]
    assert idle == []


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.run(['git', 'status'])",
        "import subprocess as s\ns.Popen(x)",
        "from subprocess import run\nrun(x)",
        "import shutil\nshutil.which('rg')",
        "from shutil import which",
        "import webbrowser",
        "def f():\n    import webbrowser as w",
        "import platform\nplatform.platform()",
        "from ctypes import util\nutil.find_library('c')",
        "import ctypes.util",
        "import os\nos.system('true')",
        "import os\nos.execvp('sh', ['sh'])",
        "import asyncio\nasyncio.create_subprocess_exec('git')",
        "loop.subprocess_exec(make, 'git')",
        "import anyio\nanyio.run_process(['git'])",
    ],
)
def test_the_guard_finds_every_way_to_start_a_program(code: str) -> None:
    assert may_start(code)
    assert findings(code, "crow/new.py")


def test_the_guard_finds_bare_names_where_programs_may_be_started() -> None:
    assert findings("import subprocess\nsubprocess.run(['git', 'status'])", "crow/tools/process.py")
    assert not findings("import subprocess\nsubprocess.run(['/usr/bin/git'])", "crow/tools/process.py")

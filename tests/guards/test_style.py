"""Functions and files are short, fields are explained beside them, and no test replaces a function of crow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 60
MOST_FILE_LINES = 700
PERHAPS_LONG = rf"(?m)^( *)(?:async )?def .*\n(?:(?!(?:\1)?(?:async |def |class |@)).*\n){{{MOST_LINES - 1}}}"
"""The text of every long function: a line with `def`, and lines of which none begins something new at its depth."""
PERHAPS_NAMES_FIELDS = r'dataclass[^"]*?\bclass [^"]*?"""(?:(?!""")(?:.|\n))*`'
"""The text of every dataclass whose docstring names something."""
REPLACERS = ("setattr", "patch", "object", "dict")


def parsed(*folders: str, having: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules with a text that matches `having`: parsing all of them takes seconds."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(having, text := path.read_text("utf-8")):
                yield str(path.relative_to(ROOT)), ast.parse(text)


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if isinstance(child, ast.stmt | ast.match_case | ast.excepthandler):
            yield from functions(child)


def test_no_function_has_more_than_60_lines() -> None:
    long = {
        (name, node.name)
        for name, module in parsed("crow", "packages", having=PERHAPS_LONG)
        for node in functions(module)
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES
    }
    assert not long


def test_the_guard_sees_functions_at_any_depth() -> None:
    code = "class A:\n  if x:\n    try:\n      y\n    except E:\n      async def one():\n        def two(): ..."
    assert [node.name for node in functions(ast.parse(code))] == ["one", "two"]


@pytest.mark.parametrize(("lines", "is_found"), [(MOST_LINES, True), (MOST_LINES - 2, False)])
def test_the_guard_parses_files_with_long_functions(lines: int, is_found: bool) -> None:
    code = "class A:\n    async def one(\n        self,\n    ) -> None:\n" + "        x = 1\n\n" * (lines // 2 - 1)
    assert bool(re.search(PERHAPS_LONG, code + "    def two(self) -> None: ...\n")) is is_found


def test_no_file_has_more_than_700_lines() -> None:
    paths = [path for folder in ("crow", "packages") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    assert not [path for path in paths if len(path.read_text("utf-8").splitlines()) > MOST_FILE_LINES]


def explained_at_class(module: ast.Module) -> Iterator[str]:
    """The fields of dataclasses that the docstring of the class names, but no text beside the field explains."""
    for each in ast.walk(module):
        if not isinstance(each, ast.ClassDef) or "dataclass" not in "".join(map(ast.unparse, each.decorator_list)):
            continue
        named = re.findall(r"`(\w+)`", ast.get_docstring(each) or "")
        for node, after in zip(each.body, [*each.body[1:], None], strict=True):
            is_beside = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in named and not is_beside:
                yield f"{each.name}.{ast.unparse(node.target)}"


def test_each_field_is_explained_beside_it() -> None:
    modules = parsed("crow", "packages", having=PERHAPS_NAMES_FIELDS)
    assert not [(name, field) for name, module in modules for field in explained_at_class(module)]


def test_the_guard_sees_a_field_that_is_explained_at_its_class() -> None:
    code = '''
@dataclass(frozen=True)
class Point:
    """A point. `x` goes to the right, and `y` up."""

    x: int
    y: int
    """Upwards."""
'''
    assert re.search(PERHAPS_NAMES_FIELDS, code)
    assert list(explained_at_class(ast.parse(code))) == ["Point.x"]


def own_names(module: ast.Module) -> set[str]:
    """The names that this module imports from crow."""
    names = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "crow",
            "acp_check",
            "crow_channels",
        ):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] == "crow"}
    return names


def replaced(module: ast.Module) -> Iterator[str]:
    """The attributes of crow that the module replaces with `monkeypatch` or `mock`."""
    own = own_names(module)
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name for alias in node.names if "mock" in f"{getattr(node, 'module', '')} {alias.name}")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REPLACERS):
            continue
        match node.args:
            case [ast.Constant(value=str(target)), _, *_] if target.startswith("crow."):
                yield target.rpartition(".")[2]
            case [target, ast.Constant(value=str(name)), *_] if root_of(target) in own:
                yield name


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_constant(name: str) -> bool:
    return name.strip("_").isupper() or name == "__file__"


@pytest.mark.long
def test_no_test_replaces_a_function_of_crow() -> None:
    found = {
        (file, name)
        for file, module in parsed("tests", "packages", having=rf"\.({'|'.join(REPLACERS)})\(|mock")
        for name in replaced(module)
        if not is_constant(name)
    }
    assert not found


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('from crow.store import rescue\nmonkeypatch.setattr(rescue, "_copy", 1)', ["_copy"]),
        ('from crow.store import rescue\nmonkeypatch.setattr(rescue.Store, "write", 1)', ["write"]),
        ('monkeypatch.setattr("crow.store.append.now_ms", 1)', ["now_ms"]),
        ("from unittest import mock", ["mock"]),
        ('import os\nmonkeypatch.setattr(os, "geteuid", 1)', []),
    ],
)
def test_the_guard_sees_replaced_functions(code: str, names: Sequence[str]) -> None:
    assert list(replaced(ast.parse(code))) == names

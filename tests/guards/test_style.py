"""Functions are short, and no test replaces a function of crow."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 60
REPLACERS = ("setattr", "patch", "object", "dict")


def parsed(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def test_no_function_has_more_than_60_lines() -> None:
    long = {
        (name, node.name)
        for name, module in parsed("crow", "packages")
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    }
    assert not long


def own_names(module: ast.Module) -> set[str]:
    """The names that this module imports from crow."""
    names = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("crow", "acp_check"):
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


def test_no_test_replaces_a_function_of_crow() -> None:
    found = {
        (file, name)
        for file, module in parsed("tests", "packages")
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

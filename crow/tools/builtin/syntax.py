"""Says whether a change broke the syntax of a file."""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable
from pathlib import PurePath

import anyio.to_thread

_MAX_CHARS = 300_000
_MAX_YAML_CHARS = 40_000
"""YAML with more characters than this is not checked. For other files, the limit is `_MAX_CHARS`."""

_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
_WITH_COMMENTS = ("tsconfig", "jsconfig", "devcontainer", ".eslintrc", "settings", "launch", "tasks", "extensions")
"""JSON files whose names begin like this often contain comments."""
_TEMPLATE = re.compile(r"\{%|\{\{")
_PYTHON_TEMPLATE = re.compile(r"\{%|\{\{[ -]")
"""In Python, `{{` alone is usual: f-strings have it."""
_filters_lock = threading.Lock()


async def find_syntax_error(name: str, before: str | None, after: str) -> str | None:
    """Return a sentence for the model if a change broke the syntax of a file. Return None if the new text can be
    parsed, if the old text could not be parsed either, or if the file is not checked.

    `name` is the file's name without directories. `before` is None for a new file. New files that look like templates
    are not checked."""
    suffix = PurePath(name).suffix
    language = _LANGUAGES.get(suffix)
    if language is None or len(after) > _MAX_CHARS or not after.strip():
        return None
    template = _PYTHON_TEMPLATE if language[0] == _PYTHON else _TEMPLATE
    has_comments = suffix == ".json" and name.startswith(_WITH_COMMENTS)
    if not (before or "").strip() and (has_comments or template.search(after)):
        return None
    return await anyio.to_thread.run_sync(_compare, language, before, after)


def _compare(language: tuple[str, Callable[[str], str | None]], before: str | None, after: str) -> str | None:
    what, parse = language
    problem = parse(after.removeprefix("\ufeff"))
    if problem is None:
        return None
    if before is None or not before.strip():
        return f"It does not parse as {what}: {problem}."
    if parse(before.removeprefix("\ufeff")) is not None:
        return None
    return f"With this change, it no longer parses as {what}: {problem}."


def _python(text: str) -> str | None:
    # The filters of warnings belong to the whole process, so only one thread at a time may change them.
    with _filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except SyntaxError as error:
            return error.msg if error.lineno is None else f"{error.msg}, line {error.lineno}"
        except (ValueError, MemoryError, RecursionError):
            return None
    return None


def _json(text: str) -> str | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError):
        return None
    return None


def _toml(text: str) -> str | None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    except (ValueError, RecursionError):
        return None
    return None


def _yaml(text: str) -> str | None:
    if len(text) > _MAX_YAML_CHARS:
        return None
    import yaml  # takes 15 ms, and most sessions edit no YAML

    try:
        # Events, not values: aliases are not expanded.
        for _ in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            pass
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        return f"{error.problem or error.context}{line}"
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return None


_LANGUAGES: dict[str, tuple[str, Callable[[str], str | None]]] = {
    ".py": (_PYTHON, _python),
    ".pyi": (_PYTHON, _python),
    ".json": ("JSON", _json),
    ".toml": ("TOML", _toml),
    ".yaml": ("YAML", _yaml),
    ".yml": ("YAML", _yaml),
}

"""Settings into the user's file, with everything else in it left as it is.

Strategy: the text is changed line by line (comments and order stay), then read back; a file in which the change did not
come out is never written. Written beside the old one, readable by the user alone, and put in its place in one step.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from crow.domain.errors import ConfigError

__all__ = ["save_model_settings", "with_model_settings"]

_TABLE = re.compile(r"\s*\[\[?\s*([^\]]*?)\s*\]\]?\s*(#.*)?$")


def save_model_settings(file: Path, values: Mapping[str, str | None]) -> None:
    """Set keys of `[model]` in `file`, made with mode 0600 if need be; None takes a key out.

    :raises ConfigError: the file cannot be read or written, or cannot be changed safely.
    """
    try:
        text = file.read_text("utf-8") if file.exists() else ""
        changed = with_model_settings(text, values)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.{os.getpid()}.new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(changed)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file.resolve())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; change [model] there by hand") from error


def with_model_settings(text: str, values: Mapping[str, str | None]) -> str:
    """`text` (TOML) with these keys of `[model]`. :raises ValueError: it cannot be done without harm."""
    before = tomllib.loads(text)
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if _table_of(line) == "model"), None)
    if start is None:
        lines += ["", "[model]"] if lines else ["[model]"]
        start = len(lines) - 1
    end = next((at for at in range(start + 1, len(lines)) if _table_of(lines[at]) is not None), len(lines))
    kept = [line for line in lines[start + 1 : end] if _key_of(line) not in values]
    added = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]
    changed = "\n".join([*lines[: start + 1], *added, *kept, *lines[end:]]) + "\n"
    given = before.get("model")
    model = {key: value for key, value in (given if isinstance(given, dict) else {}).items() if key not in values}
    wanted = before | {"model": model | {key: value for key, value in values.items() if value is not None}}
    try:
        came_out = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        came_out = False
    if not came_out:
        raise ValueError("its [model] is written in a way that cannot be changed safely")
    return changed


def _table_of(line: str) -> str | None:
    match = _TABLE.match(line)
    return None if match is None else match[1]


def _key_of(line: str) -> str:
    return line.partition("=")[0].strip().strip("\"'") if "=" in line else ""

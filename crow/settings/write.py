"""Writes into the user's `config.toml`: the model's settings, and MCP servers."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from crow.domain.errors import ArgumentError, ConfigError
from crow.domain.text import in_format_of

_HEADER = re.compile(r"\s*\[")


def save_model_settings(file: Path, values: Mapping[str, str | None]) -> None:
    """Set keys of `[model]` in `file`. If the value of a key is None, remove the key. Comments and the order of keys
    are preserved. A new file has mode 0600, and an existing one keeps its mode.

    :raises ConfigError: the file cannot be read, changed or written.
    """
    _rewrite(file, lambda text: set_model_keys(text, values))


def save_server(file: Path, name: str, values: Mapping[str, Any], *, replace: bool = False) -> None:
    """Add the table `[mcp_servers.NAME]` to `file`. Everything else in the file is preserved.

    :raises ArgumentError: `file` already has a server with this name, and `replace` is false.
    :raises ConfigError: the file cannot be read, changed or written.
    """
    _rewrite(file, lambda text: add_server(text, name, values, replace=replace))


def remove_server(file: Path, name: str) -> None:
    """Remove the table `[mcp_servers.NAME]` from `file`. Everything else in the file is preserved.

    :raises ArgumentError: `file` has no server with this name.
    :raises ConfigError: the file cannot be read, changed or written.
    """
    _rewrite(file, lambda text: without_server(text, name))


def _rewrite(file: Path, change: Callable[[str], str]) -> None:
    try:
        target = file.resolve()  # the file may be a link, for example to a directory on another disk
        saved = target.read_bytes().decode() if target.exists() else ""
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o600
        changed = in_format_of(saved, change(saved.replace("\r\n", "\n")))
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.new")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(changed.encode())
                out.flush()
                os.fsync(out.fileno())
            part.chmod(mode)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, UnicodeError, TOMLKitError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be changed: {error}") from error


def set_model_keys(text: str, values: Mapping[str, str | None]) -> str:
    """Return TOML text in which the keys of `[model]` have these values. Keys whose value is None are removed.

    :raises TOMLKitError: the text is not valid TOML, or `model` is not a table in it.
    """
    document = tomlkit.parse(text)
    model = document.setdefault("model", tomlkit.table())
    if not isinstance(model, MutableMapping):
        raise TOMLKitError("`model` is not a table; edit the file by hand")
    for key, value in values.items():
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value
    return tomlkit.dumps(document)


def add_server(text: str, name: str, values: Mapping[str, Any], *, replace: bool) -> str:
    """Return TOML text with the table `[mcp_servers.NAME]` added at its end.

    :raises ArgumentError: the text already has this table, and `replace` is false.
    :raises TOMLKitError: the text cannot be changed.
    """
    if name in _servers(text):
        if not replace:
            raise ArgumentError(f"There is already an MCP server {name}; to replace it, add --replace.")
        text = without_server(text, name)
    table = tomlkit.table()
    for key, value in values.items():
        if isinstance(value, Mapping):
            table[key] = tomlkit.inline_table()
            table[key].update(value)
        else:
            table[key] = value
    servers = tomlkit.table(is_super_table=True)
    servers[name] = table
    document = tomlkit.document()
    document["mcp_servers"] = servers
    start = f"{text.rstrip()}\n\n" if text.strip() else ""
    wanted = tomllib.loads(text)
    wanted["mcp_servers"] = {**_servers(text), name: dict(values)}
    return _checked(start + tomlkit.dumps(document), wanted)


def without_server(text: str, name: str) -> str:
    """Return TOML text without the table `[mcp_servers.NAME]`. Comments outside of the table stay. Comments after the
    last key of the table stay too, because they usually belong to the next table.

    :raises ArgumentError: the text does not have this table.
    :raises TOMLKitError: the text cannot be changed.
    """
    servers = _servers(text)
    if name not in servers:
        known = f"there are {', '.join(sorted(servers))}" if servers else "there are none"
        raise ArgumentError(f"There is no MCP server {name} in the file; {known}.")
    kept: list[str] = []
    part: list[str] = []
    is_removed = False
    for line in [*text.splitlines(keepends=True), "["]:
        if _HEADER.match(line):
            kept += _after_last_key(part) if is_removed else part
            part, is_removed = [], line != "[" and _is_header_of(line, name)
        part.append(line)
    wanted = tomllib.loads(text)
    del wanted["mcp_servers"][name]
    if not wanted["mcp_servers"]:
        del wanted["mcp_servers"]
    return _checked("".join(kept), wanted)


def _servers(text: str) -> Mapping[str, Any]:
    """Return the tables `[mcp_servers.NAME]` in TOML text, by name."""
    found = tomllib.loads(text).get("mcp_servers", {})
    if not isinstance(found, dict):
        raise TOMLKitError("`mcp_servers` is not a table; edit the file by hand")
    return found


def _is_header_of(line: str, name: str) -> bool:
    """Return whether a line is the header of the table `[mcp_servers.NAME]`, or of a table inside that table."""
    try:
        found = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    servers = found.get("mcp_servers")
    return isinstance(servers, dict) and name in servers


def _after_last_key(lines: list[str]) -> list[str]:
    """Return the comments and blank lines at the end of a table."""
    last = max(index for index, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
    return lines[last + 1 :]


def _checked(text: str, wanted: Mapping[str, Any]) -> str:
    """Check that the changed text has the values in `wanted`, and return the text. The check is needed because the text
    was changed line by line. Such a change is wrong if, for example, a string of several lines contains a line that
    looks like a header. :raises TOMLKitError: the values differ."""
    try:
        is_right = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise TOMLKitError("the file is written in a way that crow cannot edit; edit it by hand")
    return text

"""Writes the model's settings into the user's `config.toml`."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from crow.domain.errors import ConfigError


def save_model_settings(file: Path, values: Mapping[str, str | None]) -> None:
    """Set keys of `[model]` in `file`; None removes a key. Comments and the order of keys are preserved. A new file has
    mode 0600.

    :raises ConfigError: the file cannot be read, changed or written.
    """
    try:
        changed = set_model_keys(file.read_text("utf-8") if file.exists() else "", values)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.new")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(changed)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file.resolve())
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise ConfigError(f"{file} cannot be changed: {error}") from error


def set_model_keys(text: str, values: Mapping[str, str | None]) -> str:
    """Return TOML text with these keys of `[model]` set, or removed if the value is None.

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

"""Reads the named tables of the user's file: `[providers.NAME]` and `[models.NAME]`.

Strategy: each table is checked by itself, so that an error names the table, the key and the value; every value keeps
the place it came from. A provider's key is taken from its variable here, a command is left for the first request.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import SecretStr, ValidationError

from crow.domain.errors import ConfigError
from crow.settings.endpoints import NamedModel, ProviderSettings
from crow.settings.fields import Expect, Given, Section, all_metadata
from crow.settings.presets import PRESETS
from crow.settings.text import shown, shown_key

__all__ = ["Named", "read_named"]

Table = TypeVar("Table", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The tables by name; `given` holds every value that was given, by its dotted key (`providers.NAME.key`)."""

    providers: Mapping[str, ProviderSettings] = field(default_factory=dict)
    models: Mapping[str, NamedModel] = field(default_factory=dict)
    given: Mapping[str, Given] = field(default_factory=dict)


def read_named(providers: object, models: object, file: Path, env: Mapping[str, str]) -> Named:
    """The tables under `providers` and `models`, as TOML gives them. :raises ConfigError:"""
    given: dict[str, Given] = {}
    endpoints = {
        name: _with_key(name, table, env, given)
        for name, table in _tables("providers", providers, ProviderSettings, file, given).items()
    }
    for name, table in endpoints.items():
        if table.base_url is None and name not in PRESETS:
            raise ConfigError(
                f"{file}: {shown_key('providers', name)} has no base_url; set one. Without it there are the presets "
                f"{', '.join(PRESETS)}."
            )
    named = _tables("models", models, NamedModel, file, given)
    for name, model in named.items():
        if model.provider is not None and model.provider not in endpoints:
            there = f"there are {', '.join(endpoints)}" if endpoints else f"add [providers.{model.provider}]"
            raise ConfigError(
                f"{file}: {shown_key('models', name)}.provider is {shown('provider', model.provider)}; {there}"
            )
    return Named(providers=endpoints, models=named, given=given)


def _tables(
    kind: str, tables: object, table_type: type[Table], file: Path, given: dict[str, Given]
) -> dict[str, Table]:
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{file}: {kind} is {shown(kind, tables)}; expected tables: [{kind}.NAME]")
    read: dict[str, Table] = {}
    for name, table in tables.items():
        place = shown_key(kind, name)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{file}: {place} is {shown(name, table)}; expected a table: [{place}]")
        read[name] = _table(place, table, table_type, file)
        given.update({f"{place}.{key}": Given(value, file.name, str(file)) for key, value in table.items()})
    return read


def _table(place: str, table: Mapping[str, object], table_type: type[Table], file: Path) -> Table:
    fields = table_type.model_fields
    for key in table:
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {place}.{nearest[0]}?" if nearest else f"there are {', '.join(fields)}"
            raise ConfigError(f"{file}: there is no setting {place}.{key}; {hint}")
    try:
        return table_type.model_validate(dict(table))
    except ValidationError as error:
        # The error's own text shows values, secrets too.
        wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
    lines = []
    for key in wrong:
        words = next(item.words for item in all_metadata(fields[key]) if isinstance(item, Expect))
        lines.append(f"{file}: {place}.{key} is {shown(key, table[key])}; expected {words}")
    raise ConfigError("\n".join(lines))


def _with_key(name: str, table: ProviderSettings, env: Mapping[str, str], given: dict[str, Given]) -> ProviderSettings:
    """The table with the key of its variable, which is stronger than one in the file."""
    preset = PRESETS.get(name)
    variable = table.api_key_env or (preset.key_env.value if preset is not None and preset.key_env else None)
    secret = env.get(variable, "").strip() if variable is not None else ""
    if not secret:
        return table
    origin, key = f"environment {variable}", SecretStr(secret)
    given[f"{shown_key('providers', name)}.api_key"] = Given(key, origin, origin)
    return table.model_copy(update={"api_key": key})

"""The command `crow config`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from crow.cli.loading import load
from crow.cli.output import say
from crow.domain.text import safe_json


def print_settings(options: argparse.Namespace) -> None:
    """`crow config`: print the settings as TOML with masked secrets. A comment beside each value says where the value
    comes from."""
    loaded = load(options)
    if loaded.problem is not None:
        raise loaded.problem
    paths = loaded.paths
    say(f"# settings   {paths.config_file}{'' if paths.config_file.exists() else ' (does not exist)'}")
    database = loaded.settings.database.shown()["url"] or paths.database
    say(f"# sessions   {database}")
    say(f"# log        {paths.log_file}")
    print()
    width = max(map(len, loaded.sources))
    for key, value in loaded.values().items():
        if value is None:
            say(f"# {key:<{width}}  # unset")
        else:
            say(f"{f'{key:<{width}} = {_toml(value)}':<{width + 32}}  # {loaded.sources[key]}")


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(name))} = {_toml(inner)}" for name, inner in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if hasattr(value, "get_secret_value"):
        secret = value.get_secret_value()
        # This shows enough to tell two keys apart.
        value = f"{secret[:3]}…{secret[-4:]}" if len(secret) >= 16 else "…"
    return safe_json(json.dumps(value, ensure_ascii=False))

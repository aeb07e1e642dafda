"""Gathers the settings from flags, environment, the user's file and the defaults.

Strategy: values are collected under dotted keys, weakest source first, with the origin of each beside it; then all are
checked at once, and an error names the origin, the key and the value. Named tables (`[providers.NAME]`) can only stand
in the file, and are read by `named`. Reads the user's file and nothing else; a workspace is never looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from crow.domain.errors import ConfigError
from crow.settings.endpoints import PRESETS
from crow.settings.values import (
    ABOUT_THE_ENDPOINT,
    ABOUT_THE_MODEL,
    Expected,
    Section,
    Settings,
    SettingValue,
    all_metadata,
    fault_at,
    shown,
)

__all__ = ["EndpointKeys", "Loaded", "Paths", "find_paths", "load_settings"]

_FROM_ENVIRONMENT = {"model.name": "CROW_MODEL", "model.base_url": "OPENAI_BASE_URL", "log.level": "CROW_LOG"}
_FLAGS = {
    "model.name": "--model",
    "model.base_url": "--base-url",
    "permissions.mode": "--mode",
    "log.level": "--log-level",
}


Stamp: TypeAlias = tuple[int, int, int] | None
"""Of a file: inode, size and time of change in ns; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointKeys:
    """Where the keys of endpoints are: environment variables, and the keys themselves, also those not in use now."""

    variables: frozenset[str] = frozenset()
    values: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings, and where each came from: `sources` maps every dotted key to `flag --model`, `environment CROW_MODEL`,
    the name of the user's file, or `default`. `named` holds what was given in named tables, by dotted keys too.
    `stamp` tells one state of the user's file from another.

    `summary_prompt` is what `compaction.prompt_file` holds, empty if it is unset. With a `problem`, `settings` are the
    defaults and no prompt may run: its words go to the user.
    """

    settings: Settings
    sources: Mapping[str, str]
    paths: Paths
    summary_prompt: str = ""
    problem: ConfigError | None = None
    keys: EndpointKeys = EndpointKeys()
    named: Mapping[str, object] = field(default_factory=dict, repr=False)
    stamp: Stamp = None

    @property
    def is_stale(self) -> bool:
        """Whether the user's file is another one by now."""
        return stamp_of(self.paths.config_file) != self.stamp

    def value(self, key: str) -> object:
        """The value of a key of `sources`; secrets are `SecretStr`."""
        if key in self.named:
            value = self.named[key]
        else:
            section, _, name = key.rpartition(".")
            value = getattr(getattr(self.settings, section) if section else self.settings, name)
        if key == _SERVERS:
            return {name: server.shown() for name, server in self.settings.mcp_servers.items()}
        if key.endswith(".headers") and isinstance(value, Mapping):
            return {name: SecretStr(str(text)) for name, text in value.items()}
        return SecretStr(value) if key.endswith(".api_key") and isinstance(value, str) else value


def load_settings(flags: Mapping[str, str], env: Mapping[str, str]) -> Loaded:
    """Gather the settings. `flags` maps dotted keys (`model.name`) to texts; an empty text counts as not given.

    What stands in the user's file raises nothing: see `Loaded.problem`.
    """
    paths = find_paths(env)
    stamp = stamp_of(paths.config_file)  # before it is read: a change in between is seen later
    try:
        gathered, given, keys = _gather(flags, env, paths.config_file)
        settings = _check(gathered)
        summary_prompt = _read_prompt(gathered.get("compaction.prompt_file"), paths.config_file.parent)
    except ConfigError as problem:
        return Loaded(
            settings=Settings(),
            sources=dict.fromkeys(_KEYS, "default"),
            paths=paths,
            problem=problem,
            keys=_endpoint_keys((), env),
            stamp=stamp,
        )
    in_tables = {key for key in _NAMED if any(name.startswith(f"{key}.") for name in given)}
    sources = {key: gathered[key].source if key in gathered else "default" for key in _KEYS if key not in in_tables}
    sources.update({key: each.source for key, each in given.items()})
    named = {key: each.value for key, each in given.items()}
    return Loaded(
        settings=settings,
        sources=sources,
        paths=paths,
        summary_prompt=summary_prompt,
        named=named,
        keys=keys,
        stamp=stamp,
    )


def stamp_of(file: Path) -> Stamp:
    """The state of a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


_NAMED = ("models", "providers")


def _gather(
    flags: Mapping[str, str], env: Mapping[str, str], file: Path
) -> tuple[dict[str, SettingValue], Mapping[str, SettingValue], EndpointKeys]:
    """What was given by dotted keys, what was given in named tables, and the keys of all endpoints."""
    stronger: dict[str, SettingValue] = {}
    for key, variable in _FROM_ENVIRONMENT.items():
        if text := env.get(variable, "").strip():
            stronger[key] = SettingValue(text, f"environment {variable}", f"environment {variable}")
    for key, text in flags.items():
        if text:
            flag = f"flag {_FLAGS.get(key, key)}"
            stronger[key] = SettingValue(_from_text(key, text), flag, flag)

    tables = dict(_read_file(file, named=bool(env.get("CROW_CONFIG"))))
    named: dict[str, object] = {key: tables.pop(key) for key in _NAMED if isinstance(tables.get(key), Mapping)}
    values = dict(_flat(tables))
    _refuse_unknown(values, file)
    in_model = {"api_key": values.get("model.api_key"), "api_key_env": values.get("model.api_key_env")}
    keys = _endpoint_keys((in_model, *_tables_in(named.get("providers"))), env)
    _drop_what_belongs_elsewhere(values, stronger)
    gathered = {key: SettingValue(value, file.name, str(file)) for key, value in values.items()}

    key_variable = values.get("model.api_key_env", "OPENAI_API_KEY")
    if isinstance(key_variable, str) and (secret := env.get(key_variable, "").strip()):
        variable = f"environment {key_variable}"
        gathered["model.api_key"] = SettingValue(SecretStr(secret), variable, variable)
    given: Mapping[str, SettingValue] = {}
    if named:
        from crow.settings.endpoints import read_named

        tables_read = read_named(named.get("providers", {}), named.get("models", {}), file, env)
        given = tables_read.given
        gathered["providers"] = SettingValue(tables_read.providers, file.name, str(file))
        if "models" in named:
            gathered["models"] = SettingValue(tables_read.models, file.name, str(file))
    return gathered | stronger, given, keys


def _tables_in(tables: object) -> tuple[Mapping[str, object], ...]:
    return tuple(each for each in tables.values() if isinstance(each, Mapping)) if isinstance(tables, Mapping) else ()


def _endpoint_keys(tables: Iterable[Mapping[str, object]], env: Mapping[str, str]) -> EndpointKeys:
    """The keys that `tables` (of an endpoint each) name or hold, and those of all presets, whether set up or not."""
    variables = {preset.key_env.value for preset in PRESETS.values() if preset.key_env is not None}
    values = []
    for table in tables:
        match table.get("api_key_env"):
            case str(name):
                variables.add(name)
        match table.get("api_key"):
            case str(key):
                values.append(key)
    values += [env[name].strip() for name in sorted(variables) if name in env]
    return EndpointKeys(variables=frozenset(variables), values=tuple(filter(None, values)))


def _read_file(file: Path, *, named: bool) -> Mapping[str, object]:
    try:
        text = file.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if named:
            raise ConfigError(f"environment CROW_CONFIG: {file} does not exist; name a file, or unset it") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    import tomllib  # 2 ms at start that only those with a file pay

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values; a table that is itself a value (headers) stays whole."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in _KEYS and (value or key in _SECTIONS):
            yield from _flat(value, key + ".")
        else:
            yield key, value


def _refuse_unknown(values: Mapping[str, object], file: Path) -> None:
    for key, value in values.items():
        if key in _SECTIONS:
            raise ConfigError(f"{file}: {key} is {_shown_at(key, value)}; expected a table: [{key}]")
        if key not in _KEYS:
            import difflib  # for this sentence alone

            nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(_KEYS)}"
            raise ConfigError(f"{file}: there is no setting {key}; {hint}")


def _drop_what_belongs_elsewhere(in_file: dict[str, object], stronger: Mapping[str, SettingValue]) -> None:
    """What the file says of one endpoint or model must not be used with another: least of all the key."""
    for selector, names in (("model.base_url", ABOUT_THE_ENDPOINT), ("model.name", ABOUT_THE_MODEL)):
        if selector in in_file and selector in stronger:
            chosen, written = str(stronger[selector].value), str(in_file[selector])
            if chosen.rstrip("/") != written.rstrip("/"):
                for name in names:
                    in_file.pop(f"model.{name}", None)


def _from_text(key: str, text: str) -> object:
    """Flags hold text; where no text is wanted (a number, a switch), it is read as JSON."""
    if key not in _KEYS or str in _leaf_types(_KEYS[key].annotation):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _leaf_types(annotation: object) -> tuple[object, ...]:
    """The types that a value may have: those within a union, those of a literal's values."""
    inside = getattr(annotation, "__args__", None)
    if inside is None:
        return (type(annotation),) if isinstance(annotation, str) else (annotation,)
    return tuple(leaf for part in inside for leaf in _leaf_types(part))


def _check(gathered: Mapping[str, SettingValue]) -> Settings:
    """Each table is checked by itself and only when something in it was given: what checks all takes 20 ms to make."""
    nested: dict[str, dict[str, object]] = {}
    for key, given in gathered.items():
        section, _, name = key.rpartition(".")
        nested.setdefault(section, {})[name] = given.value
    made: dict[str, Any] = {}
    wrong: list[tuple[int | str, ...]] = []
    for section, table in _SECTIONS.items():
        try:
            made[section] = table.model_validate(nested[section]) if section in nested else table.model_construct()
        except ValidationError as error:  # its own text shows values, secrets too
            wrong.extend((section, *detail["loc"]) for detail in error.errors())
    try:
        whole = Settings.model_validate(nested[""]) if "" in nested else Settings.model_construct(**made)
    except ValidationError as error:
        wrong.extend(detail["loc"] for detail in error.errors())
    if not wrong:
        return whole.model_copy(update=made)
    servers = dict.fromkeys(fault_at(location) for location in wrong if location[0] == _SERVERS)
    if servers and isinstance(gathered[_SERVERS].value, Mapping):
        raise ConfigError("\n".join(f"{gathered[_SERVERS].origin}: {fault}" for fault in servers))
    raise ConfigError(
        "\n".join(
            f"{gathered[key].origin}: {key} is {_shown_at(key, gathered[key].value)}; "
            f"expected {_expectation(_KEYS[key])}"
            for key in dict.fromkeys(_key_at(location) for location in wrong)
        )
    )


def _read_prompt(given: SettingValue | None, directory: Path) -> str:
    if given is None:
        return ""
    key = "compaction.prompt_file"
    try:
        text = (directory / Path(str(given.value)).expanduser()).read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        value, expected = _shown_at(key, given.value), _expectation(_KEYS[key])
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{given.origin}: {key} is {value} ({reason}); expected {expected}") from None
    if not text.strip():
        raise ConfigError(f"{given.origin}: {key} is {_shown_at(key, given.value)}, which is empty; expected some text")
    return text


def _key_at(location: tuple[int | str, ...]) -> str:
    first = str(location[0])
    return first if first in _KEYS else f"{first}.{location[1]}"


def _shown_at(key: str, value: object) -> str:
    return shown(key.rpartition(".")[2], value)


def _expectation(setting: FieldInfo) -> str:
    return next(item.words for item in all_metadata(setting) if isinstance(item, Expected))


_SERVERS = "mcp_servers"
_SECTIONS: Mapping[str, type[Section]] = {
    name: setting.annotation
    for name, setting in Settings.model_fields.items()
    if isinstance(setting.annotation, type) and issubclass(setting.annotation, Section)
}
_KEYS: Mapping[str, FieldInfo] = {
    **{name: setting for name, setting in Settings.model_fields.items() if name not in _SECTIONS},
    **{
        f"{section}.{name}": setting
        for section, table in _SECTIONS.items()
        for name, setting in table.model_fields.items()
    },
}


# FROM settings.paths: Where crow keeps what.
#
# Strategy: everything below CROW_HOME if that is set, else the platform's own directories, else (no HOME, no entry in
# the user database) a private directory below the temporary one. Makes no directory but that last one, and reads
# none.


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Absolute paths, of which none need exist. `trace`: where to record the connection; None for nowhere."""

    config_file: Path
    data_dir: Path
    database: Path
    log_file: Path
    trace: Path | None = None


def find_paths(env: Mapping[str, str]) -> Paths:
    """The paths for this user; CROW_CONFIG names another configuration file. Relative ones start at the cwd."""
    if env.get("CROW_HOME"):
        config_dir = data_dir = log_dir = _absolute(env["CROW_HOME"])
    else:
        from platformdirs import PlatformDirs  # CROW_HOME saves its import

        dirs = PlatformDirs("crow", appauthor=False)
        config_dir, data_dir, log_dir = dirs.user_config_path, dirs.user_data_path, dirs.user_log_path
        if env.get("HOME") == "" or not all(path.is_absolute() for path in (config_dir, data_dir, log_dir)):
            config_dir = data_dir = log_dir = _homeless_dir()
    return Paths(
        config_file=_absolute(env["CROW_CONFIG"]) if env.get("CROW_CONFIG") else config_dir / "config.toml",
        data_dir=data_dir,
        database=data_dir / "crow.db",
        log_file=log_dir / "crow.log",
        trace=_absolute(env["CROW_TRACE"]) if env.get("CROW_TRACE") else None,
    )


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _homeless_dir() -> Path:
    """A directory of this user alone: the same for every process where that can be had, else a new one."""
    import tempfile  # needed by hardly anybody

    if hasattr(os, "getuid"):
        own = Path(tempfile.gettempdir()) / f"crow-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if own.is_dir() and not own.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return own
    # Somebody else may have made a directory of that name, to read along or to set an endpoint.
    return Path(tempfile.mkdtemp(prefix="crow-"))

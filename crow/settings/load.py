"""Reads the settings from flags, environment, the user's file and the defaults.

Files in a workspace are never read. Building the validator for all settings takes 20 ms. To start faster, this module
validates each table separately, and skips tables that set no value.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from platformdirs import PlatformDirs
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from crow.domain.errors import ConfigError
from crow.domain.secret_values import holds_secret, secrets_in
from crow.domain.text import describe
from crow.settings.credentials import CREDENTIAL_HOST, CredentialSettings
from crow.settings.database_urls import database_passwords
from crow.settings.endpoints import PRESETS, dotted_key, fallback_of, fallback_problem, names_offered
from crow.settings.servers import VARIABLE
from crow.settings.types import Section
from crow.settings.values import (
    DatabaseSettings,
    HookSettings,
    McpServerSettings,
    NamedModel,
    ProviderSettings,
    Settings,
    expectation,
)

_FROM_ENVIRONMENT = {
    "model.name": "CROW_MODEL",
    "model.base_url": "OPENAI_BASE_URL",
    "sandbox.enabled": "CROW_SANDBOX",
    "database.url": "CROW_DATABASE_URL",
    "log.level": "CROW_LOG",
}
"""Maps dotted keys to the environment variables that set them."""
_FLAGS = {
    "model.name": "--model",
    "model.base_url": "--base-url",
    "permissions.mode": "--mode",
    "log.level": "--log-level",
}
"""Maps dotted keys to the flags that set them, for messages."""
_SECTIONS: Mapping[str, type[Section]] = {
    name: setting.annotation
    for name, setting in Settings.model_fields.items()
    if isinstance(setting.annotation, type) and issubclass(setting.annotation, Section)
}
"""Maps the names of the tables `[NAME]` to their types."""
_NAMED: Mapping[str, type[Section]] = {
    "providers": ProviderSettings,
    "models": NamedModel,
    "mcp_servers": McpServerSettings,
    "credentials": CredentialSettings,
}
"""Maps the first part of tables `[PART.NAME]`, whose NAME the user chooses, to their types."""
_NEEDED: Mapping[type[Section], str] = {
    McpServerSettings: 'a table with either "command" or "url"',
    HookSettings: 'a table with "event" and "command"',
    CredentialSettings: 'a table with one of "from_git = true", "token_env" and "token_command"',
}
"""The end of the error message for a table whose values are valid one by one, but not together."""
_ENDPOINT_OPTIONS = ("api_key", "api_key_env", "headers")
"""The keys of `[model]` that belong to its `base_url`."""
_MODEL_OPTIONS = tuple(NamedModel.model_fields.keys() - {"name", "provider"})
"""The keys of `[model]` that belong to its `name`."""
_SECRET_HEADER = re.compile(r"(?i)authori[sz]ation|auth$|cookie|credential|key|passw|secret|token")
_ANY_NAME = re.compile("")
_SECRET_VARIABLE = re.compile(r"(?i)(credentials?|key|passphrase|password|passwd|secret|token)$")
_SCHEME = re.compile(r"[A-Za-z0-9-]+\s+(\S+)")
_SHORTEST_SECRET = 8
_COLLECTOR_HEADERS = re.compile("OTEL_EXPORTER_OTLP_(?:[A-Z]+_)?HEADERS")
_SECRET_KEYS = frozenset(
    {"api_key", "args", "command", "direct_url", "env", "extra_body", "headers", "oauth_client_secret", "url"}
)
"""The keys whose values may hold a secret, so error messages hide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Absolute paths, which need not exist."""

    config_file: Path
    data_dir: Path
    database: Path
    log_file: Path
    cache_dir: Path
    trace: Path | None = None
    """Crow records the connection in this file. If None, crow does not record it."""

    @property
    def programs(self) -> Path:
        """The file that lists the directories from which crow takes no programs. See
        :class:`crow.programs.Programs`."""
        return self.data_dir / "untrusted-programs"

    @property
    def links(self) -> Path:
        """The directory with the pages that `crow serve` shows. See :class:`crow.export.links.PageLinks`."""
        return self.data_dir / "links"

    @property
    def layers(self) -> Path:
        """The directory for layers, to which commands write. It also has the old versions of files that were replaced
        when the changes in a layer were kept. See :mod:`crow.tools.layers`."""
        return self.data_dir / "layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndpointKeys:
    """The secrets in the settings and in the environment, for masking."""

    variables: frozenset[str] = frozenset()
    """The names of the environment variables that hold endpoint keys."""
    values: tuple[str, ...] = field(default=(), repr=False)
    """The endpoint keys, including unused ones, and the tokens in headers."""
    others: tuple[str, ...] = field(default=(), repr=False)
    """The tokens of MCP servers and of credentials for hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The settings, and the source of each."""

    settings: Settings
    sources: Mapping[str, str]
    """Maps each dotted key to `flag --model`, `environment CROW_MODEL`, the name of the user's file, or `default`."""
    paths: Paths
    summary_prompt: str = ""
    """The text of `compaction.prompt_file`, or empty."""
    problem: ConfigError | None = None
    """Set if a setting cannot be used. All settings except those of the database then have their defaults. An editor
    can still open sessions, but every prompt fails with the message of this error."""
    keys: _EndpointKeys = _EndpointKeys()
    stamp: _FileStamp = None
    """Identifies the state of the user's file when it was read."""

    @property
    def is_stale(self) -> bool:
        """Whether the user's file has changed since it was read."""
        return _stamp(self.paths.config_file) != self.stamp

    def advice_on_models(self) -> str:
        """Advice for a user who has not set a model."""
        return (
            "Crow has no model to ask. Run `crow login`, or set OPENAI_API_KEY and CROW_MODEL (and OPENAI_BASE_URL for "
            f"an endpoint other than OpenAI's), or fill in [model] in {self.paths.config_file}. "
            'CROW_MODEL="offline" selects the built-in model, which needs no key.'
        )

    def values(self) -> dict[str, object]:
        """Return the value of each key in `sources`. Values that may be secret are `SecretStr`."""
        settings = self.settings
        servers = {name: server.masked() for name, server in settings.mcp_servers.items()}
        found: dict[str, object] = {
            "models": settings.models,
            "providers": {},
            "mcp_servers": servers,
            "credentials": {},
        }
        found["hooks"] = tuple(hook.masked() for hook in settings.hooks)
        found["checks"] = settings.checks
        for section in _SECTIONS:
            found |= {f"{section}.{key}": value for key, value in getattr(settings, section)}
        found |= {f"database.{key}": value for key, value in settings.database.shown().items()}
        named = (("providers", settings.providers), ("models", settings.models), ("credentials", settings.credentials))
        for kind, tables in named:
            for name, table in tables.items() if isinstance(tables, Mapping) else ():
                found |= {f"{dotted_key(kind, name)}.{key}": getattr(table, key) for key in table.model_fields_set}
        if command := settings.share.command:
            found["share.command"] = (command[0], *map(SecretStr, command[1:]))
        for key, value in found.items():
            if isinstance(value, Mapping) and key.endswith((".headers", ".extra_body")):
                found[key] = _masked(value, _ANY_NAME if key.endswith(".headers") else _SECRET_VARIABLE)
        return {key: found[key] for key in self.sources}


_FileStamp: TypeAlias = tuple[int, int, int] | None
"""Inode, size and modification time (ns) of a file, or None if there is no file."""


def load_settings(flags: Mapping[str, str], env: Mapping[str, str]) -> Loaded:
    """Read the settings. `flags` maps dotted keys (`model.name`) to strings. An empty string means that the flag is not
    set.

    This function does not raise an error for mistakes in the settings. `Loaded.problem` contains the error.
    """
    paths = find_paths(env)
    stamp = _stamp(paths.config_file)  # taken before reading, so that a change during the reading is noticed later
    tree: Mapping[str, object] = {}
    try:
        tree = _read_file(paths.config_file, is_required=bool(env.get("CROW_CONFIG")))
        reader = _SettingsReader(tree, paths.config_file, flags, env)
        prompt = reader.read_summary_prompt()
        paths = _with_database(paths, reader.settings.store.path)
        loaded = Loaded(settings=reader.settings, sources=reader.sources(), paths=paths, summary_prompt=prompt)
    except ConfigError as problem:
        defaults = dict.fromkeys(setting_keys(), "default")
        settings = Settings().model_copy(update={"database": _configured_database(tree, env)})
        paths = _with_database(paths, _inner(tree, "store").get("path"))
        loaded = Loaded(settings=settings, sources=defaults, paths=paths, problem=problem)
    return replace(loaded, keys=_endpoint_keys(tree, env), stamp=stamp)


def _with_database(paths: Paths, path: object) -> Paths:
    """Return the paths with the database at `path`, the unchecked value of `store.path`. If it is not set or not a
    string, return the paths unchanged."""
    if not isinstance(path, str) or not path:
        return paths
    return replace(paths, database=_absolute(str(paths.config_file.parent / os.path.expanduser(path))))


def _configured_database(tree: Mapping[str, object], env: Mapping[str, str]) -> DatabaseSettings:
    """Return the database settings without checking any values.

    If a setting is not valid, crow uses the defaults, but never the default database: the user would not find their
    sessions there.
    """
    given = {**_inner(tree, "database")}
    if url := env.get(_FROM_ENVIRONMENT["database.url"], "").strip():
        given["url"] = url
    urls = {key: SecretStr(str(given[key])) if given.get(key) else None for key in DatabaseSettings.model_fields}
    return DatabaseSettings.model_construct(None, **urls)


def find_paths(env: Mapping[str, str]) -> Paths:
    """Return the user's paths. If CROW_HOME is set, they are in that directory. Otherwise, they are in the platform's
    usual directories, or in a private temporary directory if the usual directories cannot be used.

    CROW_CONFIG names another configuration file. Relative paths are resolved against the current directory.
    """
    if env.get("CROW_HOME"):
        config_dir = data_dir = log_dir = _absolute(env["CROW_HOME"])
        cache_dir = config_dir / "cache"
    else:
        dirs = PlatformDirs("crow", appauthor=False)
        config_dir, data_dir, log_dir = dirs.user_config_path, dirs.user_data_path, dirs.user_log_path
        cache_dir = dirs.user_cache_path
        if env.get("HOME") == "" or not all(path.is_absolute() for path in (config_dir, data_dir, log_dir)):
            config_dir = data_dir = log_dir = _temporary_home()
            cache_dir = config_dir / "cache"
    return Paths(
        config_file=_absolute(env["CROW_CONFIG"]) if env.get("CROW_CONFIG") else config_dir / "config.toml",
        data_dir=data_dir,
        database=data_dir / "crow.db",
        log_file=log_dir / "crow.log",
        cache_dir=cache_dir,
        trace=_absolute(env["CROW_TRACE"]) if env.get("CROW_TRACE") else None,
    )


def setting_keys() -> tuple[str, ...]:
    """Return the dotted keys of all settings, except those in named tables."""
    return tuple(_fields())


class _Given(NamedTuple):
    """The value of a setting."""

    value: object
    source: str
    """See `Loaded.sources`."""


class _SettingsReader:
    """Merges and validates the values from all sources.

    :raises ConfigError: some values cannot be used. The message lists every mistake.
    """

    def __init__(
        self, tree: Mapping[str, object], file: Path, flags: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        self._file = file
        self._problems: list[str] = []
        """The messages about all mistakes so far."""
        self._tables: dict[tuple[str, ...], dict[str, _Given]] = {(section,): {} for section in _SECTIONS}
        """Maps the path of each table, such as `("model",)` or `("providers", "work")`, to the values in this table."""
        self._model_list = _Given((), "default")
        """The value of `models` if it is a list. Tables `[models.NAME]` are in `_tables`."""
        self._hooks: list[tuple[str, dict[str, _Given]]] = []
        """For each table `[[hooks]]`, its name in error messages and its values."""
        self._checks = _Given({}, "default")
        for name, value in tree.items():
            self._add(name, value)
        own = self._tables["model",].get("name")
        self._file_model = str(own.value) if own is not None else ""
        """The name of the default model in the file, which a flag or variable may replace."""
        self._override(flags, env)
        self._add_keys(env)
        self.settings = self._validated()
        if self._problems:
            raise ConfigError("\n".join(self._problems))

    def sources(self) -> dict[str, str]:
        """Return the source of each key. A named table has one key for each value that it sets."""
        sources = dict.fromkeys(setting_keys(), "default") | {"models": self._model_list.source}
        if self._hooks:
            sources["hooks"] = self._file.name
        sources["checks"] = self._checks.source
        for path, table in self._tables.items():
            if path[0] == "mcp_servers":
                sources["mcp_servers"] = self._file.name
                continue
            if len(path) == 2:
                sources.pop(path[0], None)
            sources |= {f"{dotted_key(*path)}.{key}": given.source for key, given in table.items()}
        return sources

    def read_summary_prompt(self) -> str:
        """Return the text of `compaction.prompt_file`, or an empty string if it is not set."""
        path = self.settings.compaction.prompt_file
        if path is None:
            return ""
        try:
            text = (self._file.parent / Path(path).expanduser()).read_text("utf-8")
            reason = "" if text.strip() else "it is empty"
        except (OSError, ValueError, RuntimeError) as error:
            text, reason = "", getattr(error, "strerror", None) or str(error)
        if reason:
            given = self._tables["compaction",]["prompt_file"]
            expected = f"({reason}); expected {expectation(_fields()['compaction.prompt_file'])}"
            raise ConfigError(f"{self._origin(given)}: compaction.prompt_file is {_show_value('', path)} {expected}")
        return text

    def _add(self, name: str, value: object) -> None:
        if name in _SECTIONS:
            self._add_table((name,), value)
        elif name == "models" and isinstance(value, list):
            self._model_list = _Given(tuple(value), self._file.name)
        elif name == "hooks" and isinstance(value, list) and all(isinstance(table, Mapping) for table in value):
            for number, table in enumerate(value, 1):
                given = {key: _Given(inner, self._file.name) for key, inner in table.items()}
                self._hooks.append((f"hooks[{number}]", given))
        elif name == "checks":
            self._checks = _Given(value, self._file.name)
        elif name == "hooks":
            self._refuse(name, _Given(value, self._file.name), Settings.model_fields[name])
        elif name in _NAMED and isinstance(value, Mapping):
            for key, table in value.items():
                self._add_table((name, key), table)
        elif name in _NAMED:
            self._refuse(name, _Given(value, self._file.name), Settings.model_fields[name])
        else:
            inner = value if isinstance(value, Mapping) and value else {"": None}
            for key in inner:
                self._refuse_unknown("", f"{name}.{key}".rstrip(".") or '""', setting_keys())

    def _add_table(self, path: tuple[str, ...], value: object) -> None:
        name = dotted_key(*path)
        if not isinstance(value, Mapping):
            shown = _show_value(path[-1], value)
            self._problems.append(f"{self._file}: {name} is {shown}; expected a table: [{name}]")
        elif path[0] == "mcp_servers" and not 1 <= len(path[1]) <= 64:
            self._problems.append(f"{self._file}: {name}: the name of a server must have 1 to 64 characters")
        elif path[0] == "credentials" and not CREDENTIAL_HOST.fullmatch(path[1]):
            expected = "expected a host name in lower case, such as git.example.com or git.example.com:8443"
            self._problems.append(f"{self._file}: {name} names no host; {expected}")
        else:
            self._tables[path] = {key: _Given(inner, self._file.name) for key, inner in value.items()}

    def _override(self, flags: Mapping[str, str], env: Mapping[str, str]) -> None:
        """Override values from the file with flags and environment variables.

        A flag or variable may select an endpoint other than the one in the file. In that case, the file's settings for
        its endpoint are dropped. If it selects another model, the file's settings for its model are dropped.
        """
        given = {
            key: _Given(env.get(name, "").strip(), f"environment {name}") for key, name in _FROM_ENVIRONMENT.items()
        }
        given |= {key: _Given(text, f"flag {_FLAGS.get(key, key)}") for key, text in flags.items() if text}
        model = self._tables["model",]
        for selector, keys in (("base_url", _ENDPOINT_OPTIONS), ("name", _MODEL_OPTIONS)):
            chosen = str(given.get(f"model.{selector}", _Given("", "")).value)
            if chosen and selector in model and chosen.rstrip("/") != str(model[selector].value).rstrip("/"):
                for key in keys:
                    model.pop(key, None)
        for dotted, value in given.items():
            if value.value:
                section, _, key = dotted.partition(".")
                self._tables[section,][key] = value

    def _add_keys(self, env: Mapping[str, str]) -> None:
        """Read keys from environment variables. They take precedence over keys in the file."""
        usual = {"model": "OPENAI_API_KEY"} | {f"providers.{name}": preset.key_env for name, preset in PRESETS.items()}
        for path, table in self._tables.items():
            if path[0] not in ("model", "providers"):
                continue
            variable = table["api_key_env"].value if "api_key_env" in table else usual.get(".".join(path))
            if isinstance(variable, str) and (key := env.get(variable, "").strip()):
                table["api_key"] = _Given(SecretStr(key), f"environment {variable}")

    def _validated(self) -> Settings:
        made: dict[str, Any] = {name: {} for name in _NAMED} | {"models": self._model_list.value}
        if not all(isinstance(name, str) for name in self._model_list.value):  # type: ignore[attr-defined]
            self._refuse("models", self._model_list, Settings.model_fields["models"])
        for path, table in self._tables.items():
            kind = {**_SECTIONS, **_NAMED}[path[0]]
            is_unset = not table and len(path) == 1
            section = kind.model_construct() if is_unset else self._validated_table(dotted_key(*path), table, kind)
            if len(path) == 1:
                made[path[0]] = section
            else:
                made[path[0]] = {**(made[path[0]] or {}), path[1]: section}
            match section:
                case ProviderSettings(base_url=None) if not (path[1] in PRESETS and PRESETS[path[1]].base_url):
                    self._problems.append(
                        f"{self._file}: {dotted_key(*path)} has no base_url; set one, or use the name of a preset: "
                        f"{', '.join(name for name, preset in PRESETS.items() if preset.base_url)}."
                    )
                case NamedModel(provider=str(provider)) if ("providers", provider) not in self._tables:
                    others = [name for kind, *rest in self._tables if kind == "providers" for name in rest]
                    hint = f"expected one of {', '.join(others)}" if others else f"add [providers.{provider}]"
                    shown = _show_value("provider", provider)
                    self._problems.append(f"{self._file}: {dotted_key(*path)}.provider is {shown}; {hint}")
        made["checks"] = self._checks.value
        if not _is_table_of_texts(self._checks.value):
            self._refuse("checks", self._checks, Settings.model_fields["checks"])
        made["hooks"] = tuple(self._validated_table(name, table, HookSettings) for name, table in self._hooks)
        settings = Settings.model_construct(**made)
        if not self._problems and any("fallback" in table for table in self._tables.values()):
            self._check_fallbacks(settings)
        return settings

    def _check_fallbacks(self, settings: Settings) -> None:
        for name in dict.fromkeys((*names_offered(settings), *settings.models)):
            if problem := fallback_problem(name, settings, [self._file_model] if self._file_model else []):
                table = dotted_key("models", name) if ("models", name) in self._tables else "model"
                shown = _show_value("fallback", fallback_of(name, settings))
                self._problems.append(f"{self._file}: {table}.fallback is {shown}; {problem}")

    def _validated_table(self, name: str, table: Mapping[str, _Given], kind: type[Section]) -> Section | None:
        try:
            return kind.model_validate({key: given.value for key, given in table.items()})
        except ValidationError as error:  # the error's own text shows values, including secrets
            keys = dict.fromkeys(str(detail["loc"][0]) if detail["loc"] else None for detail in error.errors())
        prefix = f"{name}."
        for key in keys:
            if key is None:  # each value is valid, but they do not fit together
                self._problems.append(f"{self._file}: {name} must be {_NEEDED[kind]}")
            elif key in kind.model_fields:
                self._refuse(prefix + key, table[key], kind.model_fields[key])
            else:
                self._refuse_unknown(prefix, key or '""', tuple(kind.model_fields))
        return None

    def _refuse(self, dotted: str, given: _Given, setting: FieldInfo) -> None:
        shown = _show_value(dotted.rpartition(".")[2], given.value)
        self._problems.append(f"{self._origin(given)}: {dotted} is {shown}; expected {expectation(setting)}")

    def _refuse_unknown(self, prefix: str, key: str, known: Sequence[str]) -> None:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"expected one of {', '.join(known)}"
        self._problems.append(f"{self._file}: there is no setting {prefix}{key}; {hint}")

    def _origin(self, given: _Given) -> str:
        return str(self._file) if given.source == self._file.name else given.source


def _is_table_of_texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(key and text and isinstance(text, str) for key, text in value.items())


def _fields() -> dict[str, FieldInfo]:
    sections = ((f"{name}.{key}", one) for name, table in _SECTIONS.items() for key, one in table.model_fields.items())
    return {name: one for name, one in Settings.model_fields.items() if name not in _SECTIONS} | dict(sections)


def _show_value(key: str, value: object) -> str:
    """Format a value for an error message. `key` is the last part of the setting's name. Values that may be secret are
    hidden."""
    is_url = key in {"base_url", "proxy"}
    if key in _SECRET_KEYS or (is_url and not (isinstance(value, str) and {"@", "?"}.isdisjoint(value))):
        return "<hidden: it may be a secret>"
    return describe(value, 120)


def _read_file(file: Path, *, is_required: bool) -> Mapping[str, object]:
    try:
        text = file.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if is_required:
            raise ConfigError(
                f"environment CROW_CONFIG: {file} does not exist; name an existing file, or unset CROW_CONFIG"
            ) from None
        return {}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _endpoint_keys(tree: Mapping[str, object], env: Mapping[str, str]) -> _EndpointKeys:
    """Collect the keys and tokens in the file, and the keys in environment variables that the file or a preset names.
    The result includes keys that crow does not use."""
    tables = [*_tables([tree.get("model")]), *_tables(_inner(tree, "providers").values())]
    variables = {preset.key_env for preset in PRESETS.values() if preset.key_env is not None}
    variables |= {name for table in tables if isinstance(name := table.get("api_key_env"), str)}
    values = [key for table in tables if isinstance(key := table.get("api_key"), str)]
    values += [env[name].strip() for name in sorted(variables) if name in env]
    values += [secret for table in tables for secret in _secrets_in(table, "headers", _SECRET_HEADER, {})]
    servers = _tables(_inner(tree, "mcp_servers").values())
    others = [secret for table in servers for secret in _secrets_in(table, "headers", _SECRET_HEADER, env)]
    others += [secret for table in servers for secret in _secrets_in(table, "env", _SECRET_VARIABLE, env)]
    tokens = [str(table.get("token_env")) for table in _tables(_inner(tree, "credentials").values())]
    others += [env[name].strip() for name in tokens if name in env]
    clients = [{"secret": {"secret": table.get("oauth_client_secret")}} for table in servers]
    others += [secret for table in clients for secret in _secrets_in(table, "secret", _SECRET_VARIABLE, env)]
    others += [
        secret
        for name, value in env.items()
        if name not in variables and holds_secret(name, value, os.path.lexists)
        for secret in secrets_in(value)
    ]
    collector = {name for name in env if _COLLECTOR_HEADERS.fullmatch(name)}
    variables |= collector
    headers = [unquote(pair.partition("=")[2].strip()) for name in collector for pair in env[name].split(",")]
    values += [_without_scheme(value) for value in headers if len(value) >= _SHORTEST_SECRET]
    database = _configured_database(tree, env)
    variables.add(_FROM_ENVIRONMENT["database.url"])
    if database.url is not None and not database_passwords(database.url.get_secret_value()):
        variables.add("PGPASSWORD")  # the driver reads it
        values.append(env.get("PGPASSWORD", ""))
    values += database.secrets()
    return _EndpointKeys(
        variables=frozenset(variables), values=tuple(filter(None, values)), others=tuple(filter(None, others))
    )


def tokens_in_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys and tokens in HTTP headers."""
    return tuple(filter(None, _secrets_in({"headers": headers}, "headers", _SECRET_HEADER, {})))


def _inner(table: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = table.get(key)
    return value if isinstance(value, Mapping) else {}


def _tables(values: Iterable[object]) -> list[Mapping[str, object]]:
    return [value for value in values if isinstance(value, Mapping)]


def _secrets_in(table: Mapping[str, object], key: str, names: re.Pattern[str], env: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of the table `key` whose names match `names` and so suggest a secret, with variables replaced.
    For a header such as `Bearer TOKEN`, yield only the token."""
    for name, value in _inner(table, key).items():
        if isinstance(value, str) and names.search(name):
            text = VARIABLE.sub(lambda match: env.get(match[1], match[0]), value).strip()
            yield _without_scheme(text) if key == "headers" else text


def _without_scheme(header: str) -> str:
    """Return only the token of a header's value such as `Bearer TOKEN`, and any other value unchanged."""
    found = _SCHEME.fullmatch(header)
    return found[1] if found else header


def _masked(table: Mapping[str, object], names: re.Pattern[str]) -> dict[str, object]:
    """Return the table with `SecretStr` in place of each string whose name, at any depth, matches `names`."""
    found: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found[name] = _masked(value, names)
        else:
            found[name] = SecretStr(value) if isinstance(value, str) and names.search(name) else value
    return found


def _stamp(file: Path) -> _FileStamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _temporary_home() -> Path:
    """Return a directory that only this user can access. All processes get the same directory, unless its name is taken
    by a file, or by a directory that another user owns or can access. In that case, each process gets a new
    directory."""
    if hasattr(os, "getuid"):
        own = Path(tempfile.gettempdir()) / f"crow-{os.getuid()}"
        with suppress(FileExistsError):
            own.mkdir(mode=0o700)
        found = own.lstat()
        if own.is_dir() and not own.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return own
    return Path(tempfile.mkdtemp(prefix="crow-"))

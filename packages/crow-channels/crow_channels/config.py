"""Reads the configuration file. See README.md for its tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from crow_channels.chat import Settings
from crow_channels.errors import ConfigError

COMMANDS = ("new", "clear", "history", "cancel", "mode", "compact", "undo", "redo", "usage", "context", "diff", "title")
"""The slash commands that people may use if `commands` is not set."""

MODES = ("plan", "ask", "accept-edits")
"""The modes that people may choose if `modes` is not set. `auto` is not among them."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ALIAS_CHARS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A user of the server."""

    name: str
    """The name in this configuration."""
    cwd: str
    """The workspace of the principal's sessions, on the server's machine."""
    token: str = ""
    """The token. Empty if the server wants none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What holds in a channel."""

    cwd: str = ""
    """The workspace. Empty: that of the principal."""
    principal: str = ""
    """The principal to whom the session belongs. Empty: that of the listed person who writes there first."""
    users: frozenset[str] | None = None
    """The only people who may write here. None: all users of the chat."""
    answers: Literal["asker", "anyone"] = "asker"
    """Who may answer a question: the person whose prompt runs, or everybody who may write here."""
    trigger: Literal["all", "mention"] = "all"
    """Which messages are prompts: all, or those that mention the bot."""
    commands: tuple[str, ...] = COMMANDS
    """The slash commands that people may use here."""
    modes: tuple[str, ...] = MODES
    """The modes that people may choose here."""
    shows_calls: bool = True
    """Whether an answer names the tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """A chat."""

    name: str
    """Its name in this configuration, which is part of the aliases of its sessions."""
    type: str
    """`discord`, `webhook`, or `module:Class` for an adapter of your own."""
    users: Mapping[str, str]
    """The name of the principal of each listed user. Nobody else gets in."""
    channels: Mapping[str, Rule]
    """The listed channels. The key `*` stands for all."""
    direct: Rule | None
    """What holds in direct messages. None: they are ignored."""
    settings: Settings
    """The adapter's own settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    state: Path
    """The file that remembers what was received and delivered."""
    url: str
    """The server's address. Empty if `command` starts crow."""
    command: tuple[str, ...]
    """The command that starts a crow of its own for each principal. Empty if `url` is set."""
    principals: Mapping[str, Principal]
    """The principals by name."""
    chats: tuple[ChatConfig, ...]
    """The chats."""
    secret_variables: frozenset[str]
    """The environment variables that hold secrets. A crow that is started does not get them."""


class _Table:
    """A table of the file. Each method takes a key out of it; `finish` complains about those that are left."""

    def __init__(self, where: str, values: object) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is {values!r}; expected a table.")
        self.where, self._values = where, dict(values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = "") -> str:
        value = self._values.pop(key, default)
        if value is None:
            raise ConfigError(f"{self._at(key)} is missing; expected a string.")
        if not isinstance(value, str) or (default is None and not value):
            raise ConfigError(f"{self._at(key)} is {value!r}; expected a string.")
        return value

    def one_of(self, key: str, *values: str) -> Any:
        value = self.text(key, values[0])
        if value not in values:
            raise ConfigError(f"{self._at(key)} is {value!r}; expected one of {', '.join(values)}.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.pop(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._at(key)} is {value!r}; expected true or false.")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self._values.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise ConfigError(f"{self._at(key)} is {value!r}; expected a list of strings.")
        return tuple(value)

    def table(self, key: str) -> _Table:
        return _Table(self._at(key), self._values.pop(key, {}))

    def tables(self) -> dict[str, _Table]:
        found = {key: _Table(self._at(key), value) for key, value in self._values.items()}
        self._values.clear()
        return found

    def rest(self) -> dict[str, Any]:
        rest, self._values = self._values, {}
        return rest

    def finish(self) -> None:
        if self._values:
            raise ConfigError(f"{self._at(next(iter(self._values)))} is not a setting. Its name may be misspelt.")

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def read_config(path: Path, environment: Mapping[str, str]) -> Config:
    """Read and check the file. :raises ConfigError: it cannot be used. The message begins with the file's name."""
    try:
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be read: {error}") from error
        return _config(_Table("", values), path, environment)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def _config(root: _Table, path: Path, environment: Mapping[str, str]) -> Config:
    server = root.table("server")
    url, command = server.text("url"), server.texts("command") or ()
    server.finish()
    if bool(url) == bool(command):
        raise ConfigError('server needs either url, such as "ws://127.0.0.1:7431/acp", or command = ["crow", "acp"].')
    variables = set[str]()
    principals = {name: _principal(name, table, environment, variables) for name, table in _named(root, "principals")}
    if url:
        _check_url(url, has_token=any(each.token for each in principals.values()))
    chats = tuple(_chat(name, table, principals, environment, variables) for name, table in _named(root, "chats"))
    state = Path(path.parent, root.text("state", "crow-channels.db")).expanduser()
    root.finish()
    return Config(
        state=state,
        url=url,
        command=command,
        principals=principals,
        chats=chats,
        secret_variables=frozenset(variables),
    )


def _named(root: _Table, key: str) -> list[tuple[str, _Table]]:
    found = list(root.table(key).tables().items())
    if not found:
        raise ConfigError(f"{key} is empty; expected at least one table such as [{key}.NAME].")
    return found


def _principal(name: str, table: _Table, environment: Mapping[str, str], variables: set[str]) -> Principal:
    cwd, variable = table.text("cwd", None), table.text("token_env")
    if not cwd.startswith("/"):
        raise ConfigError(f"{table.where}.cwd is {cwd!r}; expected an absolute path on the machine of the server.")
    table.finish()
    token = environment.get(variable, "").strip() if variable else ""
    if variable and not token:
        raise ConfigError(f"{table.where}.token_env names the environment variable {variable}, which is not set.")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{variable} does not hold a token: a token is one word in plain ASCII.")
    variables |= {variable} - {""}
    return Principal(name=name, cwd=cwd, token=token)


def _check_url(url: str, *, has_token: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ConfigError(f'server.url is {url!r}; expected an address such as "ws://127.0.0.1:7431/acp".')
    if has_token and parts.scheme == "ws" and parts.hostname not in _LOOPBACK:
        raise ConfigError(f"server.url is {url!r}; the tokens would travel unencrypted. Use wss://, or a tunnel.")


def _chat(
    name: str,
    table: _Table,
    principals: Mapping[str, Principal],
    environment: Mapping[str, str],
    variables: set[str],
) -> ChatConfig:
    if len(name) > _ALIAS_CHARS or not name.isprintable():
        raise ConfigError(f"chats.{name!r}: expected a short name of printable characters.")
    kind, users = table.text("type", None), table.table("users").rest()
    for user, principal in users.items():
        if principal not in principals:
            known = ", ".join(principals)
            raise ConfigError(f"{table.where}.users.{user} is {principal!r}; expected one of the principals: {known}.")
    channels = {key: _rule(each, users, principals) for key, each in table.table("channels").tables().items()}
    direct = _rule(table.table("direct"), users, principals) if "direct" in table else None
    if not channels and direct is None:
        raise ConfigError(f"{table.where} has neither channels nor direct, so nobody could write.")
    rest = table.rest()
    variables |= {value for key, value in rest.items() if key.endswith("_env") and isinstance(value, str)}
    settings = Settings(table.where, rest, environment)
    return ChatConfig(name=name, type=kind, users=users, channels=channels, direct=direct, settings=settings)


def _rule(table: _Table, known: Mapping[str, str], principals: Mapping[str, Principal]) -> Rule:
    users, principal, cwd = table.texts("users"), table.text("principal"), table.text("cwd")
    for user in users or ():
        if user not in known:
            raise ConfigError(f"{table.where}.users names {user!r}, who is not among the users of the chat.")
    if principal and principal not in principals:
        raise ConfigError(f"{table.where}.principal is {principal!r}; expected one of: {', '.join(principals)}.")
    if cwd and not cwd.startswith("/"):
        raise ConfigError(f"{table.where}.cwd is {cwd!r}; expected an absolute path on the machine of the server.")
    commands, modes = table.texts("commands"), table.texts("modes")
    rule = Rule(
        cwd=cwd,
        principal=principal,
        users=None if users is None else frozenset(users),
        answers=table.one_of("answers", "asker", "anyone"),
        trigger=table.one_of("trigger", "all", "mention"),
        commands=COMMANDS if commands is None else commands,
        modes=MODES if modes is None else modes,
        shows_calls=table.flag("shows_calls", True),
    )
    table.finish()
    return rule

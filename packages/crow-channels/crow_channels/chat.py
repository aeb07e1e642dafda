"""What an adapter of a chat implements, and the values that it exchanges with the rest.

An adapter is a class with the methods of `Chat`. Its constructor gets the adapter's own settings as a `Settings`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from crow_channels.errors import ConfigError

Verdict = Literal["accepted", "duplicate", "denied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a chat can show."""

    chars: int
    """The longest text of a message, in UTF-16 code units."""
    can_edit: bool = False
    """Whether a message can be changed after it was sent. Only then an answer grows while it is written."""
    has_buttons: bool = False
    """Whether a message can have buttons. Without them, people answer questions with a number."""
    edit_interval_s: float = 1.5
    """The shortest time between two changes of an answer, in seconds."""
    messages: int = 8
    """An answer that needs more messages is sent as a file."""
    file_bytes: int = 8_000_000
    """The largest file. 0 if the chat takes no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that came with a message, or goes with one."""

    name: str
    """Its name, without a directory."""
    mime: str
    """Its media type, such as `image/png`."""
    data: bytes | None
    """Its content. None if it was too large, or could not be fetched."""
    problem: str = ""
    """Why there is no content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A message that somebody wrote."""

    id: str
    """The chat's id of the message. No two messages of a place have the same."""
    place: str
    """The channel, thread or conversation."""
    user: str
    """The chat's id of the author. Never a name, because people choose their names."""
    text: str
    """What the author wrote."""
    parent: str | None = None
    """The channel to which a thread belongs."""
    is_direct: bool = False
    """Whether only the author and the bot can read the place."""
    is_addressed: bool = True
    """Whether the message mentions the bot, or can only be meant for it."""
    files: tuple[File, ...] = ()
    """What is attached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """A possible answer to a question."""

    id: str
    """What the chat sends back if somebody presses it. At most 100 characters."""
    label: str
    """What is on it."""
    is_refusal: bool = False
    """Whether it declines what was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message to send, or the new content of one."""

    key: str
    """Names the message. A second try has the same key, so that the chat or the adapter can recognise it."""
    text: str
    """The text, which keeps to `Limits.chars`."""
    after: str
    """The message to which it belongs. It was sent after that one."""
    is_reply: bool = False
    """Whether it is the first message of an answer."""
    buttons: tuple[Button, ...] = ()
    """Its buttons. None of them are left after a change without buttons."""
    files: tuple[File, ...] = ()
    """Its files."""


class Inbox(Protocol):
    """Where an adapter delivers what happens in the chat. Both methods have stored it when they return."""

    def is_listed(self, message: Incoming) -> bool:
        """Whether the author may write there. An adapter need not fetch the files of others."""
        ...

    async def message(self, message: Incoming) -> Verdict:
        """Take a message. `denied` means that the author or the place is not listed, and that nothing was kept."""
        ...

    async def press(self, button_id: str, *, place: str, user: str) -> str:
        """Take an answer to a question. Return a sentence for the one who pressed the button."""
        ...

    def places(self) -> Mapping[str, str]:
        """Return the newest message of each known place, to fetch what came while nobody listened. It is empty for a
        listed channel in which nobody has written yet."""
        ...

    def begin(self, place: str, message_id: str) -> None:
        """Take this as the newest message of a listed channel in which nobody has written yet."""
        ...


class Chat(Protocol):
    """An adapter. All methods raise `ChatUnavailable` to be called again, and `ChatRefused` not to be."""

    limits: Limits

    async def run(self, inbox: Inbox) -> None:
        """Receive messages until cancelled. The adapter connects again by itself."""
        ...

    async def send(self, place: str, message: Outgoing) -> str:
        """Send a message and return its id in the chat."""
        ...

    async def edit(self, place: str, message_id: str, message: Outgoing) -> None:
        """Change a message. Called only if `limits.can_edit`."""
        ...

    async def find(self, place: str, message: Outgoing, known: Collection[str]) -> str | None:
        """After a `send` with an unknown outcome: return the id of the message if it has arrived. `known` are other
        messages of the same answer. An adapter whose chat recognises repeated keys returns None."""
        ...


class Settings:
    """The adapter's own part of the configuration. Each method raises `ConfigError` with the key and the value."""

    def __init__(self, where: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._where, self._values, self._environment = where, dict(values), environment

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return str(self._value(key, str, "a string", default))

    def number(self, key: str, default: float) -> float:
        """Return a number that is at least 0."""
        value = self._value(key, (int, float), "a number", default)
        if not 0 <= value < float("inf"):
            raise self._error(key, value, "a number that is not negative")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return bool(self._value(key, bool, "true or false", default))

    def secret(self, key: str) -> str:
        """Return the value of the environment variable that the key names."""
        name = self.text(key)
        value = self._environment.get(name, "").strip()
        if not value:
            raise ConfigError(f"{self._where}.{key} names the environment variable {name}, which is not set.")
        return value

    def finish(self) -> None:
        """Check that every key was read. Call it last in the constructor."""
        if self._values:
            raise ConfigError(f"{self._where}.{next(iter(self._values))} is not a setting of this chat.")

    def _value(self, key: str, kinds: type | tuple[type, ...], expected: str, default: Any) -> Any:
        if key not in self._values:
            if default is None:
                raise ConfigError(f"{self._where}.{key} is missing; expected {expected}.")
            return default
        value = self._values.pop(key)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self._error(key, value, expected)
        return value

    def _error(self, key: str, value: object, expected: str) -> Exception:
        return ConfigError(f"{self._where}.{key} is {value!r}; expected {expected}.")

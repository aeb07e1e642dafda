"""The errors of this package."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration cannot be used. The message names the key, the value and what would work."""


class StateError(Exception):
    """The state file cannot be used."""


class ChatUnavailable(Exception):
    """The chat could not be reached, or asked to try again. Whether it carried out the request is unknown.

    `retry_after_s` is the pause that the chat asked for, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ChatRefused(Exception):
    """The chat refused a request, and would refuse it again."""


class LinkLost(Exception):
    """The connection to the server broke, or could not be made."""

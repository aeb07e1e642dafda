"""Masks secrets in the body of a response while it passes."""

from __future__ import annotations

from collections.abc import Sequence


class Masked:
    """Replaces each byte of a secret in a stream of bytes by an asterisk. It does no I/O.

    If a piece ends with what may be the beginning of a secret, `feed` holds these bytes back until the next call.
    """

    def __init__(self, secrets: Sequence[bytes] = ()) -> None:
        self._secrets = secrets
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the body, and return the bytes that may be passed on."""
        data = self.whole(self._held + data)
        held = max((_begun(data, secret) for secret in self._secrets), default=0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def end(self) -> bytes:
        """Return the bytes that are still held back, because no more will follow."""
        held, self._held = self._held, b""
        return held

    def whole(self, data: bytes) -> bytes:
        """Return a whole text with its secrets masked."""
        for secret in self._secrets:
            data = data.replace(secret, b"*" * len(secret))
        return data


def _begun(data: bytes, secret: bytes) -> int:
    """Return how many bytes at the end of the data are also the beginning of the secret, but not all of it."""
    most = min(len(secret) - 1, len(data))
    return next((size for size in range(most, 0, -1) if data.endswith(secret[:size])), 0)

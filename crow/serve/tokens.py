"""Makes and checks bearer tokens, and ends a connection when its token is revoked or expires.

A token consists of `crow_`, its id, a random secret and a check number. The store holds only the sha256 of the secret.
Passwords need a slower hash, because they can be guessed. The secret of a token needs no slower hash, because nobody
can guess 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

import anyio

from crow.domain.errors import ArgumentError, StoreError
from crow.domain.text import base32
from crow.store import AccessStore, Token
from crow.store.principals import check_principal

logger = logging.getLogger(__name__)

_PREFIX = "crow_"
_ID_CHARS = 10
_SECRET_BYTES = 32
_SECRET_CHARS = 52
_CHECK_CHARS = 7
_SHAPE = re.compile(rf"{_PREFIX}([a-z2-7]{{{_ID_CHARS}}})([a-z2-7]{{{_SECRET_CHARS}}})([a-z2-7]{{{_CHECK_CHARS}}})")
_PAIRING = "pair"
"""The ids of pairing tokens begin with this, and no other ids do."""

_NO_HASH = hashlib.sha256(b"").hexdigest()

_MAX_LABEL_CHARS = 100

FAILURES = 10
"""An address may send this many wrong tokens in a row before crow limits the address."""

FAILURES_PER_S = 0.1
"""An address that crow limits may send this many wrong tokens per second."""

MAX_ADDRESSES = 4096
"""Wrong tokens are counted for at most this many addresses. If there are more, crow forgets the address whose last
wrong token is the oldest."""

_WATCH_S = 1.0
"""The number of seconds between two checks of the tokens of all open connections."""

USED_MS = 60_000
"""The time of a token's last use is stored at most once in this many milliseconds."""


class BadToken(Exception):
    """The error for a token that is missing, unknown, revoked or expired. The message does not say which of these four
    applies."""

    def __init__(self) -> None:
        super().__init__("This server needs a valid token in the header: Authorization: Bearer crow_...")


class TooManyFailures(Exception):
    """The error for a wrong token from an address that has sent too many of them."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("This address has sent too many wrong tokens. Try again later.")
        self.retry_after_s = retry_after_s
        """The number of seconds until the address may send another wrong token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The permission that a valid token gives its client: to act as the token's principal."""

    principal: str
    """The user whom the token names."""
    token_id: str
    """The id of the token."""


def new_token(
    principal: str,
    *,
    label: str = "",
    expires_ms: int | None = None,
    now_ms: int | None = None,
    is_pairing: bool = False,
) -> tuple[str, Token]:
    """Make a token. Return the token's text, which is stored nowhere, and the record to store in its place.

    `expires_ms` and `now_ms` are Unix times in milliseconds. If `is_pairing` is true, the only use of the token is that
    a browser can exchange it, once, for another token.

    :raises ArgumentError: the principal's name or the label is not valid, or `expires_ms` is in the past.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if len(label) > _MAX_LABEL_CHARS or not label.isprintable():
        raise ArgumentError(f"--label: expected at most {_MAX_LABEL_CHARS} printable characters.")
    if expires_ms is not None and expires_ms <= now_ms:
        raise ArgumentError("--expires: expected a time in the future, but this time is in the past.")
    token_id = base32(secrets.token_bytes(7))[:_ID_CHARS]
    if is_pairing or token_id.startswith(_PAIRING):
        token_id = (_PAIRING if is_pairing else "a") + token_id[len(_PAIRING if is_pairing else "a") :]
    secret = base32(secrets.token_bytes(_SECRET_BYTES))
    token = Token(
        id=token_id,
        principal=check_principal(principal),
        hash=_hash(secret),
        label=label,
        created_ms=now_ms,
        expires_ms=expires_ms,
    )
    body = f"{_PREFIX}{token_id}{secret}"
    return body + _check(body), token


def is_valid(token: Token, now_ms: int) -> bool:
    """Return whether a token is neither revoked nor expired at `now_ms`, a Unix time in milliseconds."""
    return token.revoked_ms is None and (token.expires_ms is None or now_ms < token.expires_ms)


class Authenticator:
    """Checks the tokens of a server's clients. The server must start `run` as a background task."""

    def __init__(
        self,
        store: AccessStore,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._failures = FailureLimit(monotonic)
        self._connected: dict[str, list[Callable[[str], None]]] = {}
        """The functions that close the open connections, by the ids of their tokens."""
        self._used: dict[str, int] = {}
        """The last time of use that was stored for each token, as a Unix time in milliseconds."""

    async def authenticate(self, token: str | None, address: str) -> Grant:
        """Check a token, and return the grant that it gives. `address` is the client's address, as `client_address`
        returns it.

        A valid token is accepted even from an address that has sent too many wrong tokens. Otherwise one client could
        lock out all other clients behind the same proxy.

        :raises BadToken: the token is missing or not valid.
        :raises TooManyFailures: the token is not valid, and this address has sent too many tokens that are not valid.
        :raises ~crow.domain.errors.StoreError: the store cannot be read.
        """
        found = await self._find(token)
        if found is None or found.id.startswith(_PAIRING):
            # Requests without a token are not counted: they guess nothing, and browsers and health checks send them.
            if token is not None and (retry_after_s := self._failures.count(address)) > 0:
                raise TooManyFailures(retry_after_s)
            raise BadToken
        await self._note_use(found)
        return Grant(principal=found.principal, token_id=found.id)

    async def pair(self, token: object, address: str, *, label: str, expires_ms: int) -> str:
        """Use up a pairing token, and return the text of a new token for the same principal.

        :raises BadToken: `token` is not a pairing token, is not valid, or was used before.
        :raises TooManyFailures: as for `authenticate`.
        :raises ~crow.domain.errors.StoreError: the store cannot be read or written.
        """
        found = await self._find(token) if isinstance(token, str) else None
        if found is None or not found.id.startswith(_PAIRING):
            if (retry_after_s := self._failures.count(address)) > 0:
                raise TooManyFailures(retry_after_s)
            raise BadToken
        if not await self._store.revoke_token(found.id):  # another browser was faster
            raise BadToken
        text, made = new_token(found.principal, label=label, expires_ms=expires_ms, now_ms=self._now_ms())
        await self._store.add_token(made)
        return text

    async def forget(self, token: str | None) -> None:
        """Revoke the token with this text. Do nothing if it is not valid.

        :raises ~crow.domain.errors.StoreError: the store cannot be read or written.
        """
        if (found := await self._find(token)) is not None:
            await self._store.revoke_token(found.id)

    @contextmanager
    def connected(self, grant: Grant, close: Callable[[str], None]) -> Iterator[None]:
        """Watch the token of a connection during the block. If the token is revoked or expires, call `close` once with
        the reason."""
        closers = self._connected.setdefault(grant.token_id, [])
        closers.append(close)
        try:
            yield
        finally:
            if close in closers:
                closers.remove(close)
            if not closers and self._connected.get(grant.token_id) is closers:
                del self._connected[grant.token_id]

    async def run(self) -> None:
        """End the connections whose tokens are revoked or expire. Runs until it is cancelled."""
        while True:
            await anyio.sleep(_WATCH_S)
            await self.check()

    async def check(self) -> None:
        """Check the tokens of all open connections once. If there are no connections, do not read the store."""
        if not self._connected:
            return
        try:
            valid = {token.id: token for token in await self._store.tokens() if is_valid(token, self._now_ms())}
        except StoreError as error:
            logger.warning("The tokens of open connections could not be checked: %s", error)
            return
        for token_id in tuple(self._connected):
            if token_id in valid:
                await self._note_use(valid[token_id])
                continue
            for close in self._connected.pop(token_id, []):
                close("The token of this connection was revoked or has expired.")

    async def _find(self, text: str | None) -> Token | None:
        parts = _SHAPE.fullmatch(text or "")
        if text is None or parts is None or not hmac.compare_digest(_check(text[:-_CHECK_CHARS]), parts[3]):
            return None
        token = await self._store.token(parts[1])
        # An unknown id takes as long as a wrong secret, so the time does not show which ids exist.
        is_right = hmac.compare_digest(_hash(parts[2]), _NO_HASH if token is None else token.hash)
        return token if token is not None and is_right and is_valid(token, self._now_ms()) else None

    async def _note_use(self, token: Token) -> None:
        now = self._now_ms()
        if now - max(token.used_ms or 0, self._used.get(token.id, 0)) < USED_MS:
            return
        self._used[token.id] = now
        try:
            await self._store.note_token_use(token.id, now)
        except StoreError as error:
            logger.warning("The time of the last use of token %s could not be stored: %s", token.id, error)


class FailureLimit:
    """Counts wrong tokens for each address, in bounded memory. An IPv6 network with a prefix of 64 bits counts as one
    address."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """For each address: the number of wrong tokens, which decreases with time, and the time of its last change."""

    def count(self, address: str) -> float:
        """Count a wrong token from this address. Return 0 if the address has not reached the limit, else the number of
        seconds until it may send another wrong token."""
        key, now = _network(address), self._monotonic()
        count, at = self._known.pop(key, (0.0, now))
        count = max(0.0, count - (now - at) * FAILURES_PER_S)
        is_over = count + 1 > FAILURES
        self._known[key] = (count if is_over else count + 1, now)
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)
        return (count + 1 - FAILURES) / FAILURES_PER_S if is_over else 0.0

    def __len__(self) -> int:
        return len(self._known)


def _network(address: str) -> str:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:100]
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return found.exploded[:19]


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _check(body: str) -> str:
    """Return the check number of a token. With this number, crow recognises a mistyped token without a query to the
    store."""
    return base32(zlib.crc32(body.encode()).to_bytes(4, "big"))

"""Keeps the tokens of MCP servers in files that only the user can read."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from crow.domain.errors import ToolServerError
from crow.domain.messages import JsonObject

fcntl: Any = None
with suppress(ImportError):  # Windows has no such locks
    fcntl = importlib.import_module("fcntl")

_MAX_BYTES = 1_000_000
POLL_S = 0.05
"""The pause between two attempts to get a lock that another session holds."""
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account to log in to: the URL of a server, and a name for the user's account there (usually empty)."""

    url: str
    name: str = ""

    @property
    def file_name(self) -> str:
        """The name of the login's file, without its suffix."""
        return hashlib.sha256(f"{self.name}\n{self.url}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A login: the tokens, and what is needed to refresh and revoke them."""

    account: Account
    tokens: JsonObject = field(repr=False)
    client: JsonObject = field(repr=False)
    """Crow's registration at the authorization server."""
    metadata: JsonObject = field(default_factory=dict)
    """Describes the authorization server."""
    resource: JsonObject = field(default_factory=dict)
    """The description that the MCP server gave of itself."""
    expires_at: float | None = None
    """When the access token expires, in seconds since 1970. None if unknown."""

    @property
    def token(self) -> str:
        """The access token."""
        return str(self.tokens["access_token"])

    @property
    def issuer(self) -> str:
        """The authorization server; empty if it is not known."""
        return str(self.metadata.get("issuer") or "")

    @property
    def secrets(self) -> tuple[str, ...]:
        """The tokens and the client secret, which must not be shown."""
        found = (self.tokens.get("access_token"), self.tokens.get("refresh_token"), self.client.get("client_secret"))
        return tuple(value for value in found if isinstance(value, str) and value)


class LoginFolder:
    """The directory with one file for each login. All methods except `locked` may block the thread.

    `secrets` are the tokens that this object has read or written. `on_secrets` is called with the tokens of each new
    login.
    """

    def __init__(self, folder: Path, on_secrets: Callable[[Iterable[str]], None] | None = None) -> None:
        self.folder = folder
        self.secrets: tuple[str, ...] = ()
        self._on_secrets = on_secrets

    def read(self, account: Account) -> Login | None:
        """Return the stored login; None if there is none. :raises ToolServerError: the file cannot be used."""
        file = self._file(account)
        try:
            login = _read_login(file)
        except FileNotFoundError:
            return None
        if login.account != account:
            raise ToolServerError(f"{file} belongs to another server, {login.account.url}; delete it and log in again")
        self._remember(login)
        return login

    def write(self, login: Login) -> None:
        """Store a login. It replaces an earlier login for the same account. :raises OSError: the file cannot be
        written."""
        self._remember(login)
        self._make_folder()
        file = self._file(login.account)
        part = file.with_name(f"{file.stem}.{os.urandom(8).hex()}.new")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as out:
                json.dump(asdict(login), out, ensure_ascii=True)
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def remove(self, account: Account) -> None:
        """Remove a login, even if its file cannot be read."""
        self._file(account).unlink(missing_ok=True)

    @asynccontextmanager
    async def locked(self, account: Account, purpose: str) -> AsyncIterator[None]:
        """Hold a lock that only one session can hold at a time, across all processes. Each account has one lock for
        each `purpose`. Waiting for the lock can be cancelled.

        :raises ToolServerError: the lock file cannot be made.
        """
        path = self._file(account).with_suffix(f".{purpose}.lock")
        try:
            await anyio.to_thread.run_sync(self._make_folder)
            descriptor = await anyio.to_thread.run_sync(os.open, path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)
        except OSError as error:
            raise ToolServerError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            while not _is_locked_now(descriptor):  # noqa: ASYNC110 - another process may hold it
                await anyio.sleep(POLL_S)
            yield
        finally:
            os.close(descriptor)  # releases the lock

    def _file(self, account: Account) -> Path:
        return self.folder / f"{account.file_name}.json"

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _remember(self, login: Login) -> None:
        """Add the login's tokens and secrets to `secrets`, and tell `on_secrets` about new ones."""
        new = [value for value in login.secrets if value not in self.secrets]
        if new:
            self.secrets = (*self.secrets, *new)[-64:]
            if self._on_secrets is not None:
                self._on_secrets(new)


def _is_locked_now(descriptor: int) -> bool:
    """Try to lock an open file, and return whether crow now holds the lock. If the system or the file system does not
    support locks, always return True."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def _read_login(file: Path) -> Login:
    """Read a stored login. :raises FileNotFoundError: there is no such file. :raises ToolServerError: the file cannot
    be used."""
    try:
        descriptor = os.open(file, os.O_RDONLY | _NO_FOLLOW)
        with open(descriptor, "rb") as opened:
            if hasattr(os, "getuid") and os.fstat(descriptor).st_uid != os.getuid():
                raise ToolServerError(f"{file} belongs to another user; delete it and log in again")
            text = opened.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ToolServerError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return _login_from(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):  # the error's own text could show a token
        raise ToolServerError(f"{file} is damaged; delete it and log in again") from None


def _login_from(stored: Any) -> Login:
    """Convert the content of a login's file. :raises ValueError, TypeError, KeyError: it is damaged."""
    account, tokens, expires_at = stored["account"], stored["tokens"], stored["expires_at"]
    texts = (account["url"], account["name"], tokens["access_token"])
    others = (stored["client"], stored["metadata"], stored["resource"])
    is_time = expires_at is None or (isinstance(expires_at, int | float) and math.isfinite(expires_at))
    if not is_time or not all(isinstance(text, str) for text in texts) or not all(isinstance(o, dict) for o in others):
        raise ValueError
    return Login(
        account=Account(url=account["url"], name=account["name"]),
        tokens=tokens,
        client=stored["client"],
        metadata=stored["metadata"],
        resource=stored["resource"],
        expires_at=expires_at,
    )

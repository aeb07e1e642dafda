"""Links: pages of sessions that `crow serve` shows to anyone who has their secret address.

A link is two files in a private folder: the page, as the session was when it was shared, and a record. The record has
the sha256 of the secret in the address, but not the secret itself. So a person who reads a backup of the folder cannot
build the address.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from crow.domain.errors import ArgumentError
from crow.domain.text import base32, plural, title_line
from crow.export.redact import Redactor
from crow.store import Store

PATH = "/share/"
"""Addresses of links begin with this path."""

DEFAULT_AGE, _MAX_AGE_MS = "7d", 366 * 86_400_000
_UNITS_MS = {"h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_MAX_LINKS = 1_000
_ID_CHARS, _SECRET_CHARS = 10, 52
_ADDRESS = re.compile(rf"([a-z2-7]{{{_ID_CHARS}}})([a-z2-7]{{{_SECRET_CHARS}}})")
_RECORD = re.compile(rf"[a-z2-7]{{{_ID_CHARS}}}\.json")
_PAGE = re.compile(rf"[a-z2-7]{{{_ID_CHARS}}}\.(?:html|part)")
_ABANDONED_S = 3_600
"""A page that is older than this and has no record is removed: the process that wrote the page was killed."""
_NO_HASH = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLink:
    """The record of a link."""

    id: str
    """Names the link in lists. The address has it in front of the secret."""
    hash: str
    """The sha256 (hex) of the secret, which is the end of the address after `id`."""
    session: str
    """The id of the session."""
    title: str
    """The title of the session when it was shared."""
    principal: str | None
    """The principal who owns the session, or None if the session has no owner."""
    policy: str
    """The Content-Security-Policy of the page."""
    created_ms: int
    """Unix milliseconds."""
    expires_ms: int
    """Unix milliseconds. At this time, the link stops working."""


class PageLinks:
    """The links of one machine."""

    def __init__(self, folder: Path, *, url: Callable[[], str], redactor: Callable[[bool], Redactor]) -> None:
        """`url` returns the address of the server. `redactor(is_strict)` returns the function that masks secrets in
        pages; see :func:`crow.export.redact.redactor`."""
        self._folder = folder
        self._url = url
        self._redactor = redactor

    async def add(
        self, store: Store, session_id: str, *, age: str, is_strict: bool, window: int | None = None
    ) -> tuple[PageLink, str]:
        """Write the page of a session, and return its link and its address. `age` says how long the link works, such
        as `7d`. With `is_strict`, the page also hides texts that only look secret. `window` is the size of the model's
        context window in tokens, if it is known.

        :raises ArgumentError: `age` is not valid, there are too many links, or the page cannot be written.
        """
        from crow.export.page import page_policy, session_page  # takes 40 ms, and few processes make a page

        row, now_ms = await store.session(session_id), time.time_ns() // 1_000_000
        lifetime_ms = parse_lifetime(age)
        if len(await self.list()) >= _MAX_LINKS:
            raise ArgumentError(f"There are {plural(_MAX_LINKS, 'link')} already. Revoke some that nobody needs.")
        name, secret = base32(secrets.token_bytes(7))[:_ID_CHARS], base32(secrets.token_bytes(32))[:_SECRET_CHARS]
        redact = self._redactor(is_strict)
        link = PageLink(
            id=name,
            hash=hashlib.sha256(secret.encode()).hexdigest(),
            session=row.id,
            title=title_line(redact(row.title or "")),
            principal=row.principal,
            policy=page_policy(),
            created_ms=now_ms,
            expires_ms=now_ms + lifetime_ms,
        )
        try:
            file = await anyio.to_thread.run_sync(self._new_page, name)
            async with await anyio.open_file(file, "wb") as page:
                async for piece in session_page(store, row.id, redact, window=window):
                    await page.write(piece)
            await anyio.to_thread.run_sync(self._write_record, link)
        except OSError as error:
            await anyio.to_thread.run_sync(self._remove, name)
            raise ArgumentError(f"The page cannot be written to {self._folder}: {error.strerror}.") from error
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._remove, name)
            raise
        return link, f"{self._url().rstrip('/')}{PATH}{name}{secret}"

    async def list(self) -> tuple[PageLink, ...]:
        """Return the links that work, newest first. Links that have expired are removed."""
        return await anyio.to_thread.run_sync(self._read_all)

    async def revoke(self, link_id: str, *, is_own: Callable[[PageLink], bool] = lambda _: True) -> PageLink:
        """Remove a link. :raises ArgumentError: there is no such link for which `is_own` returns true."""
        for link in await self.list():
            if link.id == link_id and is_own(link):
                await anyio.to_thread.run_sync(self._remove, link.id)
                return link
        raise ArgumentError(f'There is no link "{title_line(link_id, 40)}".')

    async def find(self, address: str) -> tuple[PageLink, Path] | None:
        """Return the link with this address (the part after `PATH`), and the file with its page. Return None if there
        is no such link, or if it was revoked or has expired."""
        return await anyio.to_thread.run_sync(self._find, address)

    async def remove(self, link: PageLink) -> None:
        """Remove a link, for example because its session was deleted."""
        await anyio.to_thread.run_sync(self._remove, link.id)

    def _find(self, address: str) -> tuple[PageLink, Path] | None:
        parts = _ADDRESS.fullmatch(address)
        link = self._read(parts[1]) if parts is not None else None
        secret = parts[2] if parts is not None else ""
        # An unknown id takes as long as a wrong secret, so that the time does not show which ids exist.
        is_right = hmac.compare_digest(
            hashlib.sha256(secret.encode()).hexdigest(), link.hash if link is not None else _NO_HASH
        )
        if link is None or not is_right:
            return None
        page = self._page(link.id)
        return (link, page) if page.is_file() else None

    def _read_all(self) -> tuple[PageLink, ...]:
        try:
            files = {entry.name: entry for entry in os.scandir(self._folder)}
        except FileNotFoundError:
            return ()
        names = [name for name in files if _RECORD.fullmatch(name)]
        for name, entry in files.items():
            link_id = name[:_ID_CHARS]
            if _PAGE.fullmatch(name) and f"{link_id}.json" not in files:
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                        self._remove(link_id)
        found = [link for name in names if (link := self._read(name.removesuffix(".json"))) is not None]
        return tuple(sorted(found, key=lambda link: link.created_ms, reverse=True))

    def _read(self, link_id: str) -> PageLink | None:
        """Return a link that has not expired, or None."""
        try:
            link = PageLink(**json.loads((self._folder / f"{link_id}.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if time.time_ns() // 1_000_000 >= link.expires_ms:
            self._remove(link_id)
            return None
        return link if link.id == link_id else None

    def _new_page(self, link_id: str) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._page(link_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def _write_record(self, link: PageLink) -> None:
        """Write the record of a link whose page is complete. The link works as soon as its record exists."""
        path = self._folder / f"{link.id}.json"
        part = path.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(link), file)
        part.rename(path)

    def _remove(self, link_id: str) -> None:
        for end in ("json", "part", "html"):  # the record first: without it, the server does not find the page
            with suppress(FileNotFoundError):
                (self._folder / f"{link_id}.{end}").unlink()

    def _page(self, link_id: str) -> Path:
        return self._folder / f"{link_id}.html"


def parse_lifetime(text: str) -> int:
    """Return a lifetime such as `12h`, `7d` or `8w` in milliseconds. :raises ArgumentError: it is not valid."""
    match = re.fullmatch(r"([0-9]{1,4})([hdw])", text)
    lifetime_ms = int(match[1]) * _UNITS_MS[match[2]] if match is not None else 0
    if not 0 < lifetime_ms <= _MAX_AGE_MS:
        raise ArgumentError(f'"{title_line(text, 40)}" is not a lifetime; expected 1h to 366d, such as 12h, 7d or 8w.')
    return lifetime_ms

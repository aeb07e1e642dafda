"""The adapter for any program that can send and take HTTP requests."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from crow_channels.chat import File, Inbox, Incoming, Limits, Outgoing, Settings
from crow_channels.errors import ChatRefused, ChatUnavailable, ConfigError

logger = logging.getLogger(__name__)

SIGNATURE, TIMESTAMP = "X-Crow-Signature", "X-Crow-Timestamp"
_MAX_AGE_S = 300.0
_MAX_BODY_BYTES = 16_000_000
_MAX_ID = 150
_CALL_S = 30.0
_TRY_AGAIN = {408, 409, 423, 425, 429}
_MIN_SECRET = 16


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a request: HMAC-SHA256 of the timestamp, a dot and the body, in hex."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class WebhookChat:
    """Takes signed POST requests, and sends some.

    Its settings are `listen` (HOST:PORT), `url` (where to send), `secret_env`, `chars`, `edits`, `files` and
    `edit_interval_s`.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._secret = settings.secret("secret_env")
        if len(self._secret) < _MIN_SECRET:
            raise ConfigError(
                f"The secret of a webhook has {len(self._secret)} characters; expected at least {_MIN_SECRET}."
            )
        host, _, port = settings.text("listen", "127.0.0.1:7433").rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise ConfigError('The setting listen of a webhook is not HOST:PORT, such as "127.0.0.1:7433".')
        self._host, self._port = host.strip("[]"), int(port)
        self._url = settings.text("url")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f'The setting url of a webhook is "{self._url}"; expected http:// or https://.')
        self.limits = Limits(
            chars=int(settings.number("chars", 4000)),
            can_edit=settings.flag("edits", False),
            has_buttons=True,
            edit_interval_s=settings.number("edit_interval_s", 1.0),
            messages=1000,
            file_bytes=8_000_000 if settings.flag("files", True) else 0,
        )
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._is_open = asyncio.Event()
        self.port = 0
        """The port on which it listens."""

    async def run(self, inbox: Inbox) -> None:
        """See `Chat`."""

        async def messages(request: web.Request) -> web.Response:
            return await self._serve(request, inbox, _message)

        async def answers(request: web.Request) -> web.Response:
            return await self._serve(request, inbox, _answer)

        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/messages", messages)
        app.router.add_post("/answers", answers)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            self.port = runner.addresses[0][1]
            logger.info("Listening on http://%s:%s", self._host, self.port)
            timeout = aiohttp.ClientTimeout(total=_CALL_S)
            async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as self._session:
                self._is_open.set()
                await asyncio.get_running_loop().create_future()
        finally:
            self._is_open.clear()
            await runner.cleanup()

    async def send(self, place: str, message: Outgoing) -> str:
        """See `Chat`. The receiver recognises a repeated `id`."""
        await self._post(_event("message", place, message, None))
        return message.key

    async def edit(self, place: str, message_id: str, message: Outgoing) -> None:
        """See `Chat`."""
        await self._post(_event("edit", place, message, message_id))

    async def find(self, place: str, message: Outgoing, known: Collection[str]) -> str | None:  # noqa: ARG002
        """See `Chat`."""
        return None

    async def _post(self, event: Mapping[str, Any]) -> None:
        await self._is_open.wait()
        assert self._session is not None
        body, timestamp = json.dumps(event).encode(), str(int(self._clock()))
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: timestamp,
            SIGNATURE: signature(self._secret, timestamp, body),
            "Idempotency-Key": f"{event['type']} {event['id']} {hashlib.sha256(body).hexdigest()[:16]}",
        }
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                status, wait = response.status, response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError) as error:
            raise ChatUnavailable(f"{self._url}: {error or type(error).__name__}") from error
        if status in _TRY_AGAIN or status >= 500:
            pause_s = min(float(wait), 600.0) if wait.isascii() and wait.isdigit() else 0.0
            raise ChatUnavailable(f"{self._url} answered with {status}", retry_after_s=pause_s)
        if not 200 <= status < 300:
            raise ChatRefused(f"{self._url} answered with {status}")

    async def _serve(self, request: web.Request, inbox: Inbox, handle: Any) -> web.Response:
        body, timestamp = await request.read(), request.headers.get(TIMESTAMP, "")
        expected = signature(self._secret, timestamp, body)
        if not hmac.compare_digest(expected.encode(), request.headers.get(SIGNATURE, "").encode(errors="replace")):
            return _said(401, "The signature is wrong.")
        is_number = timestamp.isascii() and timestamp.isdigit() and len(timestamp) < 20
        if not is_number or abs(self._clock() - int(timestamp)) > _MAX_AGE_S:
            return _said(401, "The timestamp is missing, or more than five minutes away.")
        try:
            values = json.loads(body)
            if not isinstance(values, dict):
                raise ValueError("The body is not a JSON object.")  # noqa: TRY004, TRY301
            response: web.Response = await handle(inbox, values)
        except (ValueError, RecursionError) as error:
            return _said(400, str(error)[:500])
        return response


async def _message(inbox: Inbox, values: Mapping[str, Any]) -> web.Response:
    message = Incoming(
        id=_name(values, "id"),
        place=_name(values, "place"),
        user=_name(values, "user"),
        text=_text(values, "text"),
        parent=None if values.get("parent") is None else _name(values, "parent"),
        is_direct=values.get("direct") is True,
        is_addressed=values.get("addressed") is not False,
        files=_files(values.get("files")),
    )
    match await inbox.message(message):
        case "denied":
            return _said(403, "This user or place is not listed.")
        case "duplicate":
            return _said(200, "This message was taken before.")
        case _:
            return _said(202, "The message was taken.")


async def _answer(inbox: Inbox, values: Mapping[str, Any]) -> web.Response:
    words = await inbox.press(_name(values, "button"), place=_name(values, "place"), user=_name(values, "user"))
    return _said(200, words)


def _said(status: int, words: str) -> web.Response:
    return web.json_response({"message": words}, status=status)


def _name(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ID or not value.isprintable():
        raise ValueError(f"{key}: expected a string of 1 to {_MAX_ID} printable characters.")
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key}: expected a string.")  # noqa: TRY004
    value.encode()  # a lone surrogate cannot be stored
    return value


def _files(values: object) -> tuple[File, ...]:
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ValueError('files: expected a list of objects with "name", "mime" and "data" (base64).')
    files = []
    for each in values:
        data: bytes | None = None
        with suppress(binascii.Error, ValueError):
            data = base64.b64decode(_text(each, "data"), validate=True)
        files.append(File(name=_name(each, "name"), mime=_text(each, "mime"), data=data))
    return tuple(files)


def _event(kind: str, place: str, message: Outgoing, message_id: str | None) -> dict[str, Any]:
    return {
        "type": kind,
        "id": message_id or message.key,
        "place": place,
        "text": message.text,
        "reply_to": message.after,
        "buttons": [{"button": each.id, "label": each.label} for each in message.buttons],
        "files": [
            {"name": each.name, "mime": each.mime, "data": base64.b64encode(each.data or b"").decode()}
            for each in message.files
        ],
    }

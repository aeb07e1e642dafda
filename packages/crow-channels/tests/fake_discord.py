"""A Discord on loopback: its gateway and the part of its HTTP interface that the bot uses. It can fail on request."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from contextlib import suppress
from typing import Any, Self

from aiohttp import BodyPartReader, WSMsgType, web

BOT, GUILD, CHANNEL, THREAD, DIRECT = "900", "800", "700", "701", "702"
TOKEN = "discord-token-of-the-tests"
_WAIT_S = 20
_EPOCH = "2026-11-28T00:00:00.000000+00:00"


def user(user_id: str, *, is_bot: bool = False) -> dict[str, Any]:
    """A user as Discord sends it."""
    return {"id": user_id, "username": f"u{user_id}", "discriminator": "0", "avatar": None, "bot": is_bot}


def said(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A response. Discord names no charset, and discord.py relies on that."""
    body = json.dumps(value).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


class FakeDiscord:
    """Use as `async with FakeDiscord() as discord`."""

    def __init__(self) -> None:
        self.messages: dict[str, list[dict[str, Any]]] = {CHANNEL: [], THREAD: [], DIRECT: []}
        """All messages by channel, oldest first, as they are now."""
        self.edits = 0
        self.uploads: list[tuple[str, bytes]] = []
        """The files that the bot has sent."""
        self.responses: list[dict[str, Any]] = []
        """What only the one who acted has seen."""
        self.commands: list[str] = []
        """The slash commands that the bot has registered."""
        self.failures: deque[str] = deque()
        """What happens to the next requests that write: `503` does nothing, `lost` works but is never answered, `429`
        asks to wait, and `ok` works."""
        self.attachment = b"hello from a file\n"
        self._nonces: dict[str, dict[str, Any]] = {}
        self._next_id = 1000
        self._sockets: set[web.WebSocketResponse] = set()
        self._events: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._compressors: dict[web.WebSocketResponse, Any] = {}
        self.sessions = 0
        """How often a bot has identified itself, rather than resumed."""
        self.is_away = False

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/gateway/", self._gateway)
        app.router.add_get("/cdn/{name}", self._cdn)
        app.router.add_route("*", "/api/{path:.*}", self._rest)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()
        await self._runner.cleanup()

    @property
    def settings(self) -> str:
        """The settings of the adapter that lead here."""
        return (
            f'type = "discord"\ntoken_env = "DISCORD_TOKEN"\nedit_interval_s = 0.05\n'
            f'api = "http://{self.base}/api"\ngateway = "ws://{self.base}/gateway/"\n'
        )

    # What the tests do.

    def write(self, text: str, *, author: str = "1", place: str = CHANNEL, files: int = 0, **fields: Any) -> str:
        """Somebody writes a message. Returns its id."""
        message = self._message(place, text, user(author) | fields.pop("about", {})) | fields
        message["attachments"] = [
            {
                "id": str(self._new_id()),
                "filename": f"note{number}.txt",
                "content_type": "text/plain; charset=utf-8",
                "size": len(self.attachment),
                "url": f"http://{self.base}/cdn/note{number}.txt",
                "proxy_url": f"http://{self.base}/cdn/note{number}.txt",
            }
            for number in range(files)
        ]
        self.messages[place].append(message)
        self._dispatch("MESSAGE_CREATE", message if place == DIRECT else message | {"guild_id": GUILD})
        return str(message["id"])

    def press(self, message: dict[str, Any], label: str, *, author: str = "1") -> None:
        """Somebody presses a button."""
        button = next(each for each in buttons(message) if each["label"] == label)
        data = {"custom_id": button["custom_id"], "component_type": 2}
        self._interact(3, data, author, str(message["channel_id"]), message=message)

    def command(self, name: str, value: str | None = None, *, author: str = "1", place: str = CHANNEL) -> None:
        """Somebody chooses a slash command from the menu."""
        options = [{"name": "value", "type": 3, "value": value}] if value is not None else []
        self._interact(2, {"id": "1", "type": 1, "name": name, "options": options}, author, place)

    async def drop(self) -> None:
        """All connections of the gateway break."""
        for socket in tuple(self._sockets):
            self._sockets.discard(socket)
            if socket._req is not None and socket._req.transport is not None:
                socket._req.transport.abort()

    def answers(self, place: str = CHANNEL) -> list[str]:
        """The texts of the bot's messages."""
        return [each["content"] for each in self.messages[place] if each["author"]["id"] == BOT]

    async def wait(self, condition: Any, what: str = "") -> Any:
        """Wait until a condition of this Discord holds, and return its value."""
        try:
            async with asyncio.timeout(_WAIT_S):
                while not (value := condition()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{[self.answers(place) for place in self.messages]} {self.responses}") from None
        return value

    # The gateway.

    def _dispatch(self, name: str, data: dict[str, Any]) -> None:
        self._events.append({"op": 0, "t": name, "s": len(self._events) + 1, "d": data})
        for socket in tuple(self._sockets):
            task = asyncio.ensure_future(self._send(socket, self._events[-1]))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._changed.set()

    def _interact(self, kind: int, data: dict[str, Any], author: str, place: str, **fields: Any) -> None:
        member = {"user": user(author), "roles": [], "joined_at": _EPOCH, "deaf": False, "mute": False, "flags": 0}
        channel = self._channel(place) | {"permissions": "0"}
        event = {"id": str(self._new_id()), "application_id": BOT, "type": kind, "token": "t", "version": 1}
        event |= {"channel_id": place, "channel": channel, "data": data, "entitlements": [], "locale": "en-GB"}
        event |= {"authorizing_integration_owners": {}, "app_permissions": "0", "attachment_size_limit": 1}
        who = (
            {"user": user(author)} if place == DIRECT else {"member": member | {"permissions": "0"}, "guild_id": GUILD}
        )
        self._dispatch("INTERACTION_CREATE", event | who | fields)

    async def _send(self, socket: web.WebSocketResponse, message: dict[str, Any]) -> None:
        compressor = self._compressors[socket]
        data = compressor.compress(json.dumps(message).encode()) + compressor.flush(zlib.Z_SYNC_FLUSH)
        with suppress(ConnectionError):
            await socket.send_bytes(data)

    async def _gateway(self, request: web.Request) -> web.StreamResponse:
        if self.is_away:
            return web.Response(status=503)
        assert request.query["compress"] == "zlib-stream"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._compressors[socket] = zlib.compressobj()
        await self._send(socket, {"op": 10, "d": {"heartbeat_interval": 40_000}})
        async for frame in socket:
            if frame.type is not WSMsgType.TEXT:
                break
            message = json.loads(frame.data)
            if message["op"] == 1:
                await self._send(socket, {"op": 11})
            elif message["op"] == 2:
                assert message["d"]["token"] == TOKEN
                self.sessions += 1
                self._events.clear()
                ready = {"v": 10, "user": user(BOT, is_bot=True), "guilds": [{"id": GUILD, "unavailable": True}]}
                ready |= {"session_id": f"s{self.sessions}", "resume_gateway_url": f"ws://{self.base}/gateway/"}
                self._sockets.add(socket)
                self._dispatch("READY", ready | {"application": {"id": BOT, "flags": 0}})
                self._dispatch("GUILD_CREATE", self._guild())
            elif message["op"] == 6:
                missed = self._events[message["d"]["seq"] :]
                if message["d"]["session_id"] != f"s{self.sessions}":
                    await self._send(socket, {"op": 9, "d": False})
                    continue
                self._sockets.add(socket)
                for event in missed:
                    await self._send(socket, event)
                self._dispatch("RESUMED", {})
        self._sockets.discard(socket)
        return socket

    # The HTTP interface.

    async def _cdn(self, request: web.Request) -> web.Response:
        return web.Response(body=self.attachment)

    async def _rest(self, request: web.Request) -> web.StreamResponse:
        path, method = request.match_info["path"], request.method
        assert path.startswith("interactions/") or request.headers["Authorization"] == f"Bot {TOKEN}"
        if self.is_away:
            return said({"message": "away"}, status=503)
        match (method, path.split("/")):
            case "GET", ["users", "@me"]:
                return said(user(BOT, is_bot=True))
            case "GET", ["oauth2", "applications", "@me"]:
                about = {"id": BOT, "name": "crow", "description": "", "icon": None, "verify_key": "", "flags": 0}
                about |= {"bot_public": False, "bot_require_code_grant": False, "summary": "", "team": None}
                return said(about | {"owner": user("1"), "rpc_origins": []})
            case "PUT", ["applications", _, "commands"]:
                self.commands = [each["name"] for each in await request.json()]
                return said([])
            case "GET", ["channels", place]:
                return said(self._channel(place))
            case "GET", ["channels", place, "messages"]:
                after = int(request.query.get("after", 0))
                found = [each for each in self.messages[place] if int(each["id"]) > after]
                # After an id, Discord returns the oldest messages, newest first.
                return said(found[: int(request.query.get("limit", 50))][::-1])
            case "POST", ["interactions", _, _, "callback"]:
                self.responses.append((await request.json())["data"])
                self._changed.set()
                return said({"interaction": {"id": "1", "type": 2}, "resource": {"type": 4}})
            case _:
                return await self._write(request, method, path.split("/"))

    async def _write(self, request: web.Request, method: str, path: list[str]) -> web.StreamResponse:
        failure = self.failures.popleft() if self.failures else "ok"
        if failure == "503":
            return said({"message": "overloaded"}, status=503)
        if failure == "429":
            headers = {
                "Via": "1.1",
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Limit": "5",
                "X-RateLimit-Reset-After": "0.05",
            }
            return said({"message": "slow", "retry_after": 0.05, "global": False}, status=429, headers=headers)
        payload = await self._payload(request)
        assert len(payload.get("content", "")) <= 2000
        match (method, path):
            case "POST", ["channels", place, "messages"]:
                message = self._created(place, payload)
            case "PATCH", ["channels", place, "messages", message_id]:
                message = next(each for each in self.messages[place] if each["id"] == message_id)
                message["content"] = payload.get("content", message["content"])
                message["components"] = payload.get("components", message["components"])
                self.edits += 1
            case _:
                raise AssertionError((method, path))
        self._changed.set()
        if failure == "lost":
            assert request.transport is not None
            request.transport.abort()
        return said(message)

    async def _payload(self, request: web.Request) -> dict[str, Any]:
        if not request.content_type.startswith("multipart/"):
            return dict(await request.json())
        payload: dict[str, Any] = {}
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            if part.name == "payload_json":
                payload = json.loads(await part.text())
            else:
                self.uploads.append((str(part.filename), bytes(await part.read())))
        return payload

    def _created(self, place: str, payload: dict[str, Any]) -> dict[str, Any]:
        assert payload["allowed_mentions"]["parse"] == []
        assert payload["flags"] & 4, "links must not be fetched"
        nonce = payload["nonce"]
        assert payload["enforce_nonce"] is True
        assert len(nonce) <= 25
        if nonce in self._nonces:
            return self._nonces[nonce]
        message = self._message(place, payload["content"], user(BOT, is_bot=True))
        message["components"] = payload.get("components", [])
        message |= {"message_reference": payload["message_reference"]} if "message_reference" in payload else {}
        self._nonces[nonce] = message
        self.messages[place].append(message)
        return message

    def forget_nonces(self) -> None:
        """Some minutes pass."""
        self._nonces.clear()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _message(self, place: str, text: str, author: dict[str, Any]) -> dict[str, Any]:
        message = {"id": str(self._new_id()), "channel_id": place, "author": author, "content": text, "type": 0}
        message |= {"timestamp": _EPOCH, "edited_timestamp": None, "tts": False, "mention_everyone": False, "flags": 0}
        return (
            message
            | {key: [] for key in ("mentions", "mention_roles", "attachments", "embeds", "components", "reactions")}
            | {"pinned": False}
        )

    def _channel(self, place: str) -> dict[str, Any]:
        if place == DIRECT:
            return {"id": DIRECT, "type": 1, "last_message_id": None, "recipients": [user("1")], "flags": 0}
        if place == THREAD:
            data = {"archived": False, "auto_archive_duration": 60, "archive_timestamp": _EPOCH, "locked": False}
            about = {
                "owner_id": "1",
                "message_count": 0,
                "member_count": 1,
                "thread_metadata": data,
                "rate_limit_per_user": 0,
            }
            return {"id": THREAD, "type": 11, "guild_id": GUILD, "parent_id": CHANNEL, "name": "thread"} | about
        about = {"position": 0, "permission_overwrites": [], "topic": None, "nsfw": False, "rate_limit_per_user": 0}
        return {"id": place, "type": 0, "guild_id": GUILD, "parent_id": None, "name": "general"} | about

    def _guild(self) -> dict[str, Any]:
        role = {"id": GUILD, "name": "@everyone", "permissions": "0", "position": 0, "color": 0, "hoist": False}
        role |= {"managed": False, "mentionable": False, "flags": 0, "colors": {"primary_color": 0}}
        guild = {"id": GUILD, "name": "guild", "owner_id": "1", "member_count": 3, "premium_tier": 0, "nsfw_level": 0}
        guild |= {
            "verification_level": 0,
            "default_message_notifications": 0,
            "explicit_content_filter": 0,
            "mfa_level": 0,
        }
        guild |= {"afk_timeout": 60, "preferred_locale": "en-GB", "system_channel_flags": 0, "roles": [role]}
        guild |= {"channels": [self._channel(CHANNEL)], "threads": [self._channel(THREAD)]}
        return guild | {
            key: []
            for key in ("features", "emojis", "stickers", "members", "voice_states", "presences", "stage_instances")
        }


def buttons(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The buttons of a message."""
    return [button for row in message["components"] for button in row["components"]]

"""The adapter for Discord, on discord.py."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import discord
import yarl
from discord import app_commands

from crow_channels.chat import Button, File, Inbox, Incoming, Limits, Outgoing, Settings
from crow_channels.config import COMMANDS
from crow_channels.errors import ChatRefused, ChatUnavailable

logger = logging.getLogger(__name__)

_CALL_S = 60.0
_MAX_FILE_BYTES = 5_000_000
_BACKFILL = 500
"""At most this many missed messages of a channel are fetched."""
_RECENT = 100
"""A message that may have been sent is looked for among this many."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ASKED = {discord.MessageType.default, discord.MessageType.reply}


class DiscordChat:
    """A bot on Discord. Its settings are `token_env`, and `edit_interval_s`; `api` and `gateway` are addresses of a
    proxy."""

    def __init__(self, settings: Settings) -> None:
        self._token = settings.secret("token_env")
        self.limits = Limits(
            chars=2000,
            can_edit=True,
            has_buttons=True,
            edit_interval_s=settings.number("edit_interval_s", 1.5),
            messages=8,
            file_bytes=8_000_000,
        )
        if api := settings.text("api", ""):
            discord.http.Route.BASE = api
        if gateway := settings.text("gateway", ""):
            discord.gateway.DiscordWebSocket.DEFAULT_GATEWAY = yarl.URL(gateway)
        self._client: _Client | None = None
        self._logged_in = asyncio.Event()

    async def run(self, inbox: Inbox) -> None:
        """See `Chat`. :raises ChatRefused: Discord refuses the token, or the bot may not read messages."""
        pause_s = _FIRST_PAUSE_S
        while True:
            client = self._client = _Client(inbox)
            try:
                async with client:
                    await client.login(self._token)
                    self._logged_in.set()
                    await client.connect()
            except discord.LoginFailure as error:
                raise ChatRefused(f"Discord refuses the token: {error}") from error
            except discord.PrivilegedIntentsRequired as error:
                problem = "The bot may not read messages. Turn on its message content intent at Discord."
                raise ChatRefused(problem) from error
            except Exception as error:  # noqa: BLE001  # also what discord.py raises at an event that it does not know
                logger.warning("The connection to Discord ended: %s: %s", type(error).__name__, error)
            finally:
                self._logged_in.clear()
                client.stop()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def send(self, place: str, message: Outgoing) -> str:
        """See `Chat`. Discord returns the first message if it gets a nonce again within some minutes."""
        async with self._calling() as client:
            channel = client.get_partial_messageable(int(place))
            options: dict[str, Any] = {"view": _view(message.buttons)} if message.buttons else {}
            if message.is_reply and message.after.isdigit():
                options["reference"] = discord.MessageReference(
                    message_id=int(message.after), channel_id=int(place), fail_if_not_exists=False
                )
            sent = await channel.send(
                content=message.text,
                nonce=hashlib.sha256(message.key.encode()).hexdigest()[:25],
                suppress_embeds=True,  # else Discord fetches the links that the model writes
                mention_author=False,
                files=_files(message.files),
                **options,
            )
            return str(sent.id)

    async def edit(self, place: str, message_id: str, message: Outgoing) -> None:
        """See `Chat`."""
        async with self._calling() as client:
            partial = client.get_partial_messageable(int(place)).get_partial_message(int(message_id))
            options: dict[str, Any] = {"attachments": _files(message.files)} if message.files else {}
            view = _view(message.buttons) if message.buttons else None
            await partial.edit(content=message.text, view=view, **options)

    async def find(self, place: str, message: Outgoing, known: Collection[str]) -> str | None:
        """See `Chat`. Looks for the text among the bot's messages after the one that is answered."""
        async with self._calling() as client:
            after = discord.Object(id=_snowflake(message.after))
            history = client.get_partial_messageable(int(place)).history(after=after, limit=_RECENT, oldest_first=True)
            async for each in history:
                is_own = client.user is not None and each.author.id == client.user.id
                if is_own and str(each.id) not in known and each.content.strip() == message.text.strip():
                    return str(each.id)
            return None

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[_Client]:
        """Wait until the bot has logged in, and translate the errors of a call."""
        await self._logged_in.wait()
        assert self._client is not None
        with _translated():
            async with asyncio.timeout(_CALL_S):
                yield self._client


class _translated:  # noqa: N801  # used like a function
    """Turns the errors of discord.py into those of this package."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case discord.RateLimited():
                raise ChatUnavailable(str(error), retry_after_s=error.retry_after) from error
            case discord.HTTPException() if error.status >= 500 or error.status in (401, 408, 429):
                raise ChatUnavailable(str(error)) from error
            case discord.HTTPException():
                raise ChatRefused(str(error)) from error
            case aiohttp.ClientError() | OSError() | TimeoutError() | discord.DiscordException() | RuntimeError():
                raise ChatUnavailable(str(error) or type(error).__name__) from error


class _Client(discord.Client):
    """The connection to Discord. Messages are taken in the order in which they arrive."""

    def __init__(self, inbox: Inbox) -> None:
        intents = discord.Intents.none()
        intents.guilds = intents.guild_messages = intents.dm_messages = intents.message_content = True
        super().__init__(
            intents=intents,
            allowed_mentions=discord.AllowedMentions.none(),
            max_messages=None,
            member_cache_flags=discord.MemberCacheFlags.none(),
            chunk_guilds_at_startup=False,
        )
        self._inbox = inbox
        self._arrived: asyncio.Queue[discord.Message | None] = asyncio.Queue()
        self._taking: asyncio.Task[None] | None = None
        self._tree = app_commands.CommandTree(self)
        for name in COMMANDS:
            self._tree.add_command(_command(name, self._typed))

    async def setup_hook(self) -> None:
        self._taking = asyncio.create_task(self._take_all())
        try:
            await self._tree.sync()
        except discord.HTTPException as error:
            logger.warning("Discord did not take the slash commands: %s", error)

    def stop(self) -> None:
        """Take no more messages."""
        if self._taking is not None:
            self._taking.cancel()

    async def on_connect(self) -> None:
        """A new session with the gateway has begun, so messages may have been missed."""
        self._arrived.put_nowait(None)

    async def on_message(self, message: discord.Message) -> None:
        self._arrived.put_nowait(message)

    async def on_interaction(self, interaction: discord.Interaction[Any]) -> None:
        data: Any = interaction.data or {}
        button, place = str(data.get("custom_id", "")), interaction.channel_id
        if interaction.type is discord.InteractionType.component and button.startswith("crow:") and place is not None:
            words = await self._inbox.press(button, place=str(place), user=str(interaction.user.id))
            await _respond(interaction, words)

    async def _typed(self, interaction: discord.Interaction[Any], text: str) -> None:
        """Take a slash command that was chosen from Discord's menu."""
        if interaction.channel_id is None:
            return
        verdict = await self._inbox.message(
            Incoming(
                id=f"i{interaction.id}",
                place=str(interaction.channel_id),
                user=str(interaction.user.id),
                text=text,
                parent=_parent(interaction.channel),
                is_direct=isinstance(interaction.channel, discord.DMChannel),
            )
        )
        await _respond(interaction, "You are not listed here." if verdict == "denied" else text)

    async def _take_all(self) -> None:
        while True:
            message = await self._arrived.get()
            pause_s = _FIRST_PAUSE_S
            while True:
                try:
                    await (self._catch_up() if message is None else self._take(message))
                    break
                except ChatUnavailable as error:
                    logger.warning("Discord cannot be reached: %s", error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _catch_up(self) -> None:
        """Fetch what was written in the known channels since the newest message of each."""
        for place, seen in self._inbox.places().items():
            if not place.isdigit():
                continue
            if not seen:
                self._inbox.begin(place, str(discord.utils.time_snowflake(discord.utils.utcnow())))
                continue
            try:
                with _translated():
                    channel = self.get_channel(int(place)) or await self.fetch_channel(int(place))
                    if isinstance(channel, discord.abc.Messageable):
                        after = discord.Object(id=_snowflake(seen))
                        async for message in channel.history(after=after, limit=_BACKFILL, oldest_first=True):
                            await self._take(message)
            except ChatRefused as error:
                logger.info("Channel %s cannot be read: %s", place, error)

    async def _take(self, message: discord.Message) -> None:
        if message.author.bot or message.webhook_id is not None or message.type not in _ASKED:
            return
        assert self.user is not None
        mentions = (f"<@{self.user.id}>", f"<@!{self.user.id}>")
        text, is_direct = message.content, isinstance(message.channel, discord.DMChannel)
        is_addressed = is_direct or any(mention in text for mention in mentions)
        for mention in mentions:
            text = text.replace(mention, "")
        incoming = Incoming(
            id=str(message.id),
            place=str(message.channel.id),
            user=str(message.author.id),
            text=text,
            parent=_parent(message.channel),
            is_direct=is_direct,
            is_addressed=is_addressed,
        )
        if message.attachments and self._inbox.is_listed(incoming):
            files = tuple([await _fetched(each) for each in message.attachments])
            incoming = Incoming(**{name: getattr(incoming, name) for name in incoming.__slots__} | {"files": files})
        await self._inbox.message(incoming)


def _command(name: str, take: Any) -> app_commands.Command[Any, ..., None]:
    if name in ("mode", "title", "history"):

        @app_commands.describe(value="What to set")
        async def with_value(interaction: discord.Interaction[Any], value: str | None = None) -> None:
            await take(interaction, f"/{name} {value or ''}".strip())

        return app_commands.Command(name=name, description=f"Crow's /{name}", callback=with_value)

    async def plain(interaction: discord.Interaction[Any]) -> None:
        await take(interaction, f"/{name}")

    return app_commands.Command(name=name, description=f"Crow's /{name}", callback=plain)


async def _respond(interaction: discord.Interaction[Any], words: str) -> None:
    """Tell only the one who acted. The action has been stored, so a failure does no harm."""
    with suppress(discord.DiscordException, aiohttp.ClientError, OSError, TimeoutError):
        await interaction.response.send_message(words, ephemeral=True)


async def _fetched(attachment: discord.Attachment) -> File:
    name, mime = attachment.filename, attachment.content_type or ""
    if attachment.size > _MAX_FILE_BYTES:
        return File(name=name, mime=mime, data=None, problem=f"it is larger than {_MAX_FILE_BYTES // 1_000_000} MB")
    for pause_s in (1.0, 3.0, 0.0):
        try:
            async with asyncio.timeout(_CALL_S):
                return File(name=name, mime=mime, data=await attachment.read())
        except (discord.DiscordException, aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("An attachment could not be fetched: %s", error)
            await asyncio.sleep(pause_s)
    return File(name=name, mime=mime, data=None)


def _parent(channel: object) -> str | None:
    return str(channel.parent_id) if isinstance(channel, discord.Thread) else None


def _snowflake(message_id: str) -> int:
    """Return the number in a message's id. The ids of commands begin with a letter."""
    return int(message_id.removeprefix("i"))


def _files(files: Collection[File]) -> list[discord.File]:
    return [discord.File(io.BytesIO(each.data or b""), filename=each.name) for each in files]


def _view(buttons: Collection[Button]) -> discord.ui.View:
    view = discord.ui.View(timeout=None)
    for each in buttons:
        style = discord.ButtonStyle.secondary if each.is_refusal else discord.ButtonStyle.primary
        view.add_item(discord.ui.Button(label=each.label, custom_id=each.id, style=style))
    view.stop()  # presses arrive in `on_interaction`, also after a restart
    return view

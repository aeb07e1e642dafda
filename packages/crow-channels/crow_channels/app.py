"""Puts everything together and runs it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence

from crow_channels.chat import Chat
from crow_channels.config import ChatConfig, Config
from crow_channels.errors import ConfigError
from crow_channels.hub import Hub
from crow_channels.link import Links
from crow_channels.state import State
from crow_channels.text import MIN_CHARS
from crow_channels.worker import Shared

_ADAPTERS = {"discord": "crow_channels.discord_chat:DiscordChat", "webhook": "crow_channels.webhook_chat:WebhookChat"}


def make_chat(config: ChatConfig) -> Chat:
    """Return the adapter of a chat. :raises ConfigError: there is none, or its settings cannot be used."""
    module, colon, name = _ADAPTERS.get(config.type, config.type).partition(":")
    where = f'chats.{config.name}.type is "{config.type}"'
    if not colon:
        raise ConfigError(f"{where}; expected {', '.join(_ADAPTERS)}, or module:Class for an adapter of your own.")
    try:
        adapter = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = ' Install it with: pip install "crow-channels[discord]"' if config.type == "discord" else ""
        raise ConfigError(f"{where}, which cannot be imported: {error}.{hint}") from error
    chat: Chat = adapter(config.settings)
    config.settings.finish()
    if chat.limits.chars < 2 * MIN_CHARS or chat.limits.messages < 1:
        raise ConfigError(f"{where}; its messages must hold at least {2 * MIN_CHARS} characters.")
    return chat


async def run(config: Config, chats: Sequence[Chat] | None = None) -> None:
    """Serve all chats until cancelled. `chats` are the adapters, in the order of the configuration.

    :raises ConfigError: an adapter cannot be made.
    :raises StateError: the state file cannot be used.
    """
    adapters = [make_chat(each) for each in config.chats] if chats is None else chats
    state, links = State(config.state), Links(config)
    try:
        async with asyncio.TaskGroup() as tasks:
            shared = Shared(config=config, state=state, links=links)
            for each, chat in zip(config.chats, adapters, strict=True):
                hub = Hub(shared, each, chat, tasks)
                hub.start()
                tasks.create_task(chat.run(hub))
    finally:
        await links.close()
        state.close()

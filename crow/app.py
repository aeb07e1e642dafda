"""The composition root: the only place that picks adapters and wires them.

Strategy: start-up imports what `initialize` needs and nothing else; the store is opened by the first session, and the
heavy packages (openai, mcp) are imported in a thread once nobody has asked for a while, or at the first prompt. Has no
logic of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from crow import __version__
from crow.agent.compaction import CompactionSettings
from crow.agent.session import Adapters, SessionSettings
from crow.domain.errors import AuthError
from crow.llm import Model
from crow.settings import OFFLINE, Loaded
from crow.store import Store
from crow.tools import Workspace

if TYPE_CHECKING:
    from crow.store.sqlite import SqliteStore

__all__ = ["open_store", "serve"]


async def open_store(loaded: Loaded) -> SqliteStore:
    """The user's database. :raises StoreError: it cannot be used."""
    from crow.store.sqlite import SqliteStore

    return await SqliteStore.open(loaded.paths.database)


async def serve(loaded: Loaded) -> int:
    """Serve ACP on stdin and stdout until stdin ends; the exit code."""
    from crow.frontend.agent import AcpAgent
    from crow.frontend.server import serve as serve_acp
    from crow.frontend.transport import StdioTransport, claim_stdio

    with claim_stdio() as (source, sink):
        agent = AcpAgent(Wiring(loaded).kit())
        await serve_acp(StdioTransport(source, sink), agent, agent.warm)
    return 0

"""Serves ACP over one connection, from the first line to the last."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import anyio

from crow.frontend.agent import AcpAgent
from crow.frontend.client import ClientConnection, Transport
from crow.frontend.sessions import ServerDependencies

CLOSE_S = 0.8


async def serve(transport: Transport, dependencies: ServerDependencies) -> None:
    """Serves until stdin ends, the editor is gone, or a signal asks to stop; then closes everything, within bounds.

    Sessions are tasks of the task group here, not of the requests that open them.
    """
    connection = ClientConnection(transport)
    loop = asyncio.get_running_loop()
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            with suppress(NotImplementedError):  # event loops on Windows take no signal handlers
                loop.add_signal_handler(getattr(signal, name), connection.stop)
    async with anyio.create_task_group() as tasks:
        agent = AcpAgent(dependencies, connection, tasks)
        tasks.start_soon(agent.idle.run)
        tasks.start_soon(agent.warm_when_quiet)
        try:
            await connection.run(agent.handle)
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await agent.close()
            tasks.cancel_scope.cancel()
    await connection.end()

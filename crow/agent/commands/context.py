"""Commands about what the model sees."""

from __future__ import annotations

from collections.abc import Mapping

from crow.agent.commands.desk import Desk, Handler
from crow.agent.compaction.breakdown import breakdown, picture

__all__ = ["CONTEXT_COMMANDS"]


async def compact(desk: Desk, argument: str) -> str:
    return await (await desk.compactor()).on_command(argument)


async def context(desk: Desk, _: str) -> str:
    compactor = await desk.compactor()
    gauge = compactor.gauge
    used = gauge.used()
    await gauge.tell()
    return picture(gauge.info.name, breakdown(desk.branch.projection, used), used, gauge.limits())


CONTEXT_COMMANDS: Mapping[str, Handler] = {"compact": compact, "context": context}

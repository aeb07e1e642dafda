"""Commands about what the model sees."""

from __future__ import annotations

from crow.agent.commands.desk import CommandSpec, Desk
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


CONTEXT_COMMANDS = (
    CommandSpec(
        name="compact",
        description="Replace older messages by a summary to make room; nothing is deleted",
        hint='what the summary should keep in particular, or "undo"',
        run=compact,
    ),
    CommandSpec(name="context", description="Show what fills the context window", run=context),
)

"""Commands about what the model sees."""

from __future__ import annotations

from crow.agent.commands.desk import CommandSpec, Desk

__all__ = ["CONTEXT_COMMANDS"]


async def compact(desk: Desk, argument: str) -> str:
    compactor = await desk.compactor()
    answer = await compactor.on_command(argument)
    await compactor.tell()
    return answer


CONTEXT_COMMANDS = (
    CommandSpec(
        name="compact",
        description="Replace older messages by a summary to make room; nothing is deleted",
        hint="what the summary should keep in particular",
        run=compact,
    ),
)

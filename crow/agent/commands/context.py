"""Commands about what the model sees."""

from __future__ import annotations

from collections.abc import Mapping

from crow.agent.commands.desk import Desk, Handler
from crow.agent.compaction.breakdown import breakdown, picture
from crow.domain.errors import ArgumentError

__all__ = ["CONTEXT_COMMANDS"]


async def compact(desk: Desk, argument: str) -> str:
    return await (await desk.compactor()).on_command(argument)


async def context(desk: Desk, argument: str) -> str:
    compactor = await desk.compactor()
    gauge = compactor.gauge
    if argument.strip() == "forget":
        learned = await gauge.forget_window()
        await gauge.tell()
        if learned is None:
            return f"Nothing was learned of the context window of {gauge.info.name}. {gauge.window_words()}"
        return f"Forgotten: {learned.tokens:,} tokens, learned on {learned.learned_on}. {gauge.window_words()}"
    if argument.strip():
        raise ArgumentError(f'/context takes nothing or "forget"; you typed "{argument.strip()}".')
    used = gauge.used()
    await gauge.tell()
    shown = picture(gauge.info.name, breakdown(desk.branch.projection, used), used, gauge.limits())
    return f"{shown}\n\n{gauge.window_words()}"


CONTEXT_COMMANDS: Mapping[str, Handler] = {"compact": compact, "context": context}

"""Commands that choose: the model and the permission mode, as the editor's selectors do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crow.agent.commands.desk import Desk, Handler
from crow.agent.modes import MODES
from crow.domain.errors import ArgumentError

__all__ = ["CHOOSING_COMMANDS"]

SHOWN = 40


async def model(desk: Desk, argument: str) -> str:
    now = desk.branch.row.model
    offered = tuple(dict.fromkeys(name for name in (*desk.models, now) if name))
    if not argument:
        return f"The model is `{now or 'not set'}`. {_choices(offered)}"
    name = _chosen("model", argument, offered) if offered else argument  # the endpoint knows whether it has it
    await desk.set_model(name)
    return f"The model is `{name}` from the next prompt on."


async def mode(desk: Desk, argument: str) -> str:
    if not argument:
        return f"The mode is `{desk.branch.row.mode}`. {_choices(MODES)}"
    name = _chosen("mode", argument, MODES)
    await desk.set_mode(name)
    return f"The mode is `{name}`."


def _chosen(what: str, argument: str, offered: Sequence[str]) -> str:
    """The one that is named, or the only one that begins so."""
    if argument in offered:
        return argument
    near = [name for name in offered if name.lower().startswith(argument.lower())]
    if len(near) == 1:
        return near[0]
    raise ArgumentError(f"No {what} `{argument}`. {_choices(near or offered)}")


def _choices(names: Sequence[str]) -> str:
    if not names:
        return "None is configured; set CROW_MODEL, or run `crow login`."
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"Choose one of {', '.join(f'`{name}`' for name in names[:SHOWN])}{more}."


CHOOSING_COMMANDS: Mapping[str, Handler] = {"model": model, "mode": mode}

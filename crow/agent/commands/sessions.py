"""Commands about sessions as a whole: forks and titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crow.agent import new_session_id
from crow.agent.commands import CommandContext, Handler
from crow.agent.commands.branches import BranchTarget, place_named, quoted
from crow.agent.permissions import MODES
from crow.domain.errors import ArgumentError
from crow.domain.events import TitleChanged
from crow.store import SessionChanges

__all__ = ["CHOOSING_COMMANDS", "NAMING_COMMANDS"]

TITLE_CHARS = 200


async def fork(desk: CommandContext, argument: str) -> str:
    row = desk.branch.row
    place = await place_named(desk, argument) if argument else BranchTarget(entry=desk.branch.leaf, words="here")
    if place.entry is None:
        raise ArgumentError("There is nothing before that to fork. A new session begins empty.")
    made = await desk.store.fork_session(
        row.id, new_session_id(), entry=place.entry, cwd=row.cwd, additional_directories=row.additional_directories
    )
    titled = f", {quoted(made.title)}" if made.title else ""
    return f"Forked {place.words}: `{made.id}`{titled}. Open it from the list of sessions; this one stays as it is."


async def title(desk: CommandContext, argument: str) -> str:
    wanted = " ".join(argument.split())
    if not wanted:
        now = desk.branch.row.title
        return f"The title is {quoted(now)}. `/title WORDS` changes it." if now else "There is no title yet."
    if len(wanted) > TITLE_CHARS:
        raise ArgumentError(f"That title has {len(wanted)} characters; expected at most {TITLE_CHARS}.")
    await desk.branch.change(SessionChanges(title=wanted, title_by_user=True))
    await desk.branch.publish(TitleChanged(title=wanted))
    return f"The title is {quoted(wanted)} now."


NAMING_COMMANDS: Mapping[str, Handler] = {"fork": fork, "title": title}


# FROM agent.commands.choosing: Commands that choose: the model and the permission mode, as the editor's selectors do.


SHOWN = 40


async def model(desk: CommandContext, argument: str) -> str:
    now = desk.branch.row.model
    offered = tuple(dict.fromkeys(name for name in (*desk.models, now) if name))
    if not argument:
        return f"The model is `{now or 'not set'}`. {_choices(offered)}"
    name = _chosen("model", argument, offered) if offered else argument  # the endpoint knows whether it has it
    await desk.set_model(name)
    return f"The model is `{name}` from the next prompt on."


async def mode(desk: CommandContext, argument: str) -> str:
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

"""Commands about sessions as a whole: forks and titles."""

from __future__ import annotations

from collections.abc import Mapping

from crow.agent import new_session_id
from crow.agent.commands.desk import Desk, Handler
from crow.agent.commands.places import Place, place_named, quoted
from crow.domain.errors import ArgumentError
from crow.domain.events import TitleChanged
from crow.store import SessionChanges

__all__ = ["NAMING_COMMANDS"]

TITLE_CHARS = 200


async def fork(desk: Desk, argument: str) -> str:
    row = desk.branch.row
    place = await place_named(desk, argument) if argument else Place(entry=desk.branch.leaf, words="here")
    if place.entry is None:
        raise ArgumentError("There is nothing before that to fork. A new session begins empty.")
    made = await desk.store.fork_session(
        row.id, new_session_id(), entry=place.entry, cwd=row.cwd, additional_directories=row.additional_directories
    )
    titled = f", {quoted(made.title)}" if made.title else ""
    return f"Forked {place.words}: `{made.id}`{titled}. Open it from the list of sessions; this one stays as it is."


async def title(desk: Desk, argument: str) -> str:
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

"""Commands that look: through every session, at what was used, and out to a file."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from crow.agent.commands.desk import Desk, Handler
from crow.agent.commands.places import quoted
from crow.agent.commands.transcript import transcript
from crow.domain.errors import ArgumentError

__all__ = ["LOOKING_COMMANDS"]

MOST_HITS = 20


async def search(desk: Desk, argument: str) -> str:
    if not argument:
        raise ArgumentError("Say what to look for, such as `/search broken pipe`; all sessions are searched.")
    hits = await desk.store.search(argument, limit=MOST_HITS)
    if not hits:
        return f"Nothing in any session matches “{argument}”."
    lines = []
    for hit in hits:
        place = "this session" if hit.session == desk.branch.row.id else f"session `{hit.session}`"
        when = datetime.datetime.fromtimestamp(hit.created_ms / 1000, datetime.UTC).astimezone()
        snippet = " ".join(hit.snippet.split())
        lines.append(f"- {snippet} ({hit.kind}, entry {hit.entry} in {place}, {when:%Y-%m-%d %H:%M})")
    return "\n".join(lines)


async def usage(desk: Desk, argument: str) -> str:
    if argument:
        raise ArgumentError("`/usage` takes no argument.")
    row = await desk.store.session(desk.branch.row.id)  # the branch's own row is as old as the last change of it
    messages = (await desk.store.count_messages((row.id,)))[row.id]
    read = f"{row.tokens_in:,} tokens read"
    cached = f" ({row.tokens_cached:,} of them from the provider's cache)" if row.tokens_cached else ""
    cost = f", {row.cost:.4f} US dollars" if row.cost else ""
    said = f"{messages:,} message{'s' * (messages != 1)}"
    return f"This session so far: {read}{cached}, {row.tokens_out:,} written{cost}, {said}."


async def export(desk: Desk, argument: str) -> str:
    name = argument or f"{desk.branch.row.id}.md"
    path = desk.workspace.resolve(name)
    if not desk.workspace.contains(path):
        raise ArgumentError(f"{path} is outside the workspace; name a file inside {desk.workspace.cwd}.")
    try:
        found = await desk.workspace.stat(path)
    except OSError as error:
        raise unwritable(path, error) from error
    if found.kind != "missing":
        raise ArgumentError(f"{path} exists already; name another file, such as `/export notes/session.md`.")
    pieces = []
    async for batch in desk.store.history(desk.branch.row.id):
        pieces += [transcript(entry) for entry in batch]
    title = desk.branch.row.title or desk.branch.row.id
    text = "\n\n".join([f"# {title}", *filter(None, pieces)]) + "\n"
    try:
        await desk.workspace.write_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from error
    return f"Written to {path}."


def unwritable(path: Path, error: OSError) -> ArgumentError:
    """The error for a file that cannot be written."""
    return ArgumentError(f"{quoted(str(path))} could not be written: {error.strerror or error}")


LOOKING_COMMANDS: Mapping[str, Handler] = {"search": search, "usage": usage, "export": export}

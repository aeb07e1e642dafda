"""Commands about what the model sees."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from crow.agent.commands import CommandContext, Handler
from crow.agent.commands.branches import quoted
from crow.agent.compaction.budget import breakdown, picture
from crow.domain.entries import Assistant, Command, Entry, Remark, ToolResult, User
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, Link, Part, Resource, Text
from crow.tools import ServerStatus

__all__ = ["CONTEXT_COMMANDS", "LOOKING_COMMANDS", "TOOL_COMMANDS", "transcript"]


async def compact(desk: CommandContext, argument: str) -> str:
    return await (await desk.compactor()).on_command(argument)


async def context(desk: CommandContext, argument: str) -> str:
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


# FROM agent.commands.looking: Commands that look: through every session, at what was used, and out to a file.


MOST_HITS = 20


async def search(desk: CommandContext, argument: str) -> str:
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


async def usage(desk: CommandContext, argument: str) -> str:
    if argument:
        raise ArgumentError("`/usage` takes no argument.")
    row = await desk.store.session(desk.branch.row.id)  # the branch's own row is as old as the last change of it
    messages = (await desk.store.count_messages((row.id,)))[row.id]
    read = f"{row.tokens_in:,} tokens read"
    cached = f" ({row.tokens_cached:,} of them from the provider's cache)" if row.tokens_cached else ""
    cost = f", {row.cost:.4f} US dollars" if row.cost else ""
    said = f"{messages:,} message{'s' * (messages != 1)}"
    return f"This session so far: {read}{cached}, {row.tokens_out:,} written{cost}, {said}."


async def export(desk: CommandContext, argument: str) -> str:
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


# FROM agent.commands.tools: Commands about the tools of the session.


async def mcp(desk: CommandContext, argument: str) -> str:
    toolbox = await desk.toolbox()
    servers = toolbox.servers()
    if not servers:
        return "This session has no MCP servers. The editor can give some, or `[mcp_servers.NAME]` in config.toml."
    verb, _, name = argument.partition(" ")
    name = name.strip()
    if verb == "restart":
        names = [server.name for server in servers]
        if name and name not in names:
            raise ArgumentError(f"There is no MCP server {name}. There are: {', '.join(names)}.")
        started = await toolbox.restart(name or None)
        done = f"Started again: {', '.join(started)}.\n\n" if started else "All MCP servers are ready already.\n\n"
        return done + listing(toolbox.servers())
    if argument:
        raise ArgumentError(f"/mcp does not know {argument}. Type /mcp, /mcp restart, or /mcp restart NAME.")
    return listing(servers)


def listing(servers: tuple[ServerStatus, ...]) -> str:
    """The servers and how they are, in Markdown."""
    return "\n".join(f"- **{server.name}**: {state_of(server)}" for server in servers)


def state_of(server: ServerStatus) -> str:
    if server.state == "ready":
        return f"ready, {server.tools} tool{'s' * (server.tools != 1)}"
    if not server.detail:
        return server.state
    return f"failed: {server.detail}" if server.state == "failed" else f"starting again, having failed: {server.detail}"


TOOL_COMMANDS: Mapping[str, Handler] = {"mcp": mcp}


# FROM agent.commands.transcript: A session as a document: what was said and done, one piece of Markdown for each
# entry. Pure.


RESULT_CHARS = 2_000


def transcript(entry: Entry) -> str:
    """What `entry` adds to the document; empty for what no reader asks about."""
    match entry.body:
        case User(parts=parts):
            return "## You\n\n" + "\n\n".join(_part(part) for part in parts)
        case Assistant(text=text):
            return f"## Crow\n\n{text.strip()}" if text.strip() else ""
        case ToolResult() as result:
            title = " ".join((result.announcement.title or result.name).split())
            failed = " (failed)" if result.is_error else ""
            return f"### {title}{failed}\n\n{_indented(result.text)}"
        case Remark(text=text):
            return f"> {text}"
        case Command(text=text, answer=answer):
            return f"## You\n\n`{text}`\n\n{answer}"
        case _:
            return ""


def _part(part: Part) -> str:
    match part:
        case Text(text=text):
            return text
        case Image(mime_type=mime_type):
            return f"(an image: {mime_type})"
        case Resource(uri=uri, text=text):
            return f"{uri}\n\n{_indented(text)}"
        case Link(uri=uri, name=name):
            return f"[{name}]({uri})"


def _indented(text: str) -> str:
    """A code block that no text can end."""
    cut = (
        text
        if len(text) <= RESULT_CHARS
        else f"{text[:RESULT_CHARS]}\n(… {len(text) - RESULT_CHARS:,} characters more)"
    )
    return "\n".join(f"    {line}" for line in cut.splitlines())

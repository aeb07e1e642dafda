"""Commands that show or free context, list servers, search, count and export."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Literal, TypeAlias

from crow.agent.commands import CommandContext, quoted
from crow.agent.compaction.budget import Limits
from crow.domain.conversation import Projection
from crow.domain.errors import ArgumentError
from crow.domain.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from crow.store.transcript import Transcript
from crow.tools import ServerStatus

Kind: TypeAlias = Literal["system", "tools", "summary", "user", "assistant", "tool output"]
KINDS: tuple[Kind, ...] = ("system", "tools", "summary", "user", "assistant", "tool output")
KIND_OF: Mapping[type[Message], Kind] = {
    SystemMessage: "system",
    UserMessage: "user",
    AssistantMessage: "assistant",
    ToolMessage: "tool output",
}

CELLS = 40
FULL, HALF, EMPTY, MARK = "█", "▌", "░", "│"
MAX_HITS = 20


async def compact(context: CommandContext, argument: str) -> str:
    return await (await context.compactor()).on_command(argument)


async def show_context(context: CommandContext, argument: str) -> str:
    gauge = (await context.compactor()).gauge
    if argument == "forget":
        learned = await gauge.context_window.forget(gauge.info)
        done = f"Crow has learned nothing about the context window of {gauge.info.name}."
        if learned is not None:
            done = f"Dropped the window of {learned.tokens:,} tokens that crow learned on {learned.learned_on}."
    else:
        used = gauge.used()
        done = picture(gauge.info.name, breakdown(context.branch.projection, used), used, gauge.limits()) + "\n"
    await gauge.tell()
    return f"{done}\n{gauge.context_window.describe(gauge.info)}"


def breakdown(projection: Projection, used: int) -> Mapping[Kind, int]:
    """Tokens of each kind. The estimates are scaled so that they add up to `used`, the measured size."""
    context = projection.context()
    summary = 0 if projection.checkpoint is None else projection.checkpoint.id
    estimates: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    estimates["tools"] = context.tools_estimate
    for message, origin, estimate in zip(context.messages, context.origins, context.estimates, strict=True):
        estimates["summary" if summary and origin == summary else KIND_OF[type(message)]] += estimate
    whole = max(1, sum(estimates.values()))
    return {kind: round(estimate * used / whole) for kind, estimate in estimates.items()}


def picture(model: str, tokens: Mapping[Kind, int], used: int, limits: Limits) -> str:
    """A bar for the whole window and one for each kind, in Markdown. A mark shows where compaction starts."""
    window = max(1, limits.window)
    free = max(0, limits.threshold - used)
    rows = [(bar(used, window, limits.threshold), used, "all of it")]
    rows += [(bar(tokens[kind], window), tokens[kind], kind) for kind in KINDS]
    rows += [(" " * CELLS, free, f"free until compaction (at {MARK})")]
    lines = [f"{cells}  {count:>9,}  {round(100 * count / window):>3} %  {name}" for cells, count, name in rows]
    head = f"Context of {model}: about {used:,} of {limits.window:,} tokens."
    return "\n".join([head, "", "```text", *lines, "```"])


def bar(tokens: int, window: int, mark: int | None = None) -> str:
    """Draw the window as `CELLS` characters, partly filled by `tokens`. A sign shows where `mark` tokens would end."""
    halves = min(2 * CELLS, -(-2 * CELLS * tokens // window)) if tokens > 0 else 0
    cells = list((FULL * (halves // 2) + HALF * (halves % 2)).ljust(CELLS, EMPTY))
    if mark is not None:
        cells[min(CELLS - 1, CELLS * mark // window)] = MARK
    return "".join(cells)


async def mcp(context: CommandContext, argument: str) -> str:
    toolbox = await context.toolbox()
    servers = toolbox.servers()
    if not servers:
        return "This session has no MCP servers. Add one in the editor, or as `[mcp_servers.NAME]` in config.toml."
    verb, _, name = argument.partition(" ")
    name, done = name.strip(), ""
    if verb == "restart":
        names = [server.name for server in servers]
        if name and name not in names:
            raise ArgumentError(f"There is no MCP server {name}; there are {', '.join(names)}.")
        started = await toolbox.restart(name or None)
        done = f"Restarted: {', '.join(started)}.\n\n" if started else "All MCP servers are ready already.\n\n"
    elif argument:
        raise ArgumentError(f"`/mcp {argument}`: expected nothing, `restart`, or `restart NAME`.")
    return done + "\n".join(f"- **{server.name}**: {state_of(server)}" for server in toolbox.servers())


def state_of(server: ServerStatus) -> str:
    if server.state == "ready":
        return f"ready, {server.tools} tool{'s' * (server.tools != 1)}"
    if not server.detail:
        return server.state
    return f"failed: {server.detail}" if server.state == "failed" else f"restarting after a failure: {server.detail}"


async def search(context: CommandContext, argument: str) -> str:
    if not argument:
        raise ArgumentError("`/search` needs words, such as `/search broken pipe`. It searches all sessions.")
    lines = []
    for hit in await context.store.search(argument, limit=MAX_HITS):
        place = "this session" if hit.session == context.branch.row.id else f"session `{hit.session}`"
        when = datetime.datetime.fromtimestamp(hit.created_ms / 1000, datetime.UTC).astimezone()
        snippet = " ".join(hit.snippet.split())
        lines.append(f"- {snippet} ({hit.kind}, entry {hit.entry} in {place}, {when:%Y-%m-%d %H:%M})")
    return "\n".join(lines) or f"No matches for “{argument}” in any session."


async def usage(context: CommandContext, _: str) -> str:
    row = await context.store.session(context.branch.row.id)  # the branch's row may be outdated
    messages = (await context.store.count_messages((row.id,)))[row.id]
    cached = f" ({row.tokens_cached:,} of them from the provider's cache)" if row.tokens_cached else ""
    cost = f", {row.cost:.4f} US dollars" if row.cost else ""
    count = f"{messages:,} message{'s' * (messages != 1)}"
    return f"This session used {row.tokens_in:,} input tokens{cached}, {row.tokens_out:,} output tokens{cost}; {count}."


async def export(context: CommandContext, argument: str) -> str:
    """Write the session to a new file in the workspace, as Markdown."""
    path = context.workspace.resolve(argument or f"{context.branch.row.id}.md")
    if not context.workspace.contains(path):
        raise ArgumentError(f"{path} is outside the workspace; name a file inside {context.workspace.cwd}.")
    try:
        if (await context.workspace.stat(path)).kind != "missing":
            raise ArgumentError(f"{path} exists already; name another file, such as `/export notes/session.md`.")
        transcript = Transcript(is_full=False)
        sections = [transcript.head(context.branch.row)]
        async for batch in context.store.history(context.branch.row.id):
            sections += map(transcript.feed, batch)
        await context.workspace.write_text(path, "".join(sections))
    except OSError as error:
        raise ArgumentError(f"{quoted(str(path))} could not be written: {error.strerror or error}") from error
    return f"Written to {path}."


HANDLERS = (compact, mcp, search, usage, export)

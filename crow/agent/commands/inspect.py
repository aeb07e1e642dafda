"""Commands that show or free context, show changes, list servers, search, count and export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from crow.agent.commands.context import CommandContext
from crow.agent.compaction.budget import Limits
from crow.agent.history.restore import holds_change_sets, names_of
from crow.agent.history.rewind import (
    ABSENT,
    content_of,
    digest,
    digests_after,
    group_by_path,
    is_changed_between,
    name_in,
)
from crow.agent.instructions import describe_sources
from crow.domain.conversation import Projection
from crow.domain.diff import DiffLine, diff_lines, diff_text
from crow.domain.entries import (
    CallRef,
    Entry,
    File,
    ToolResult,
)
from crow.domain.errors import ArgumentError
from crow.domain.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from crow.domain.rendering import code
from crow.domain.spending import is_break, reason_of_break
from crow.domain.text import plural, quote, safe
from crow.llm import WIRE_TITLES
from crow.store import Move, UsageTotal, hits_by_session
from crow.store.spending import session_spending
from crow.store.transcript import Transcript, fenced, local_time
from crow.tools import AgentKind, ServerStatus, Workspace

Kind: TypeAlias = Literal["system", "tools", "summary", "user", "assistant", "tool output"]
_KINDS: tuple[Kind, ...] = ("system", "tools", "summary", "user", "assistant", "tool output")
_KIND_OF: Mapping[type[Message], Kind] = {
    SystemMessage: "system",
    UserMessage: "user",
    AssistantMessage: "assistant",
    ToolMessage: "tool output",
}

_CELLS = 30
_FULL, _HALF, _EMPTY, _MARK = "█", "▌", "░", "│"
_MAX_HITS = 20
_SHOWN_CHARS = 400_000
"""`/show` shows at most this many characters of an output or a diff."""

_DIFF_LINES = 1_500
_FILE_DIFF_LINES = 500
_DIFF_LINE_CHARS = 500


async def compact(context: CommandContext, argument: str) -> str:
    return await (await context.compactor()).on_command(argument)


async def show_context(context: CommandContext, argument: str) -> str:
    gauge = (await context.compactor()).gauge
    facts = await gauge.context_window.facts(gauge.info)
    if argument == "forget":
        learned = await gauge.context_window.forget(gauge.info)
        done = f"Crow has learned nothing about the context window of {gauge.info.name}."
        if learned is not None:
            done = f"Dropped the window of {learned.tokens:,} tokens that crow learned on {learned.learned_on}."
        if facts:
            done += f" Dropped what it learned about {', '.join(fact.about for fact in facts)}."
            facts = ()
    else:
        used = gauge.used()
        moves = await context.store.moves(context.branch.row.id)
        done = picture(gauge.info.name, breakdown(context.branch.projection, used), used, gauge.limits()) + "\n"
        done += f"\n{describe_sources(context.instructions())}\n"
        if kinds := _describe_agents((await context.toolbox()).agents(), context.models):
            done += f"\n{kinds}\n"
        done += f"\n{last_break(context.branch.entries, moves)}\n"
    await gauge.tell()
    learned_facts = "".join(f"\n- {fact.about}: {safe(fact.words)}" for fact in facts)
    head = f"\n\nCrow also learned this about the endpoint:\n{learned_facts}" if facts else ""
    api = f"\nAPI: {WIRE_TITLES[gauge.info.wire]}.\n" if " " in gauge.info.endpoint else ""
    return f"{done}{api}\n{gauge.context_window.describe(gauge.info)}{head}"


def _describe_agents(kinds: Sequence[AgentKind], models: Iterable[str]) -> str:
    """Return the paragraph of `/context` about kinds of subagents, as Markdown. Return an empty string if there are no
    kinds."""
    lines = []
    for kind in kinds:
        line = f"- {code(kind.name)} ({code(kind.source)})"
        if kind.problem:
            line += f": not offered, because {kind.problem}"
        elif kind.model and kind.model not in models:
            line += f": it uses the session's model, because {code(kind.model)} is not among the models to choose from"
        elif kind.model:
            line += f": model {code(kind.model)}"
        lines.append(line)
    return "\n".join(["Kinds of subagents that the model can give tasks to:", "", *lines]) if lines else ""


def last_break(entries: Sequence[Entry], moves: Sequence[Move]) -> str:
    """Explain the last cache break: say when and why a request did not begin with the whole previous request. `moves`
    are sorted newest first."""
    newest = next((entry for entry in reversed(entries) if is_break(entry.body)), None)
    move = moves[0] if moves else None
    if newest is not None and (move is None or move.to_leaf is None or newest.id > move.to_leaf):
        reason, where, created_ms = reason_of_break(newest.body), f"entry {newest.id}, ", newest.created_ms
    elif move is not None:
        reason, where, created_ms = f"the session moved to another entry ({move.reason})", "", move.created_ms
    else:
        return "No request has been sent yet."
    when = local_time(created_ms)
    return (
        f"Last cache break: {reason} ({where}{when:%Y-%m-%d %H:%M}). Since then, each request begins with the "
        "whole previous request, so the endpoint can reuse what it has cached."
    )


def breakdown(projection: Projection, used: int) -> Mapping[Kind, int]:
    """Return the tokens that each kind of content takes. The tokens are estimates, scaled so that their sum is `used`,
    the measured size."""
    context = projection.context()
    summary = 0 if projection.checkpoint is None else projection.checkpoint.id
    estimates: dict[Kind, int] = dict.fromkeys(_KINDS, 0)
    estimates["tools"] = context.tools_estimate
    for message, origin, estimate in zip(context.messages, context.origins, context.estimates, strict=True):
        estimates["summary" if summary and origin == summary else _KIND_OF[type(message)]] += estimate
    whole = max(1, sum(estimates.values()))
    return {kind: round(estimate * used / whole) for kind, estimate in estimates.items()}


def picture(model: str, tokens: Mapping[Kind, int], used: int, limits: Limits) -> str:
    """Draw a bar for the whole window and one for each kind of content, in Markdown. A mark shows where compaction
    starts."""
    window = max(1, limits.window)
    free = max(0, limits.threshold - used)
    rows = [(_bar(used, window, limits.threshold), used, "all of it")]
    rows += [(_bar(tokens[kind], window), tokens[kind], kind) for kind in _KINDS]
    rows += [(" " * _CELLS, free, f"free until compaction (at {_MARK})")]
    lines = [f"{cells}  {count:>9,}  {round(100 * count / window):>3} %  {name}" for cells, count, name in rows]
    head = f"Context of {model}: about {used:,} of {limits.window:,} tokens."
    return "\n".join([head, "", "```text", *lines, "```"])


def _bar(tokens: int, window: int, mark: int | None = None) -> str:
    """Draw the window as `_CELLS` characters. The part of it that `tokens` take is filled. If `mark` is given, a sign
    shows how far `mark` tokens would reach."""
    halves = min(2 * _CELLS, -(-2 * _CELLS * tokens // window)) if tokens > 0 else 0
    cells = list((_FULL * (halves // 2) + _HALF * (halves % 2)).ljust(_CELLS, _EMPTY))
    if mark is not None:
        cells[min(_CELLS - 1, _CELLS * mark // window)] = _MARK
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
            raise ArgumentError(f"There is no MCP server {name}; the servers are {', '.join(names)}.")
        started = await toolbox.restart(name or None)
        done = f"Restarted: {', '.join(started)}.\n\n" if started else "All MCP servers are ready already.\n\n"
    elif argument:
        raise ArgumentError(f"`/mcp {argument}`: expected no argument, `restart`, or `restart NAME`.")
    return done + "\n".join(f"- **{server.name}**: {_state_of(server)}" for server in toolbox.servers())


def _state_of(server: ServerStatus) -> str:
    if server.state == "ready":
        counts = [plural(server.tools, "tool")]
        if server.resources:
            counts.append(plural(server.resources, "resource"))
        return ", ".join(["ready", *counts])
    if not server.detail:
        return server.state
    return f"failed: {server.detail}" if server.state == "failed" else f"restarting after a failure: {server.detail}"


async def search(context: CommandContext, argument: str) -> str:
    if not argument:
        raise ArgumentError("`/search` needs words, such as `/search broken pipe`. It searches all sessions.")
    sections = []
    for session_id, hits in hits_by_session(await context.store.search(argument, limit=_MAX_HITS)).items():
        title = (await context.store.session(session_id)).title
        named = f"**{quote(safe(title))}** (`{session_id}`)" if title else f"`{session_id}`"
        lines = ["This session:" if session_id == context.branch.row.id else f"{named}:"]
        for hit in hits:
            when = local_time(hit.created_ms)
            snippet = " ".join(hit.snippet.split())
            lines.append(f"- {snippet} ({hit.kind}, entry {hit.entry}, {when:%Y-%m-%d %H:%M})")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) or f"No matches for “{argument}” in any session."


async def show(context: CommandContext, argument: str) -> str:
    """Show a whole result. This is useful because clients show only a part of a result if the result or the session is
    long."""
    call = CallRef.parse(argument.strip("`"))
    if call is None:
        raise ArgumentError(f"`/show {argument}`: expected the id of a call, such as `/show call_12_0`.")
    found = await context.store.result(context.branch.row.id, call)
    if found is None or not isinstance(found.body, ToolResult):
        raise ArgumentError(f"This session has no result of {call.call_id}.")
    result = found.body
    texts = [("diff", diff_text(one.old_text or "", one.new_text)) for one in result.announcement.diffs]
    texts.append(("", result.text))
    sections = [f"{result.announcement.title or code(result.name)} ({call.call_id}, entry {found.id})"]
    sections += [fenced(text[:_SHOWN_CHARS], language).rstrip() for language, text in texts if text.strip()]
    if len(sections) == 1:
        sections.append("It has no output.")
    if others := len(result.images) + len(result.attachments):
        sections.append(f"Images and files besides its text: {others}.")
    if any(len(text) > _SHOWN_CHARS for _, text in texts):
        command = f"crow sessions show {context.branch.row.id} --call {call.call_id}"
        sections.append(f"This is only the beginning. `{command}` prints all of the output.")
    return "\n\n".join(sections)


async def usage(context: CommandContext, _: str) -> str:
    session_id = context.branch.row.id
    messages = (await context.store.count_messages((session_id,)))[session_id]
    totals = await context.store.usage_by_model(session_id)
    lines = [f"This session used {_used(_sum_of(totals))}; {plural(messages, 'message')}."]
    if len(totals) > 1:
        lines += ["", *(f"- {total.model or 'unknown model'}: {_used(total)}" for total in totals)]
    if estimated := sum(total.estimated for total in totals):
        which = plural(estimated, "request")
        lines += ["", f"The tokens of {which} are estimated, because the endpoint did not report them."]
    if totals:
        lines += ["", (await session_spending(context.store, session_id)).text()]
    return "\n".join(lines)


def _sum_of(totals: Sequence[UsageTotal]) -> UsageTotal:
    """Add up the totals of several models."""
    costs = [total.cost for total in totals if total.cost is not None]
    return UsageTotal(
        requests=sum(total.requests for total in totals),
        tokens_in=sum(total.tokens_in for total in totals),
        tokens_out=sum(total.tokens_out for total in totals),
        tokens_cached=sum(total.tokens_cached for total in totals),
        tokens_reasoning=sum(total.tokens_reasoning for total in totals),
        tokens_cache_written=sum(total.tokens_cache_written for total in totals),
        estimated=sum(total.estimated for total in totals),
        cost=sum(costs) if costs else None,
    )


def _used(total: UsageTotal) -> str:
    """Return the tokens and the cost of a total in words."""
    cached = [f"{total.tokens_cached:,} from the provider's cache"] if total.tokens_cached else []
    cached += [f"{total.tokens_cache_written:,} written to it"] if total.tokens_cache_written else []
    thought = f" ({total.tokens_reasoning:,} for reasoning)" if total.tokens_reasoning else ""
    cost = f", {total.cost:.4f} US dollars" if total.cost else ""
    requests = plural(total.requests, "request")
    of_these = f" ({', '.join(cached)})" if cached else ""
    return (
        f"{total.tokens_in:,} input tokens{of_these}, {total.tokens_out:,} output tokens{thought} in {requests}{cost}"
    )


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
        raise ArgumentError(f"{quote(str(path))} could not be written: {error.strerror or error}") from error
    return f"Written to {path}."


async def diff(context: CommandContext, argument: str) -> str:
    """Show the changes that built-in tools made on this branch, and list the files that commands changed. The diffs
    come from file contents that crow stored."""
    changes = await context.store.file_changes(context.branch.leaf, None)
    by_commands = [entry for entry in changes if holds_change_sets([entry])]
    by_path, results = group_by_path([entry for entry in changes if not holds_change_sets([entry])])
    wanted = str(context.workspace.resolve(argument)) if argument else None
    if wanted is not None and wanted not in by_path:
        names = ", ".join(code(name_in(context.workspace, Path(path))) for path in list(by_path)[:_MAX_HITS])
        raise ArgumentError(f"This session did not change {code(argument)}. It changed {names or 'no file'}.")
    chosen = {path: files for path, files in by_path.items() if wanted in (None, path)}
    found = [await _changed_file(context.workspace, path, files, results) for path, files in chosen.items()]
    room, most, sections = _DIFF_LINES, _DIFF_LINES if argument else _FILE_DIFF_LINES, []
    for file in found:
        lines = [] if file.is_binary else diff_lines(file.before, file.after)
        sections.append(_describe_change(file, lines, min(room, most)))
        room -= min(room, most, len(lines))
    told = [f"This session changed {plural(len(found), 'file')} with its own tools.", *sections] if sections else []
    if not argument:
        told += await _changes_by_commands(context.workspace, by_commands)
    return (
        "\n\n".join(told)
        or "This session changed no files. Changes that commands make outside of a layer are not recorded."
    )


async def _changes_by_commands(workspace: Workspace, changes: Sequence[Entry]) -> list[str]:
    """Return one text that lists the files that each command changed, or nothing if no command changed files."""
    lines = []
    for entry in changes:
        assert isinstance(entry.body, File), "a command's changes are a file entry"
        names = [code(name_in(workspace, Path(name))) for name in await names_of(workspace, [entry])]
        some = ", ".join(names[:_MAX_HITS]) + (f" and {len(names) - _MAX_HITS} more" if len(names) > _MAX_HITS else "")
        lines.append(
            f"- {some or 'files whose names are not kept on this machine'}; `/show {entry.body.call.call_id}` shows how"
        )
    hidden = [f"- … and {len(lines) - _MAX_HITS} commands before"] if len(lines) > _MAX_HITS else []
    return ["\n".join(["Commands changed:", *hidden, *lines[-_MAX_HITS:]])] if lines else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangedFile:
    """A file that the session changed."""

    name: str
    before: str
    """Its content before the first change."""
    after: str
    """Its content after the last change."""
    notes: tuple[str, ...]
    """Facts that the diff cannot show, such as that somebody else has changed the file."""
    is_binary: bool = False


async def _changed_file(
    workspace: Workspace, path: str, changes: Sequence[File], results: Mapping[CallRef, ToolResult]
) -> _ChangedFile:
    last, notes = changes[-1], []
    before = changes[0].before
    shown = results[last.call].announcement.diffs if last.call in results else ()
    written = next((one.new_text.encode(errors="replace") for one in shown if one.path == path), None)
    after = None if last.after_hash == ABSENT else written
    is_known = last.after_hash == ABSENT or written is not None
    if not last.recorded_here:
        notes.append("changed before this session was imported; the file on this machine was not read")
    else:
        try:
            is_link = str(workspace.resolve(path)) != path
            now = None if is_link else await content_of(workspace, Path(path))
        except OSError as error:
            notes.append(f"cannot be read now ({error.strerror or error})")
        else:
            if is_link:
                notes.append("is now a link to another file")
            elif digest(now) in digests_after(last, results):
                after, is_known = now, True
            else:
                notes.append("deleted by someone else since" if now is None else "changed by someone else since")
    if is_changed_between(changes, results):
        notes.append("changed by someone else between two edits; the diff includes that change")
    if not is_known:
        notes.append("the contents that crow wrote are not stored as text")
        after = before
    if before is None:
        notes.insert(0, "new")
    if after is None:
        notes.insert(0, "deleted")
    name = name_in(workspace, Path(path))
    try:
        return _ChangedFile(
            name=name, before=(before or b"").decode(), after=(after or b"").decode(), notes=tuple(notes)
        )
    except UnicodeDecodeError:
        sizes = f"{len(before or b''):,} → {len(after or b''):,} bytes"
        return _ChangedFile(name=name, before="", after="", notes=(*notes, f"not text, {sizes}"), is_binary=True)


def _describe_change(file: _ChangedFile, lines: Sequence[DiffLine], room: int) -> str:
    """Return a heading and the diff. The diff has at most `room` lines."""
    added, removed = (sum(line.mark == mark for line in lines) for mark in "+-")
    notes = list(file.notes) if lines or file.is_binary else [*file.notes, "the same as before"]
    remark = f" ({'; '.join(notes)})" if notes else ""
    head = f"**{code(safe(file.name))}** +{added:,} −{removed:,}{remark}"
    shown = lines[:room]
    text = "\n".join((line.text if line.mark == "@" else line.mark + line.text)[:_DIFF_LINE_CHARS] for line in shown)
    more = len(lines) - len(shown)
    rest = f"\n\n{more:,} more lines are not shown; `/diff FILE` shows more of one file." if more else ""
    return f"{head}\n\n{fenced(safe(text), 'diff').rstrip()}{rest}" if shown else f"{head}{rest}"


HANDLERS = (compact, diff, mcp, search, show, usage, export)

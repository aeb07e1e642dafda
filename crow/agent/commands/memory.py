"""Commands that give the model text to keep: bring, remember."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from crow.agent import PermissionAnswer, PermissionQuestion, new_message_id
from crow.agent.commands.context import CommandContext
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.newest import said_in, with_newest
from crow.agent.compaction.summary import Summary, SummaryJob, summarise
from crow.agent.history.recall import as_data, describe_session
from crow.agent.history.rewind import content_of, digest, name_in
from crow.agent.history.usage import summary_stream
from crow.agent.instructions import (
    FILE_BYTES,
    INSTRUCTION_FILE,
    append_text,
    file_size,
    instruction_file,
    stays_in_folder,
)
from crow.agent.permissions.decisions import Refuse, decide
from crow.agent.permissions.rules import current_rules
from crow.agent.turns.prompt import without_tags
from crow.domain.conversation import Projection
from crow.domain.entries import (
    Announcement,
    CallRef,
    Diff,
    Entry,
    File,
    Location,
    NewEntry,
    Remark,
    Reminder,
    Restore,
    Started,
    StopReason,
    ToolResult,
)
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.domain.events import CallAnnounced, CallEnded
from crow.domain.messages import Message
from crow.domain.rendering import code
from crow.domain.text import on_one_line, quote
from crow.store import SessionRow
from crow.tools import PlannedCall, Touched

BROUGHT_TOKENS = 3_000
_SUMMARY_DEADLINE_S = 120.0
_NEWEST_SESSIONS = 500
_CANCEL_S = 2.0
_NOTE_CHARS = 2_000
_REMEMBER = "remember"
_TOO_LARGE = (
    f"{{name}} would be larger than {FILE_BYTES // 1024} KiB, the most that the model sees. Shorten the file first."
)
_REFUSALS: Mapping[PermissionAnswer, str] = {"cannot_ask": "crow could not ask you", "unanswered": "you did not answer"}
_INSTRUCTION = (
    "Summarise this conversation for another session of the same user, in at most {words} words: what the user wanted, "
    "what was done and how it was checked, what was decided and why, what is open, and names, paths, commands and "
    "numbers that will be needed again, copied exactly. Plain text or lists, no preamble."
)
_BROUGHT = (
    "<reminder>\nThe user brought a summary of another session into this one. What it says about files may be out of "
    'date. To read that session itself, call recall with session "{id}" and a wider scope.\n{summary}\n</reminder>'
)
_SHOWN = "Summary of {title} (`{id}`), as the model sees it{how}:\n\n{summary}"
_HOW = {
    "checkpoint": ", made from its last compaction and the messages after it",
    "fallback": ", made of crow's own notes because the model did not summarise",
}


async def bring(context: CommandContext, argument: str) -> str:
    """Put a summary of another session into this one. The command is stored before the summary is made."""
    row = await _find_session(context, argument)
    entries = (await context.store.tail(row.id)).entries
    projection = Projection(entries)
    if projection.checkpoint is None and not any(map(said_in, entries)):
        raise ArgumentError(f"The session {code(on_one_line(row.id))} has no messages.")

    async def follow_up(_: Entry) -> StopReason:
        await _store_summary(context, row, projection)
        return "end_turn"

    context.follow_up = follow_up
    return f"Bringing a summary of {_title_of(row)} into this session."


async def _find_session(context: CommandContext, name: str) -> SessionRow:
    """Find another session by its id or alias. If this fails, look among the newest sessions for the title `name`, or
    for an id that begins with `name`.

    :raises ArgumentError: no session matches, several match, or only this session matches.
    """
    name = name.strip()
    if not name:
        raise ArgumentError("`/bring` needs a session: its id, alias or title. `/search WORDS` finds sessions.")
    try:
        row = await context.store.session(name)
    except NoSuchSession:
        page = await context.store.sessions(limit=_NEWEST_SESSIONS)
        titled = [each for each in page.rows if (each.title or "").casefold() == name.casefold()]
        found = titled or [each for each in page.rows if each.id.startswith(name)]
        aliased = await context.store.session_by_alias(name)
        if aliased is None and len(found) != 1:
            several = ", ".join(code(on_one_line(each.id)) for each in found[:5])
            problem = f"Several sessions match {quote(name)}: {several}." if found else f"No session {quote(name)}."
            raise ArgumentError(f"{problem} `/search WORDS` finds sessions and shows their ids.") from None
        row = aliased or found[0]
    if row.id == context.branch.row.id:
        raise ArgumentError("That is this session. The model sees it already.")
    return row


async def _store_summary(context: CommandContext, row: SessionRow, projection: Projection) -> None:
    """Store a summary of the session `row`, for the model and for the user."""
    compactor = await context.compactor()
    info = compactor.model.info
    checkpoint = projection.checkpoint_body
    if checkpoint is not None and checkpoint.method != "unread":
        how = "checkpoint"
        text = with_newest(checkpoint.summary, projection.entries, _budget_of(compactor))
        summary = Summary(text=text, method="fallback")
    else:
        summary = await summarise(
            _summary_job(context, projection.context().messages, compactor, row.id), compactor.model
        )
        how = summary.method
    text, title = without_tags(summary.text), _title_of(row)
    reminder = _BROUGHT.format(
        id=without_tags(on_one_line(row.id)), summary=as_data(f"{without_tags(describe_session(row))}\n{text}")
    )
    shown = _SHOWN.format(title=title, id=on_one_line(row.id), how=_HOW.get(how, ""), summary=text)
    await context.branch.record(
        [
            NewEntry(body=Reminder(text=reminder), model=info.name),
            NewEntry(body=Remark(text=shown, message_id=new_message_id())),
        ]
    )


async def skills(context: CommandContext, argument: str) -> str:
    """List the loaded skills, or unload one."""
    branch = context.branch
    loaded = branch.projection.loaded_skills()
    verb, _, name = argument.partition(" ")
    name = name.strip()
    if not argument:
        lines = [f"- {code(on_one_line(each))} `#{entry}`" for each, entry in loaded.items()]
        lines += ["", "`/skills unload NAME` takes one out of the model's context."] if lines else []
        return "\n".join(lines) or "The model has loaded no skills."
    if verb != "unload" or not name:
        raise ArgumentError(f"`/skills {argument}`: expected no argument, or `unload` and the name of a skill.")
    if name not in loaded:
        names = ", ".join(code(on_one_line(each)) for each in loaded) or "none"
        raise ArgumentError(f"The model has loaded no skill {quote(name)}. Loaded: {names}.")
    await branch.record([NewEntry(body=Restore(entry=loaded[name], skill=name))])
    return f"Unloaded {code(on_one_line(name))}. The model no longer sees its text; it can load the skill again."


def _budget_of(compactor: Compactor) -> int:
    """Return the size limit of a summary of another session, in estimated tokens."""
    scale = compactor.gauge.measured().scale
    return min(BROUGHT_TOKENS, int(compactor.gauge.limits().summary / scale))


def _summary_job(
    context: CommandContext, messages: tuple[Message, ...], compactor: Compactor, session_id: str
) -> SummaryJob:
    scale = compactor.gauge.measured().scale
    return SummaryJob(
        messages=messages,
        limits=replace(compactor.gauge.limits(), summary=round(_budget_of(compactor) * scale)),
        scale=scale,
        deadline_s=_SUMMARY_DEADLINE_S,
        stream=partial(summary_stream, context.branch),
        instruction=_INSTRUCTION,
        cache_key=session_id,
        keeps_prefix=False,
    )


def _title_of(row: SessionRow) -> str:
    return quote(on_one_line(row.title)) if row.title else "an untitled session"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Addition:
    """A note to append to an instruction file."""

    path: Path
    name: str
    before: bytes | None
    """The content of the file, or None if there is no file."""
    added: bytes
    is_users: bool

    @property
    def after(self) -> bytes:
        return (self.before or b"") + self.added

    def diff(self) -> Diff:
        old = None if self.before is None else self.before.decode()
        return Diff(path=str(self.path), old_text=old, new_text=self.after.decode())


async def remember(context: CommandContext, argument: str) -> str:
    """Append a note to the directory's instruction file or, with `--user`, to the user's own instruction file. In every
    mode, crow shows the diff and asks the user first."""
    word, _, rest = argument.partition(" ")
    is_users = word == "--user"
    note = (rest if is_users else argument).strip()
    if not note or len(note) > _NOTE_CHARS:
        raise ArgumentError(
            f"`/remember` needs a text of at most {_NOTE_CHARS:,} characters, such as `/remember Run make check before "
            "each commit.` The text is added to AGENTS.md in this directory. `/remember --user TEXT` adds it to "
            "your own AGENTS.md, for all workspaces."
        )
    if is_users and context.workspace.is_bounded:
        raise ArgumentError(
            f"On this server, the {INSTRUCTION_FILE} for all workspaces belongs to the operator and applies to all "
            "users. `/remember TEXT` adds a note to this workspace."
        )
    try:
        addition = await (_addition_to_users if is_users else _addition_to_workspace)(context, note)
    except OSError as error:
        raise ArgumentError(
            f"{error.filename or INSTRUCTION_FILE} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError:
        raise ArgumentError(f"{INSTRUCTION_FILE} is not UTF-8 text, so crow does not change it.") from None

    async def follow_up(command: Entry) -> StopReason:
        return await _ask_and_append(context, addition, command)

    context.follow_up = follow_up
    return f"To remember this, crow adds it to {code(addition.name)}."


async def _addition_to_workspace(context: CommandContext, note: str) -> _Addition:
    """Prepare the addition to the directory's AGENTS.md. :raises ArgumentError: the mode or a rule forbids the change,
    the file is a link out of its directory, or the file is too large."""
    workspace, row = context.workspace, context.branch.row
    if row.mode == "plan":
        raise ArgumentError("Plan mode changes no files. Choose another mode first, such as `/mode ask`.")
    file, stays, size = await anyio.to_thread.run_sync(_find_file, workspace.cwd)
    path = workspace.resolve(str(file))
    name = name_in(workspace, path)
    if not stays:
        raise ArgumentError(
            f"{code(str(file))} is a link to {code(str(path))}, outside its directory. "
            "Crow does not write to such a file."
        )
    plan, rules = _plan_of(Announcement(title=""), (str(path), name)), current_rules(context.rules, row)
    if any(isinstance(decide(tool, plan, row.mode, rules), Refuse) for tool in ("write_file", "edit_file")):
        raise ArgumentError(f"A deny rule forbids changes to {code(name)}. `/permissions` lists the rules.")
    if size > FILE_BYTES:
        raise ArgumentError(_TOO_LARGE.format(name=code(name)))
    return _addition_to(path, name, await content_of(workspace, path), note, is_users=False)


def _find_file(cwd: Path) -> tuple[Path, bool, int]:
    """Find a directory's instruction file, which need not exist. Return three facts: the file's path, whether the file
    is inside the directory after links are resolved, and its size in bytes. This call blocks."""
    file = instruction_file(cwd) or cwd / INSTRUCTION_FILE
    return file, stays_in_folder(file), file_size(file)


async def _addition_to_users(context: CommandContext, note: str) -> _Addition:
    file = context.user_instructions
    if file is None:
        raise ArgumentError("There is no directory for your settings, so you have no AGENTS.md of your own.")

    def content() -> bytes | None:
        return file.read_bytes() if file.exists() else None

    return _addition_to(file, str(file), await anyio.to_thread.run_sync(content), note, is_users=True)


def _addition_to(path: Path, name: str, before: bytes | None, note: str, *, is_users: bool) -> _Addition:
    """Return the addition of `note` to a file. :raises ArgumentError: the file would become too large. :raises
    UnicodeDecodeError: the file is not text."""
    text = (before or b"").decode()
    end = "\r\n" if "\r\n" in text else "\n"
    item = "- " + f"{end}  ".join(line.rstrip() for line in note.splitlines()) + end
    start = end if text and not text.endswith("\n") else ""
    addition = _Addition(path=path, name=name, before=before, added=f"{start}{item}".encode(), is_users=is_users)
    if len(addition.after) > FILE_BYTES:
        raise ArgumentError(_TOO_LARGE.format(name=code(name)))
    return addition


def _plan_of(announcement: Announcement, names: tuple[str, ...]) -> PlannedCall:
    return PlannedCall(announcement=announcement, access="write", touched=Touched(is_protected=True, rule_paths=names))


async def _ask_and_append(context: CommandContext, addition: _Addition, command: Entry) -> StopReason:
    """Announce the change as a tool call that belongs to the entry `command`, ask the user, and write the file."""
    branch, call = context.branch, CallRef(assistant=command.id, index=0)
    announcement = Announcement(
        title=f"Remember in {addition.name}",
        kind="edit",
        locations=(Location(path=str(addition.path)),),
        diffs=(addition.diff(),),
    )
    arguments = json.dumps({"path": str(addition.path), "text": addition.added.decode()}, ensure_ascii=False)
    plan = _plan_of(announcement, (str(addition.path),))
    is_open = True
    try:
        await branch.publish(CallAnnounced(call=call, name=_REMEMBER, arguments=arguments, announcement=announcement))
        answer = await context.client.ask(
            PermissionQuestion(call=call, name=_REMEMBER, arguments=arguments, plan=plan, always="")
        )
        if answer == "cancelled":
            return "cancelled"
        if answer == "allow_once":
            fault = await _append(context, addition, call, announcement)
        else:
            fault = _REFUSALS.get(answer, "you did not allow it")
        if fault:
            announcement = replace(announcement, title=f"Not written: {addition.name}", diffs=())
        text = f"Not written to {addition.name}: {fault}." if fault else f"Added to {addition.name}."
        result = ToolResult(call=call, name=_REMEMBER, text=text, is_error=bool(fault), announcement=announcement)
        await branch.record([NewEntry(body=result)])
        is_open = False
        return "end_turn"
    finally:
        if is_open:
            with anyio.move_on_after(_CANCEL_S, shield=True):
                await branch.publish(CallEnded(call=call, text="Nothing was written."))


async def _append(context: CommandContext, addition: _Addition, call: CallRef, announcement: Announcement) -> str:
    """Write the file if its content has not changed since the diff was shown. Return what went wrong, or "" if nothing
    did."""
    await context.branch.record([NewEntry(body=Started(call=call, why="the user agreed", announcement=announcement))])
    try:
        if addition.is_users:
            await anyio.to_thread.run_sync(append_text, addition.path, addition.before, addition.added)
            return ""
        workspace, path = context.workspace, addition.path
        if workspace.resolve(str(path)) != path or await content_of(workspace, path) != addition.before:
            return "somebody changed the file just now"
        file = File(
            call=call,
            path=str(path),
            before=addition.before,
            after_hash=digest(addition.after),
            recorded_here=True,
        )
        await context.branch.record([NewEntry(body=file)])
        await workspace.write_text(path, addition.after.decode())
    except OSError as error:
        return error.strerror or str(error)
    return ""


HANDLERS = (bring, remember, skills)

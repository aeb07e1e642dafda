"""Builds the system message, and the reminders that report later changes.

The system message is stored as a `prompt` entry. Every request repeats it byte for byte until a new prompt entry is
written. Later changes are reported in reminders. Each subject (date, instructions, mode, servers, skills) has a tagged
section of its own. The tags let crow find the newest text of each subject again after a session is loaded.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio.to_thread

from crow.agent import new_remark
from crow.agent.history.branch import Branch
from crow.agent.instructions import Instructions, InstructionSource, anything, read_instructions
from crow.domain.entries import Entry, NewEntry, Note, Prompt, Reminder
from crow.domain.messages import ToolSpec
from crow.programs import SYSTEM_PROGRAMS
from crow.store import SessionRow
from crow.tools import ServerStatus, SkillInfo

_GIT_FILE_BYTES = 4_096
"""At most this many bytes of a file in `.git` are read."""
_GIT_HEAD = re.compile(r"ref: refs/heads/([^\s<>]{1,250})\s*|([0-9a-f]{40,64})\s*")
_SERVER_CHARS = 400
"""The model gets at most this many characters of a server's error message."""
_NAMES_SHOWN = 5
"""The user is told at most this many names of new, missing or changed tools."""
_SHELL = "bash" if SYSTEM_PROGRAMS.find("bash") else "sh"

_PROMPTS = Path(__file__).parent.with_name("prompts")
CODING, CHAT = ((_PROMPTS / name).read_text("utf-8").rstrip() for name in ("coding.md", "chat.md"))
"""The beginning of the system message, for sessions with tools and without. docs/prompts.md says why each sentence is
there."""

MODES = {
    "ask": "Mode ask: you may read freely; the user is asked before each change, command and external tool.",
    "accept-edits": "Mode accept-edits: edits in the workspace run without asking; commands and external tools ask.",
    "plan": "Mode plan: you may not change anything. Read, search, run commands with read access if they can be "
    "confined, and work out a plan with the user.",
    "auto": "Mode auto: edits and confined commands in the workspace run without asking, so be especially careful. The "
    "user is asked about commands with full access, fetch, external tools and other places.",
}

SECTIONS = ("date", "mode", "servers", "skills", "instructions")
"""The sections whose text may change during a session."""

_TAG = re.compile(rf"<(?=/?(?:reminder|environment|skill|{'|'.join(SECTIONS)})\b)", re.IGNORECASE)


def facts_now(
    mode: str, instructions: str, servers: Sequence[ServerStatus], skills: Sequence[SkillInfo] = ()
) -> dict[str, str]:
    """Return the current text of each section. A section with nothing to say is empty.

    `instructions` is the text of the instruction files.
    """
    failed = [f"{server.name}: {_one_line(server.detail)}" for server in servers if server.detail]
    again = [f"{server.name}: {_one_line(server.loss)}" for server in servers if server.losses and not server.detail]
    lines = [
        "These MCP servers are not available: " + "; ".join(failed) if failed else "",
        "These MCP servers stopped and were restarted, so their state is lost: " + "; ".join(again) if again else "",
    ]
    return {
        "date": datetime.datetime.now().astimezone().strftime("%A, %d %B %Y"),
        "mode": MODES.get(mode, mode),
        "servers": "\n".join(filter(None, lines)),
        "skills": "\n".join(f"- {skill.name}: {skill.description}" for skill in skills),
        "instructions": instructions,
    }


def _one_line(text: str) -> str:
    """Return a server's text, shortened to one line and escaped so that it cannot end its section of the prompt."""
    return " ".join(text.split()).replace("<", "‹").replace(">", "›")[:_SERVER_CHARS]


async def build_prompt(row: SessionRow, tools: Sequence[ToolSpec], facts: Mapping[str, str]) -> Prompt:
    """Return the prompt entry of a session. It does not contain the mode and the servers, because reminders report
    these."""
    lines = [
        f"Working directory: {row.cwd}",
        *(f"Additional directory: {directory}" for directory in row.additional_directories),
        f"Platform: {platform.system()} {platform.release()}; commands run in {_SHELL}",
        f"Git: {await anyio.to_thread.run_sync(_git_state, row.cwd)}",
        f"Model: {row.model}",
    ]
    sections = {"environment": "\n".join(lines)} | {name: facts[name] for name in ("date", "skills", "instructions")}
    role, extra = row.config.get("system_prompt"), row.config.get("system_prompt_append")
    blocks = [role if isinstance(role, str) else CODING if tools else CHAT]
    blocks += [_tagged(name, text) for name, text in sections.items() if text]
    blocks += [extra] if isinstance(extra, str) and extra else []
    return Prompt(system="\n\n".join(blocks), tools=tuple(tools), cwd=row.cwd, model=row.model, recorded_here=True)


def with_edit_tool(tools: Sequence[ToolSpec], edit_tool: str) -> tuple[ToolSpec, ...]:
    """Return the tools to offer. If both tools that edit files are there, only `edit_tool` is offered. The other one
    still works if the model calls it anyway."""
    both = {"edit_file", "apply_patch"}
    left_out = both - {edit_tool} if both <= {tool.name for tool in tools} else set()
    return tuple(tool for tool in tools if tool.name not in left_out)


def _has_client_text(prompt: Prompt, row: SessionRow) -> bool:
    """Return whether `prompt` contains exactly the client's texts that the session has now. If the client gave no text
    for the beginning, any beginning is accepted, because another version of crow may have written a different one."""
    role, extra = row.config.get("system_prompt"), row.config.get("system_prompt_append")
    end = f"\n\n{extra}" if isinstance(extra, str) and extra else ""
    ends = tuple(f"\n</{name}>{end}" for name in ("date", "skills", "instructions"))
    has_beginning = not isinstance(role, str) or prompt.system.startswith(f"{role}\n\n<environment>\n")
    return has_beginning and prompt.system.endswith(ends)


def reason_for_prompt(old: Prompt | None, row: SessionRow, tools: Sequence[ToolSpec]) -> str:
    """Return, in words for the user, why the prompt entry `old` is out of date. Return an empty string if it is up to
    date."""
    if old is None:
        return "the session began"
    if not old.recorded_here:
        return "the session was imported"
    reasons = []
    if old.cwd != row.cwd:
        reasons.append(f"the directory changed from {old.cwd} to {row.cwd}")
    if old.model != row.model:
        reasons.append(f"the model changed from {old.model} to {row.model}")
    if not _has_client_text(old, row):
        reasons.append("the client's system prompt changed")
    if old.tools != tuple(tools):
        before, now = {tool.name: tool for tool in old.tools}, {tool.name: tool for tool in tools}
        changed = [name for name, tool in now.items() if name in before and before[name] != tool]
        found = {
            "new": [name for name in now if name not in before],
            "gone": [name for name in before if name not in now],
            "changed": changed,
        }
        parts = [f"{what}: {_some_of(names)}" for what, names in found.items() if names] or ["in another order"]
        reasons.append(f"the tools changed ({'; '.join(parts)})")
    return ", and ".join(reasons)


def _some_of(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def facts_told(entries: Iterable[Entry]) -> dict[str, str]:
    """Return, by section name, the newest text that `entries` gave the model for each section."""
    told: dict[str, str] = {}
    for entry in entries:
        match entry.body:
            case Prompt(system=system):
                kept = {name: text for name, text in told.items() if name in ("mode", "servers")}
                told = kept | _sections_in(system, ("date", "skills", "instructions"))
            case Reminder(text=text):
                told |= _sections_in(text, SECTIONS)
            case _:
                pass
    return told


def changes(told: Mapping[str, str], facts: Mapping[str, str]) -> str | None:
    """Return the text of the reminder that is due, or None if the model already has every fact.

    If no mode was reported yet, the model is assumed to know the mode `ask`. A section that has become empty is
    reported as empty.
    """
    known = {"mode": MODES["ask"], **told}
    blocks = [
        _tagged(name, text or _empty_section(name)) for name, text in facts.items() if text != known.get(name, "")
    ]
    return "\n".join(blocks) or None


def _tagged(name: str, text: str) -> str:
    return f"<{name}>\n{text}\n</{name}>"


def _empty_section(name: str) -> str:
    return f"({name}: none any more)"


def without_tags(text: str) -> str:
    """Escape untrusted text, so that nothing in it looks like a reminder or a section of the system message."""
    return _TAG.sub("‹", text)


def _sections_in(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the texts of the sections in a system message or a reminder, by name. Sections that are not in `text` are
    absent."""
    found = {}
    for name in names:
        start = text.find(f"<{name}>\n")
        close = f"\n</{name}>"
        # Instruction files may contain closing tags. Their section comes last, so the last such tag is the real one.
        end = text.rfind(close) if name == "instructions" else text.find(close, start)
        if 0 <= start < end:
            told = text[start + len(name) + 3 : end]
            found[name] = "" if told == _empty_section(name) else told
    return found


def _git_state(cwd: str) -> str:
    """Return one line about the checkout that contains `cwd`, read from its files. Git itself is never run: a
    repository's configuration can make it run commands."""
    for directory in [Path(cwd), *Path(cwd).parents]:
        marker = directory / ".git"
        try:
            if not marker.is_dir():  # a worktree or submodule points to its real directory
                marker = directory / _read_git_file(marker).removeprefix("gitdir:").strip()
            head = _GIT_HEAD.fullmatch(_read_git_file(marker / "HEAD"))
        except (OSError, ValueError):
            continue
        if head is not None:
            state = f"branch {head[1]}" if head[1] else f"no branch, at commit {head[2][:12]}"
            return f"{state}, checked out in {directory}"
    return "not a repository"


def _read_git_file(path: Path) -> str:
    """Return the start of a text file. :raises OSError: it is not a regular file. :raises ValueError: it is not
    text."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read(_GIT_FILE_BYTES).decode("utf-8")


class Briefing:
    """Keeps the model of one branch informed about the date, the mode, the servers, the skills and the instructions.

    At the start of a turn, a new prompt entry is written if the directory, the model or the tools have changed. All
    other changes go into one reminder before the next request. `contains` and `user_file` are passed to
    `read_instructions`.
    """

    def __init__(
        self, branch: Branch, *, contains: Callable[[Path], bool] | None = None, user_file: Path | None = None
    ) -> None:
        self._branch = branch
        self._contains = contains
        self._user_file = user_file
        self._tools: tuple[ToolSpec, ...] = ()
        self._facts: dict[str, str] | None = None
        self._instructions = Instructions()
        self._may_read: Callable[[Path], bool] = anything
        self.look_back()

    def look_back(self) -> None:
        """Search the entries for what the model was told. Call this after the branch was loaded or its leaf was
        moved."""
        self._projection = self._branch.projection
        self._checkpoint = self._projection.checkpoint
        self._told = facts_told(self._branch.entries)

    @property
    def sources(self) -> tuple[InstructionSource, ...]:
        """The instruction files that the last `read` found."""
        return self._instructions.sources

    def read(self, may_read: Callable[[Path], bool]) -> None:
        """Read the instruction files. Call this before each turn, in a thread, because it blocks. `may_read` takes a
        resolved path and returns whether the model may get that file."""
        self._may_read = may_read
        self._instructions = read_instructions(
            Path(self._branch.row.cwd), may_read, contains=self._contains, user_file=self._user_file
        )

    def learn(self, facts: Mapping[str, str], tools: Sequence[ToolSpec] = ()) -> None:
        """Remember the current text of each section, and the tools on offer."""
        self._facts, self._tools = dict(facts), tuple(tools)

    async def begin_turn(
        self, tools: Sequence[ToolSpec], servers: Sequence[ServerStatus], skills: Sequence[SkillInfo]
    ) -> None:
        """Remember the current facts, and write a prompt entry if the newest one is out of date."""
        row = self._branch.row
        offered = [one for one in skills if not one.is_from_workspace or self._may_read(Path(one.source))]
        self.learn(facts_now(row.mode, self._instructions.text, servers, offered), tools)
        newest = self._branch.projection.prompt
        if (
            newest is not None
            and newest.recorded_here
            and (newest.cwd, newest.model, newest.tools) == (row.cwd, row.model, self._tools)
            and _has_client_text(newest, row)
        ):
            return
        prompt = replace(await self.fresh_prompt(), reason=reason_for_prompt(newest, row, self._tools))
        entries = [NewEntry(body=prompt)]
        if newest is not None and newest.cwd != row.cwd:
            text = f"This session worked in {newest.cwd} until now; from here on it works in {row.cwd}."
            entries.insert(0, new_remark(text))
        await self._branch.record(entries)
        self.look_back()

    async def fresh_prompt(self) -> Prompt:
        """Return a prompt entry with the current facts. Compaction also calls this, because it stores a new prompt
        entry with each checkpoint."""
        assert self._facts is not None, "call `begin_turn` or `learn` first"
        return await build_prompt(self._branch.row, self._tools, self._facts)

    def reminder(self) -> tuple[str, list[NewEntry]] | None:
        """Return the reminder that is due: its text, and the `Note` entries to store with the text. Return None if the
        model already has every fact.

        The caller stores the text and the entries before its next request.
        """
        assert self._facts is not None, "call `begin_turn` or `learn` first"
        projection = self._branch.projection
        if projection is not self._projection or projection.checkpoint is not self._checkpoint:
            self.look_back()  # the branch moved, or a new checkpoint covers earlier reminders
        mode = self._branch.row.mode
        facts = self._facts | {"mode": MODES.get(mode, mode)}
        text = changes(self._told, facts)
        if text is None:
            return None
        is_mode_new = self._told.get("mode", MODES["ask"]) != facts["mode"]
        self._told |= facts
        return text, [NewEntry(body=Note(about="mode", value=mode))] if is_mode_new else []

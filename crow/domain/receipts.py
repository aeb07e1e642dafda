"""Says what a turn changed, and which checks ran after its last change. Everything comes from the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from crow.domain.check_commands import CheckRun, Outcome, command_facts
from crow.domain.entries import Assistant, Body, CallRef, Custom, Entry, File, Started, ToolResult
from crow.domain.messages import JsonObject, ToolCall
from crow.domain.rendering import code
from crow.domain.text import plural, shorten, title_line

NAMESPACE = "crow/receipt"
"""The namespace of the entries in which receipts are stored. Hooks cannot use it, because it has a slash."""
KINDS = ("assistant", "started", "file", "tool", "custom")
"""The kinds of entries that a receipt needs, as the store names them."""

State: TypeAlias = Literal["verified", "partly verified", "not verified"]

_EDIT_TOOLS = frozenset(("edit_file", "write_file", "apply_patch"))
_CHANGING = frozenset(("edit", "delete", "move"))
_ENDED = re.compile(r"ended with exit code ([0-9]+)|ended by signal ([0-9]+)")
_TOLD = re.compile(
    r"The background command (job[0-9]+) \(.*\) has (ended (?:with exit code|by signal) [0-9]+)\.", re.DOTALL
)
_LEFT_BEHIND = re.compile(
    r"(?:^|/)(?:__pycache__/|build/|dist/|target/|node_modules/|coverage|htmlcov/|\.(?:[\w.-]*cache|coverage|hypothesis/"
    r"|tox/|nox/|venv/|git/|gradle/|next/|nuxt/|turbo/|nyc_output/|svelte-kit/|dart_tool/|stack-work/|terraform/))"
)
"""Files that checks and builds leave behind."""
_HIDDEN = re.compile(r"(?:^|/)\.")
"""Hidden files. They count as left behind, too, if the command that changed them is only a check."""
_NEVER = 2**62
_SHOWN_FILES = 4
_SHOWN_CHARS = 60
_STORED_FILES = 500
_STORED_COMMANDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a turn changed, and what verified it."""

    state: State
    why: str = ""
    """Why the state is not `verified`. Empty if it is."""
    files: tuple[str, ...] = ()
    """The files that edits changed, relative to the session's directory if they are inside."""
    edits: int = 0
    """The number of calls that edited files."""
    commands: tuple[str, ...] = ()
    """The commands that may have changed files."""
    checks: tuple[CheckRun, ...] = ()
    """The checks that began after the last change."""

    @property
    def text(self) -> str:
        """The receipt as one line of Markdown."""
        names = [code(shorten(name, _SHOWN_CHARS)) for name in self.files[:_SHOWN_FILES]]
        more = [f"{len(self.files) - _SHOWN_FILES} more"] if len(self.files) > _SHOWN_FILES else []
        rest = f" and {len(self.commands) - 2} more" if len(self.commands) > 2 else ""
        lines = f"({', '.join(_shown(line) for line in self.commands[:2])}{rest})"
        files = f"({', '.join(names + more)})"
        changed = []
        if self.files and self.commands and not self.edits:
            changed.append(
                f"{plural(len(self.files), 'file')} {files} by {plural(len(self.commands), 'command')} {lines}"
            )
        else:
            if self.files:
                changed.append(f"{plural(len(self.files), 'file')} by {plural(self.edits, 'edit')} {files}")
            if self.commands:
                changed.append(f"what {plural(len(self.commands), 'command')} changed {lines}")
        ran = [f"{_shown(each.line)} {_end_of(each)}" for each in self.checks[:_SHOWN_FILES]]
        checks = f" After the last change: {', '.join(ran)}." if ran else ""
        why = f" ({self.why})" if self.why else ""
        return f"Receipt: {self.state}{why}. Changed {' and '.join(changed)}.{checks}"

    def as_json(self) -> JsonObject:
        """Return the receipt as it is stored, and as programs get it."""
        return {
            "state": self.state,
            "why": self.why,
            "files": list(self.files[:_STORED_FILES]),
            "edits": self.edits,
            "commands": list(self.commands[:_STORED_COMMANDS]),
            "checks": [
                {
                    "command": shorten(each.line, 500),
                    "kind": each.kind,
                    "exitCode": each.exit_code,
                    "outcome": each.outcome,
                }
                for each in self.checks[:_STORED_COMMANDS]
            ],
        }


@dataclass(slots=True)
class _Turn:
    """The changes and the checks found in the entries of a turn."""

    cwd: str
    """The session's directory."""
    named: tuple[str, ...]
    """The commands that the user calls checks."""
    files: dict[str, int] = field(default_factory=dict)
    """Maps each changed file to the id of the entry with its last change."""
    edits: set[CallRef] = field(default_factory=set)
    """The calls that edited files."""
    commands: list[str] = field(default_factory=list)
    """The commands that may have changed files."""
    kept: set[CallRef] = field(default_factory=set)
    """The calls of commands that ran in a layer, if their changes were kept."""
    last_change: int = 0
    """The id of the entry with the last change of any file. Only checks that began later say something about it."""
    unknown_change: bool = False
    """A command may have changed files that the log does not name."""
    runs: list[CheckRun] = field(default_factory=list)
    """The checks, whether or not files changed later."""
    open_writers: list[str] = field(default_factory=list)
    """The commands that still run and may change files."""


@dataclass(slots=True)
class _Job:
    """A background command."""

    line: str
    access: str
    began: int
    ended: int = _NEVER
    exit_code: int | None = None


def receipt_of(
    entries: Iterable[Entry], *, cwd: str, named: Sequence[str] = (), running: Sequence[str] = ()
) -> Receipt | None:
    """Return the receipt of a turn, or None if the turn changed nothing.

    `entries` are the entries of the turn, and those that its subagents stored while it ran, in any order. `named` are
    the commands that the user calls checks. `running` names the subagents that still run.
    """
    turn = _read(sorted(entries, key=lambda entry: entry.id), cwd, tuple(named))
    if not turn.files and not turn.commands:
        return None
    turn.open_writers += running
    fresh = _latest([run for run in turn.runs if run.began > turn.last_change])
    state, why = _judge(turn, fresh)
    return Receipt(
        state=state,
        why=why,
        files=tuple(turn.files),
        edits=len(turn.edits),
        commands=tuple(dict.fromkeys(turn.commands)),
        checks=tuple(fresh),
    )


def receipt_in(body: Body) -> JsonObject | None:
    """Return the receipt that an entry holds, or None if it holds none."""
    return body.data if isinstance(body, Custom) and body.namespace == NAMESPACE else None


def _read(entries: Sequence[Entry], cwd: str, named: tuple[str, ...]) -> _Turn:
    turn = _Turn(cwd=cwd, named=named)
    calls: dict[CallRef, ToolCall] = {}
    began: dict[CallRef, int] = {}
    jobs: dict[tuple[str, str], _Job] = {}
    for entry in entries:
        match entry.body:
            case Assistant(calls=made):
                calls.update({CallRef(assistant=entry.id, index=index): call for index, call in enumerate(made)})
            case Started(call=call):
                began[call] = entry.id
            case File(call=call, change_set=change_set) if change_set:
                turn.kept.add(call)
            case File(call=call, path=path):
                _note_change(turn, _relative(path, cwd), call, entry.id)
            case Custom(namespace="crow", text=text) if (told := _TOLD.match(text)) is not None:
                _end_job(jobs.get((entry.session, told[1])), told[2], entry.id)
            case ToolResult(call=call) as result if call in began:
                _note_result(turn, entry, result, calls.get(call), began[call], jobs)
            case _:
                pass
    for job in jobs.values():
        _note_job(turn, job)
    answered = {entry.body.call for entry in entries if isinstance(entry.body, ToolResult)}
    open_calls = [ref for ref in began if ref not in answered]
    for ref in open_calls:  # the turn was cancelled while they ran
        opened = calls.get(ref)
        if opened is not None and opened.name == "shell":
            _note_command(turn, str(_arguments(opened).get("command", "")), None, {}, began[ref], _NEVER)
    return turn


def _note_change(turn: _Turn, name: str, call: CallRef, at: int) -> None:
    turn.files[name] = at
    turn.edits.add(call)
    turn.last_change = max(turn.last_change, at)


def _note_result(
    turn: _Turn,
    entry: Entry,
    result: ToolResult,
    call: ToolCall | None,
    began: int,
    jobs: dict[tuple[str, str], _Job],
) -> None:
    raw, arguments = result.raw_output, _arguments(call)
    if result.name in _EDIT_TOOLS:
        if result.call in turn.edits:
            turn.last_change = max(turn.last_change, entry.id)
    elif result.name == "shell" and "job" in raw:
        access = str(raw.get("access", "full"))
        job = _Job(line=str(arguments.get("command", "")), access=access, began=began)
        jobs[entry.session, str(raw["job"])] = job
        _end_job(job, str(raw.get("state", "")), entry.id)
    elif result.name in ("shell_output", "shell_kill"):
        _end_job(jobs.get((entry.session, str(raw.get("job")))), str(raw.get("state", "")), entry.id)
    elif result.name == "shell" and ("exit_code" in raw or raw.get("cancelled") is True):
        if raw.get("access") == "layer":
            raw = {**raw, "changed": _changed_in_layer(turn, result)}
        _note_command(turn, str(arguments.get("command", "")), _code(raw), raw, began, entry.id)
    elif result.announcement.kind in _CHANGING and not result.is_error:
        turn.commands.append(result.name)
        turn.last_change, turn.unknown_change = max(turn.last_change, entry.id), True
    if "__" not in result.name:  # not from an MCP server
        _note_user_checks(turn, raw.get("checks"), entry.id)


def _note_command(turn: _Turn, line: str, exit_code: int | None, raw: JsonObject, began: int, ended: int) -> None:
    pipes = raw.get("pipes")
    known = (
        [[each for each in pipe if isinstance(each, int)] for pipe in pipes if isinstance(pipe, list)]
        if isinstance(pipes, list)
        else None
    )
    facts = command_facts(line, exit_code, cwd=turn.cwd, named=turn.named, pipes=known)
    changes = facts.may_change and raw.get("access", "full") != "read"
    changed = raw.get("changed")
    if isinstance(changed, list):  # a layer shows what a command really changed
        if not facts.may_change:
            changed = [(name, is_new) for name, is_new in changed if not _HIDDEN.search(name)]
        modified = [name for name, is_new in changed if not is_new]
        changes = bool(modified) or (facts.may_change and bool(changed))
        turn.files.update(dict.fromkeys([name for name, _ in changed if name] if changes else [], ended))
        if changes and not facts.may_change:
            turn.last_change = max(turn.last_change, ended)
    if changes:
        turn.commands.append(line)
        turn.unknown_change = True
        turn.last_change = max(turn.last_change, ended if facts.changes_last or not facts.checks else began - 1)
    if ended < _NEVER:
        turn.runs += [replace(check, began=began) for check in facts.checks]


def _note_job(turn: _Turn, job: _Job) -> None:
    raw = {"access": job.access}
    if job.ended < _NEVER:
        _note_command(turn, job.line, job.exit_code, raw, job.began, job.ended)
    elif job.access != "read" and command_facts(job.line, None, cwd=turn.cwd, named=turn.named).may_change:
        turn.commands.append(job.line)
        turn.unknown_change = True
        turn.open_writers.append(f"{_shown(job.line)} still runs")


def _changed_in_layer(turn: _Turn, result: ToolResult) -> list[tuple[str, bool]]:
    """Return the files that a command in a layer has changed, except files that checks leave behind, such as caches.
    The second value says whether the file is new. An empty name stands for files that the log does not name."""
    if result.call not in turn.kept:
        return []
    diffs = result.announcement.diffs
    names = [(_relative(diff.path, turn.cwd), diff.old_text is None) for diff in diffs] or [("", True)]
    return [(name, is_new) for name, is_new in names if not _LEFT_BEHIND.search(name)]


def _end_job(job: _Job | None, state: str, at: int) -> None:
    if job is not None and job.ended == _NEVER and (found := _ENDED.search(state)) is not None:
        job.ended, job.exit_code = at, int(found[1]) if found[1] else -int(found[2])


def _note_user_checks(turn: _Turn, ran: object, at: int) -> None:
    """Add the runs of the checks in the user's settings, which crow itself ran after an edit."""
    for each in ran if isinstance(ran, list) else ():
        if isinstance(each, Mapping) and isinstance(line := each.get("command"), str):
            exit_code, files = _code(each), each.get("files")
            run = CheckRun(
                line=line,
                program=line,
                kind="named",
                outcome="passed" if exit_code == 0 else "failed",
                exit_code=exit_code,
                began=at + 1,  # it ran within the call whose result is `at`, after the change
                files=tuple(map(str, files)) if isinstance(files, list) else None,
            )
            turn.runs.append(run)


def _latest(runs: Sequence[CheckRun]) -> list[CheckRun]:
    """Return the runs in order. If several runs of a line ended in the same way, return only the last of them."""
    ends: dict[tuple[str, str, Outcome, tuple[str, ...] | None], CheckRun] = {}
    for run in runs:
        key = (run.line, run.directory, run.outcome, run.files)
        ends.pop(key, None)
        ends[key] = run
    return list(ends.values())


def _judge(turn: _Turn, fresh: Sequence[CheckRun]) -> tuple[State, str]:
    """Return the state, and why it is not `verified`."""
    stale = [run for run in turn.runs if run.began <= turn.last_change]
    if turn.open_writers:
        return "not verified", turn.open_writers[0]
    if not fresh:
        words = f"{_shown(stale[-1].line)} ran before the last change" if stale else "no check ran"
        return "not verified", words
    last = {(run.line, run.directory, run.files): run for run in fresh}.values()
    for run in last:
        if run.outcome == "failed":
            return "not verified", f"{_shown(run.line)} failed"
    for run in last:
        if run.outcome == "unknown" and run.exit_code != 0:
            return "not verified", f"{_shown(run.line)} or another command of the same line failed"
    names = [*turn.files, *([""] if turn.unknown_change else [])]
    passed = [run for run in last if run.outcome == "passed" and any(map(run.covers, names))]
    if not passed:
        unknown = next((run for run in last if run.outcome == "unknown"), None)
        if unknown is not None:
            return "not verified", f"the exit code hides how {_shown(unknown.line)} ended"
        return "not verified", f"{_shown(fresh[-1].line)} does not concern the changed files"
    return _judge_passed(fresh, passed, names, stale)


def _judge_passed(
    fresh: Sequence[CheckRun], passed: Sequence[CheckRun], names: Sequence[str], stale: Sequence[CheckRun]
) -> tuple[State, str]:
    for run in fresh:
        if run.outcome == "failed":
            return "partly verified", f"{_shown(run.line)} failed first, and passed without a change"
    for run in fresh:
        if run.outcome == "unknown":
            return "partly verified", f"the exit code hides how {_shown(run.line)} ended"
    programs = {run.program for run in fresh}
    for run in stale:
        if run.program not in programs:
            return "partly verified", f"{_shown(run.line)} was not repeated after the last change"
    whole = [run for run in passed if run.kind != "lint" and not run.is_partial]
    if not whole:
        partial = any(run.is_partial for run in passed)
        return "partly verified", "only some tests ran" if partial else "only linters ran"
    for name in names:
        if not any(run.covers(name) for run in whole):
            what = code(shorten(name, _SHOWN_CHARS)) if name else "what commands changed"
            return "partly verified", f"no check covers {what}"
    return "verified", ""


def _arguments(call: ToolCall | None) -> Mapping[str, object]:
    try:
        found = json.loads(call.arguments) if call is not None else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _code(values: Mapping[object, object] | JsonObject) -> int | None:
    found = dict(values).get("exit_code")
    return found if isinstance(found, int) else None


def _relative(path: str, cwd: str) -> str:
    return path.removeprefix(cwd.rstrip("/") + "/")


def _shown(line: str) -> str:
    return code(title_line(line, _SHOWN_CHARS))


def _end_of(run: CheckRun) -> str:
    if run.outcome == "unknown":
        return "ended unclearly"
    return "timed out or was ended" if run.exit_code is None else f"exit {run.exit_code}"


def without_files(line: str) -> str:
    """Return a command of the user's checks as the model would type it: the part before `{files}`."""
    return line.partition("{files}")[0].strip()

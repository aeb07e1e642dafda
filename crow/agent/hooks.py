"""Runs the user's hooks: commands and Python functions that take part in the agent's loop.

Hooks come from the user's own file and from the entry points of installed packages, never from a workspace. Each
hook gets one JSON object and may answer with another. A hook that fails, hangs or answers nonsense is reported to the
user and skipped, so no hook can break or block a turn.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio

from crow.agent import new_message_id
from crow.agent.history.branch import Branch
from crow.agent.history.rewind import digest
from crow.agent.hook_answers import KEYS, TEXT_CHARS, HookAnswer, HookEvent, answer_from
from crow.agent.permissions.path_patterns import names_path
from crow.domain.entries import Assistant, Checkpoint, Custom, File, NewEntry, StopReason, ToolResult, User
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject, ToolCall
from crow.domain.rendering import parts_text
from crow.domain.text import on_one_line, shorten_end
from crow.tools import PlannedCall, Workspace

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_REASON_CHARS = 300
_RESULT_CHARS = 100_000
"""A hook gets at most this many characters of a tool's result."""
_ANSWER_BYTES = 1_000_000
_MAX_PROMPTS = 3
"""At most this many times, a hook may continue one turn with a prompt of its own."""
_DENIED = 2
"""A hook that is a command denies by exiting with this code."""


Effect: TypeAlias = Literal["read", "write", "execute", "fetch", "external"]
"""The effects that a call may have. A shell command or an MCP tool usually has several."""

NamedHook: TypeAlias = tuple[str, Callable[[], Callable[..., object]]]
"""The name of a Python hook, and the function that loads it."""

OnFailure: TypeAlias = Callable[[str], Awaitable[None]]
"""A function that is called for each skipped hook, with a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A command from the user's file, or a Python function from an installed package. An empty restriction restricts
    nothing."""

    name: str
    event: HookEvent
    command: tuple[str, ...] = ()
    load: Callable[[], Callable[..., object]] | None = None
    """Returns the Python function."""
    tools: tuple[str, ...] = ()
    """Globs. The hook gets only the calls of matching tools."""
    does: tuple[Effect, ...] = ()
    """The hook gets only tool calls with one of these effects."""
    paths: tuple[str, ...] = ()
    """Globs. The hook gets only tool calls that concern matching paths."""
    workspaces: tuple[str, ...] = ()
    """Globs. The hook runs only in matching working directories."""
    timeout_s: float = _TIMEOUT_S

    def __str__(self) -> str:
        return f"The {self.event} hook {self.name}"

    @property
    def namespace(self) -> str:
        """The default namespace of the hook's entries."""
        return re.sub(r"[^A-Za-z0-9._:-]", "_", self.name.partition(" ")[0])[:64] or "hook"

    def covers(self, cwd: str) -> bool:
        """Return whether the hook runs in this working directory."""
        return not self.workspaces or any(names_path(pattern, (cwd, f"{cwd}/")) for pattern in self.workspaces)

    def matches(self, call: ToolCall, plan: PlannedCall, does: Collection[Effect]) -> bool:
        """Return whether the hook gets this call, which has the effects `does`.

        Commands, searches, MCP tools and calls on files with hard links may touch paths that crow does not know in
        advance. So these calls match any `paths`.
        """
        names = {
            call.name,
            plan.coverage.rule_tool or call.name,
            *(tool for part in plan.each for tool in part.coverage.like),
        }
        if self.tools and not any(fnmatchcase(name, pattern) for name in names for pattern in self.tools):
            return False
        if self.does and not any(effect in does for effect in self.does):
            return False
        is_open = (
            plan.access in ("execute", "external") or plan.announcement.kind == "search" or plan.touched.has_hard_links
        )
        places = [name for part in plan.each for name in (*part.touched.rule_paths, *part.touched.other_paths)]
        return not self.paths or is_open or any(names_path(glob, places, ignore_case=True) for glob in self.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """A denial by a hook."""

    words: str
    """A sentence that names the hook and gives the hook's reason."""

    @classmethod
    def by(cls, hook: Hook, answer: HookAnswer) -> Denial:
        return cls(words=f"{hook} denied this: {answer.deny}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionAdvice:
    """The answers of the hooks of `before_compact`, combined."""

    deny: str = ""
    """The first denial."""
    context: str = ""
    """All contexts, joined."""
    summary: str = ""
    """The first summary."""


class Hooks:
    """The hooks of this process. `configured` returns the hooks that the user's file contains now. `find` returns the
    Python hooks of each event and is called once."""

    def __init__(
        self,
        find: Callable[[], Mapping[HookEvent, Sequence[NamedHook]]] | None = None,
        *,
        configured: Callable[[], Sequence[Hook]] = tuple,
        has_network: Callable[[], bool] = bool,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.has_network = has_network
        """Returns whether commands with write access can use the network."""
        self._find = find
        self._configured = configured
        self._timeout_s = timeout_s
        self._found: tuple[Hook, ...] | None = None

    async def for_workspace(self, cwd: str, on_failure: OnFailure) -> Mapping[HookEvent, Sequence[Hook]]:
        """Return the hooks that run in `cwd`, by event and in order. Hooks of the user's file come first. Events
        without hooks are absent."""
        if self._found is None:
            found: object = {}
            if self._find is not None:
                found = await _run_in_thread("The search for hooks", self._find, self._timeout_s, on_failure)
            self._found = tuple(
                Hook(name=name, event=event, load=load, timeout_s=self._timeout_s)
                for event, named in (found.items() if isinstance(found, dict) else ())
                for name, load in named
            )
        by_event: dict[HookEvent, list[Hook]] = {}
        for hook in (*self._configured(), *self._found):
            if hook.covers(cwd):
                by_event.setdefault(hook.event, []).append(hook)
        return by_event


class BranchHooks:
    """Calls the hooks for one branch. `on_failure` tells the user about a skipped hook.

    A turn keeps the hooks with which it began. Hooks run in order, one at a time. Entries that a hook adds are
    stored before the model sees them.
    """

    def __init__(self, hooks: Hooks, branch: Branch, workspace: Workspace, on_failure: OnFailure) -> None:
        self._hooks = hooks
        self._branch = branch
        self._workspace = workspace
        self._on_failure = on_failure
        self._by_event: Mapping[HookEvent, Sequence[Hook]] = {}
        self._turn: int | None = None
        self._has_started = False
        self._prompts = 0
        self._reported: set[str] = set()
        self._after_tool = anyio.Lock(fast_acquire=True)

    @property
    def are_used(self) -> bool:
        """Whether any hook runs in this turn."""
        return bool(self._by_event)

    async def before_prompt(self) -> Denial | None:
        """Call the hooks of `before_prompt`. The first time, also call the hooks of `session_start`, before those of
        `before_prompt`."""
        has_started, self._has_started = self._has_started, True
        if not has_started and await self._of("session_start"):
            is_known = any(isinstance(entry.body, Assistant | Checkpoint) for entry in self._branch.entries)
            await self._call("session_start", source="resumed" if is_known else "new")
        if not await self._of("before_prompt"):
            return None
        entry = self._branch.projection.newest_user()
        text = parts_text(entry.body.parts) if entry is not None and isinstance(entry.body, User) else ""
        return _denial(await self._call("before_prompt", prompt=text))

    async def before_request(self, *, step: int, tokens: Callable[[], int]) -> Denial | None:
        """Call the hooks of `before_request`. `step` is the number of the request within this turn, from 1."""
        if not await self._of("before_request"):
            return None
        return _denial(await self._call("before_request", step=step, tokens=tokens()))

    async def before_tool(
        self, call_id: str, call: ToolCall, plan: PlannedCall, make_plan: Callable[[ToolCall], Awaitable[PlannedCall]]
    ) -> tuple[ToolCall, PlannedCall] | Denial:
        """Call the hooks of `before_tool` that match. Return a denial, or the resulting call and its plan.

        After each hook, the call is planned again, and the new plan decides which hook is called next. So a hook that
        changes the arguments cannot make the call avoid another hook.
        """
        waiting = list(await self._of("before_tool"))
        while waiting and plan.fault is None:
            does = effects(plan, has_network=self._hooks.has_network())
            hook = next((hook for hook in waiting if hook.matches(call, plan, does)), None)
            if hook is None:
                break
            waiting.remove(hook)
            answer = await self._ask(hook, _tool_facts(call_id, call, plan, does))
            if answer is not None and answer.deny:
                return Denial.by(hook, answer)
            if answer is not None and answer.arguments is not None:
                call = await self._change(hook, call_id, call, answer.arguments)
            plan = await make_plan(call)
        return call, plan

    async def _change(self, hook: Hook, call_id: str, call: ToolCall, arguments: JsonObject) -> ToolCall:
        """Store an entry that tells the model the new arguments. Return the call with these arguments."""
        text = json.dumps(arguments, ensure_ascii=False)
        words = f"{hook} changed the arguments of this {call.name} call to: {shorten_end(text, TEXT_CHARS)}"
        data = {"event": hook.event, "call_id": call_id, "arguments": arguments}
        body = Custom(namespace=hook.namespace, text=words, for_model=True, message_id=new_message_id(), data=data)
        await self._branch.record([NewEntry(body=body)])
        return ToolCall(id=call.id, name=call.name, arguments=text)

    async def after_tool(self, call: ToolCall, plan: PlannedCall, result: ToolResult) -> None:
        """Call the hooks of `after_tool` that match. If hooks change a file that the call wrote, store the change, so
        that it can be undone together with the call's own change."""
        hooks = await self._of("after_tool")
        if not hooks:
            return
        does = effects(plan, has_network=self._hooks.has_network())
        hooks = [hook for hook in hooks if hook.matches(call, plan, does)]
        if not hooks:
            return
        facts = _tool_facts(result.call.call_id, call, plan, does) | {
            "result": shorten_end(result.text, _RESULT_CHARS),
            "is_error": result.is_error,
            "duration_ms": result.duration_ms,
        }
        paths = plan.paths if plan.access == "write" else ()
        async with self._after_tool:
            before = [await self._content(path) for path in paths]
            for hook in hooks:
                await self._ask(hook, facts)
            after = [await self._content(path) for path in paths]
            changes = [
                File(call=result.call, path=path, before=old, after_hash=digest(new), recorded_here=True)
                for path, old, new in zip(paths, before, after, strict=True)
                if old != new
            ]
            if changes:
                await self._branch.record([NewEntry(body=change) for change in changes])

    async def _content(self, path: str) -> bytes | None:
        try:
            return await self._workspace.read_bytes(Path(path))
        except OSError:
            return None

    async def before_compact(self, facts: JsonObject) -> CompactionAdvice:
        """Call the hooks of `before_compact`."""
        answers = await self._call("before_compact", **facts)
        refusal = _denial(answers)
        return CompactionAdvice(
            deny=refusal.words if refusal is not None else "",
            context="\n\n".join(answer.context for _, answer in answers if answer.context),
            summary=next((answer.summary for _, answer in answers if answer.summary), ""),
        )

    async def after_compact(self, facts: JsonObject) -> None:
        """Call the hooks of `after_compact`."""
        await self._call("after_compact", **facts)

    async def turn_end(self, stop: StopReason, *, steps: int) -> bool:
        """Call the hooks of `turn_end`. If hooks send another prompt, store it and return True, unless the turn did not
        end by itself or hooks have already made it continue `_MAX_PROMPTS` times."""
        if not await self._of("turn_end"):
            return False
        newest = next(
            (entry.body for entry in reversed(self._branch.entries) if isinstance(entry.body, Assistant)), None
        )
        text = newest.text if newest is not None else ""
        answers = await self._call("turn_end", stop_reason=stop, text=text, steps=steps, prompts_sent=self._prompts)
        asking = [(hook, answer.prompt) for hook, answer in answers if answer.prompt]
        if not asking or stop != "end_turn":
            return False
        if self._prompts >= _MAX_PROMPTS:
            await self._report(f"{asking[0][0]} sent another prompt; crow takes at most {_MAX_PROMPTS} in a turn.")
            return False
        self._prompts += 1
        bodies = [
            Custom(namespace=hook.namespace, text=prompt, is_shown=True, for_model=True, message_id=new_message_id())
            for hook, prompt in asking
        ]
        await self._branch.record([NewEntry(body=body) for body in bodies])
        return True

    async def _of(self, event: HookEvent) -> Sequence[Hook]:
        """Return the hooks of an event. The first call in a turn finds the hooks of the whole turn."""
        if self._turn != self._branch.turn:
            self._turn, self._prompts, self._reported = self._branch.turn, 0, set()
            self._by_event = await self._hooks.for_workspace(self._branch.row.cwd, self._report)
        return self._by_event.get(event, ())

    async def _call(self, event: HookEvent, **facts: object) -> list[tuple[Hook, HookAnswer]]:
        """Call the hooks of an event in order, until one denies. Return the answers of the hooks that were called."""
        answers = []
        for hook in await self._of(event):
            answer = await self._ask(hook, facts)
            if answer is not None:
                answers.append((hook, answer))
                if answer.deny:
                    break
        return answers

    async def _ask(self, hook: Hook, facts: Mapping[str, object]) -> HookAnswer | None:
        """Call one hook, and store what it adds. Return its answer, or None if the hook gave no answer or was
        skipped."""
        row = self._branch.row
        request = {
            "event": hook.event,
            "session_id": row.id,
            "parent_id": row.parent_id,
            "cwd": row.cwd,
            "model": row.model,
            "mode": row.mode,
            **facts,
        }
        text = json.dumps(request, ensure_ascii=False)
        try:
            given = await (self._run_command(hook, text) if hook.load is None else self._run_function(hook, text))
            answer, problem = (None, "") if given is None else answer_from(given, hook.event, hook.namespace)
        except ValueError as error:
            await self._skip(f"{hook} {error}")
            return None
        if problem:
            await self._report(f"{hook} {problem}")
        if answer is not None:
            await self._store(hook, answer)
        return answer

    async def _run_command(self, hook: Hook, text: str) -> object:
        """Run a command and return its answer, or None. :raises ValueError: the command failed."""
        try:
            done = await self._workspace.run_program(
                hook.command, text.encode(errors="replace"), timeout_s=hook.timeout_s, max_bytes=_ANSWER_BYTES
            )
        except OSError as error:
            raise ValueError(f"could not be started ({error.strerror or error})") from error
        words = done.errors.decode(errors="replace").strip()
        if done.code is None:
            raise ValueError(f"took longer than {hook.timeout_s:g} s")
        if done.code == _DENIED and "deny" in KEYS[hook.event]:
            return {"deny": words or True}
        if done.code:
            last = words.splitlines()[-1] if words else "it wrote nothing to stderr"
            raise ValueError(f"failed (exit code {done.code}: {shorten_end(on_one_line(last), _REASON_CHARS)})")
        output = done.output.strip()
        if not output.startswith(b"{"):
            return None
        if done.is_cut:
            raise ValueError(f"answered with more than {_ANSWER_BYTES:,} bytes")
        try:
            return json.loads(output)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"answered with invalid JSON ({error})") from error

    async def _run_function(self, hook: Hook, text: str) -> object:
        assert hook.load is not None
        work = partial(_run_function, hook.load, json.loads(text))
        return await _run_in_thread(str(hook), work, hook.timeout_s, self._report)

    async def _store(self, hook: Hook, answer: HookAnswer) -> None:
        bodies = list(answer.entries)
        if answer.context and hook.event != "before_compact":
            context = Custom(namespace=hook.namespace, text=answer.context, for_model=True, message_id=new_message_id())
            bodies.insert(0, context)
        if bodies:
            await self._branch.record([NewEntry(body=body) for body in bodies])
        if answer.metadata:
            try:
                await self._branch.merge_metadata(answer.metadata)
            except ArgumentError as error:
                await self._report(f"{hook} answered with metadata that cannot be stored. {error}")

    async def _skip(self, problem: str) -> None:
        await self._report(f"{problem} and is skipped.")

    async def _report(self, words: str) -> None:
        """Tell the user about a problem, but only once per turn."""
        if words not in self._reported:
            self._reported.add(words)
            logger.warning("%s", words)
            await self._on_failure(words)


def effects(plan: PlannedCall, *, has_network: bool) -> frozenset[Effect]:
    """Return the effects that a call may have. A command may have every effect that its access allows. An MCP tool may
    do anything, unless the user declared the tool read-only."""
    found: set[Effect] = set()
    match plan.access:
        case "execute":
            found |= {"execute", "read"}
            if plan.command_access != "read":
                found.add("write")
            if plan.command_access not in ("read", "write") or (plan.command_access == "write" and has_network):
                found.add("fetch")
        case "external":
            found |= {"external", "read", "fetch"}
            if not plan.coverage.is_read_only:
                found |= {"write", "execute"}
        case "read" | "write" | "fetch" as effect:
            found.add(effect)
        case "none":
            pass
    return frozenset(found)


def _tool_facts(call_id: str, call: ToolCall, plan: PlannedCall, does: Collection[Effect]) -> dict[str, object]:
    """Return the facts about a call that a hook gets. `rule_tool` is the tool whose permission rules apply. Usually,
    this is `tool` itself. If `tool` only passes the call on to a server's tool, `rule_tool` is the server's tool.
    `paths` contains the absolute paths of the files that the call touches, and is empty if they are not known in
    advance."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {
        "call_id": call_id,
        "tool": call.name,
        "rule_tool": plan.coverage.rule_tool or call.name,
        "arguments": arguments,
        "title": plan.announcement.title,
        "does": sorted(does),
        "paths": list(plan.paths),
    }


def _denial(answers: Sequence[tuple[Hook, HookAnswer]]) -> Denial | None:
    """Return the denial among the answers, or None if no hook denied."""
    return next((Denial.by(hook, answer) for hook, answer in answers if answer.deny), None)


def _run_function(load: Callable[[], Callable[..., object]], request: JsonObject) -> object:
    """Load and call a Python hook; a coroutine function gets its own event loop.

    :raises ValueError: the answer is not JSON, or too large.
    """
    answer = load()(request)
    if inspect.iscoroutine(answer):
        coroutine: Coroutine[Any, Any, object] = answer
        answer = asyncio.run(coroutine)
    text = json.dumps(answer)
    if len(text) > _ANSWER_BYTES:
        raise ValueError(f"its answer has more than {_ANSWER_BYTES:,} bytes")
    return json.loads(text)


async def _run_in_thread(subject: str, work: Callable[[], object], timeout_s: float, on_failure: OnFailure) -> object:
    """Run `work` in a thread and return its result. Return None if it fails or takes too long. After a timeout, the
    thread is left running."""
    future: Future[tuple[object, BaseException | None]] = Future()
    future.set_running_or_notify_cancel()  # the timeout must not cancel the future while the thread runs

    def run() -> None:
        try:
            future.set_result((work(), None))
        except BaseException as error:  # noqa: BLE001 - third-party code may raise anything
            future.set_result((None, error))

    # a daemon thread, so that a hanging hook cannot block the exit
    threading.Thread(target=run, name=subject, daemon=True).start()
    outcome = None
    with anyio.move_on_after(timeout_s):
        outcome = await asyncio.wrap_future(future)
    if outcome is None:
        await on_failure(f"{subject} took longer than {timeout_s:g} s and is skipped.")
        return None
    result, error = outcome
    if error is not None:
        logger.warning("%s failed", subject, exc_info=error)
        reason = on_one_line("".join(traceback.format_exception_only(error)))
        await on_failure(f"{subject} failed ({shorten_end(reason, _REASON_CHARS)}) and is skipped.")
    return result

"""What others may add to compaction: functions that a package registers as Python entry points.

Strategy: `crow.before_compact` may veto, add context for the summary, or give the summary itself; `crow.after_compact`
hears how it ended. Each call gets a thread of its own and ten seconds; one that fails, hangs or answers nonsense is
logged, told to the user and passed over, so that no hook can break or hold a turn.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio

from crow.agent.compaction.planner import Reason

__all__ = ["Advice", "Done", "Hooks", "NamedHook", "Proposal"]

logger = logging.getLogger(__name__)

HOOK_S = 10.0
REASON_CHARS = 300

NamedHook: TypeAlias = tuple[str, Callable[[], Callable[..., object]]]
"""The name of a hook, and what loads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A compaction that is about to be made, given to `crow.before_compact`. Numbers are tokens of the whole request.

    `kind` `mask` only hides old tool outputs; `previous_summary` is empty before the first `summary`.
    """

    session_id: str
    cwd: str
    model: str
    kind: Literal["mask", "summary"]
    reason: Reason
    focus: str
    tokens: int
    threshold: int
    window: int
    previous_summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `crow.before_compact` may answer; None stands for an empty one. `veto`: a sentence why not. `context`: what
    the summary should take into account. `summary`: to be taken instead of asking the model."""

    veto: str = ""
    context: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A compaction that was made, given to `crow.after_compact`: `entry` is its id in the log."""

    session_id: str
    cwd: str
    model: str
    kind: Literal["mask", "summary"]
    reason: Reason
    entry: int
    tokens_before: int
    tokens_after: int
    summary: str = ""
    method: str = ""
    files_modified: tuple[str, ...] = ()


OnFailure: TypeAlias = Callable[[str], Awaitable[None]]
"""Told in a sentence of each hook that is passed over."""


class Hooks:
    """The hooks of this process; `find` gives those of an entry point group and is asked once for each. Without it
    there are none."""

    def __init__(self, find: Callable[[str], Sequence[NamedHook]] | None = None, *, timeout_s: float = HOOK_S) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._found: dict[str, Sequence[NamedHook]] = {}

    async def before(self, proposal: Proposal, on_failure: OnFailure) -> Advice:
        """What the hooks say together: the first veto, all context, the first summary."""
        group = "crow.before_compact"
        veto, context, summary = "", [], ""
        for name, answer in await self._ask(group, proposal, on_failure):
            if not isinstance(answer, Advice):
                words = f"{hook_named(name, group)} answered {type(answer).__name__} instead of Advice"
                await self._pass_over(f"{words} and is passed over.", on_failure)
                continue
            veto = veto or answer.veto
            summary = summary or answer.summary
            context += [answer.context] if answer.context else []
        return Advice(veto=veto, context="\n\n".join(context), summary=summary)

    async def after(self, done: Done, on_failure: OnFailure) -> None:
        """Tell them."""
        await self._ask("crow.after_compact", done, on_failure)

    async def _ask(self, group: str, argument: object, on_failure: OnFailure) -> list[tuple[str, object]]:
        """The answers other than None, in the order of the hooks."""
        find = self._find
        if find is None:
            return []
        if group not in self._found:
            found = await self._in_thread(f"The search for hooks of {group}", lambda: find(group), on_failure)
            self._found[group] = found if isinstance(found, (list, tuple)) else ()
        answers = []
        for name, load in self._found[group]:
            work = partial(run_hook, load, argument)
            answer = await self._in_thread(hook_named(name, group), work, on_failure)
            if answer is not None:
                answers.append((name, answer))
        return answers

    async def _in_thread(self, subject: str, work: Callable[[], object], on_failure: OnFailure) -> object:
        """What `work` returns; None if it fails or takes too long, in which case its thread is left behind."""
        done, result, failure = anyio.Event(), list[object](), list[BaseException]()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:  # noqa: BLE001 - a stranger's code: whatever it raises, it is passed over
                failure.append(error)
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(done.set)

        # a daemon, so that a hook that hangs cannot hold the exit
        threading.Thread(target=run, name=subject, daemon=True).start()
        with anyio.move_on_after(self._timeout_s):
            await done.wait()
            if result:
                return result[0]
        if failure:
            (error,) = failure
            reason = shortened("".join(traceback.format_exception_only(error)))
            await self._pass_over(f"{subject} failed ({reason}) and is passed over.", on_failure, error)
        else:
            await self._pass_over(f"{subject} took longer than {self._timeout_s:g} s and is passed over.", on_failure)
        return None

    async def _pass_over(self, words: str, on_failure: OnFailure, error: BaseException | None = None) -> None:
        logger.warning("%s", words, exc_info=error)
        await on_failure(words)


def hook_named(name: str, group: str) -> str:
    return f"The hook {name} of {group}"


def shortened(text: str) -> str:
    """On one line, and bounded."""
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARS else f"{line[:REASON_CHARS]}…"


def run_hook(load: Callable[[], Callable[..., object]], argument: object) -> object:
    """What a hook answers; one that is a coroutine function gets an event loop of its own."""
    answer = load()(argument)
    if inspect.iscoroutine(answer):
        coroutine: Coroutine[Any, Any, object] = answer
        return asyncio.run(coroutine)
    return answer

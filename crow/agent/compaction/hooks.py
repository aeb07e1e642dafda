"""Runs compaction hooks, which other packages register as Python entry points.

`crow.before_compact` may veto, add context for the summary, or return the summary itself; `crow.after_compact` learns
the result. Each call runs in its own thread for at most ten seconds. A hook that fails, hangs or returns nonsense is
logged, reported to the user and skipped, so no hook can break or block a turn.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import anyio

from crow.agent.compaction import Advice, Done, Proposal

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
REASON_CHARS = 300

NamedHook: TypeAlias = tuple[str, Callable[[], Callable[..., object]]]
"""The name of a hook, and the function that loads it."""

OnFailure: TypeAlias = Callable[[str], Awaitable[None]]
"""Called with a sentence for each hook that is skipped."""


class Hooks:
    """The hooks of this process. `find` returns the hooks of an entry point group and is called once per group. Without
    `find` there are no hooks."""

    def __init__(
        self, find: Callable[[str], Sequence[NamedHook]] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._found: dict[str, Sequence[NamedHook]] = {}

    async def before(self, proposal: Proposal, on_failure: OnFailure) -> Advice:
        """Call the hooks and combine their advice: the first veto, the first summary, and the context of all hooks."""
        group = "crow.before_compact"
        advice: list[Advice] = []
        for name, answer in await self._call(group, proposal, on_failure):
            if isinstance(answer, Advice):
                advice.append(answer)
            else:
                problem = f"{label(name, group)} returned {type(answer).__name__} instead of Advice"
                await self._skip(problem, on_failure)
        return Advice(
            veto=next((each.veto for each in advice if each.veto), ""),
            context="\n\n".join(each.context for each in advice if each.context),
            summary=next((each.summary for each in advice if each.summary), ""),
        )

    async def after(self, done: Done, on_failure: OnFailure) -> None:
        """Report a finished compaction to the hooks."""
        await self._call("crow.after_compact", done, on_failure)

    async def _call(self, group: str, argument: object, on_failure: OnFailure) -> list[tuple[str, object]]:
        """Call the hooks of `group` in order. Return every answer except None, together with the name of its hook."""
        if self._find is None:
            return []
        if group not in self._found:
            search = partial(self._find, group)
            found = await self._run_in_thread(f"The search for hooks of {group}", search, on_failure)
            self._found[group] = found if isinstance(found, (list, tuple)) else ()
        answers = []
        for name, load in self._found[group]:
            work = partial(run_hook, load, argument)
            answer = await self._run_in_thread(label(name, group), work, on_failure)
            if answer is not None:
                answers.append((name, answer))
        return answers

    async def _run_in_thread(self, subject: str, work: Callable[[], object], on_failure: OnFailure) -> object:
        """Run `work` in a thread and return its result. Return None if it fails or takes too long. A thread that takes
        too long is abandoned."""
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
        with anyio.move_on_after(self._timeout_s):
            outcome = await asyncio.wrap_future(future)
        if outcome is None:
            await self._skip(f"{subject} took longer than {self._timeout_s:g} s", on_failure)
            return None
        result, error = outcome
        if error is not None:
            reason = " ".join("".join(traceback.format_exception_only(error)).split())
            reason = reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}…"
            await self._skip(f"{subject} failed ({reason})", on_failure, error)
        return result

    async def _skip(self, problem: str, on_failure: OnFailure, error: BaseException | None = None) -> None:
        words = f"{problem} and is skipped."
        logger.warning("%s", words, exc_info=error)
        await on_failure(words)


def label(name: str, group: str) -> str:
    return f"The hook {name} of {group}"


def run_hook(load: Callable[[], Callable[..., object]], argument: object) -> object:
    """Load and call a hook; a coroutine function gets its own event loop."""
    answer = load()(argument)
    if inspect.iscoroutine(answer):
        coroutine: Coroutine[Any, Any, object] = answer
        return asyncio.run(coroutine)
    return answer

"""What others may add to compaction: functions that a package registers as Python entry points.

Strategy: `crow.before_compact` may veto, add context for the summary, or give the summary itself; `crow.after_compact`
hears how it ended. Each call gets a thread of its own and ten seconds; one that fails, hangs or answers nonsense is
logged and passed over, so that no hook can break or hold a turn. Knows not where the functions come from.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio

from crow.agent.compaction.planner import Reason

__all__ = ["Advice", "Done", "Hooks", "NamedHook", "Proposal"]

logger = logging.getLogger(__name__)

HOOK_S = 10.0

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


class Hooks:
    """The hooks of this process; `find` gives those of an entry point group and is asked once for each. Without it
    there are none."""

    def __init__(self, find: Callable[[str], Sequence[NamedHook]] | None = None, *, timeout_s: float = HOOK_S) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._found: dict[str, Sequence[NamedHook]] = {}

    async def before(self, proposal: Proposal) -> Advice:
        """What the hooks say together: the first veto, all context, the first summary."""
        veto, context, summary = "", [], ""
        for name, answer in await self._ask("crow.before_compact", proposal):
            if not isinstance(answer, Advice):
                logger.warning("The hook %s of crow.before_compact answered %r instead of Advice.", name, answer)
                continue
            veto = veto or answer.veto
            summary = summary or answer.summary
            context += [answer.context] if answer.context else []
        return Advice(veto=veto, context="\n\n".join(context), summary=summary)

    async def after(self, done: Done) -> None:
        """Tell them."""
        await self._ask("crow.after_compact", done)

    async def _ask(self, group: str, argument: object) -> list[tuple[str, object]]:
        """The answers other than None, in the order of the hooks."""
        find = self._find
        if find is None:
            return []
        if group not in self._found:
            found = await self._in_thread(group, "the search for hooks", lambda: find(group))
            self._found[group] = found if isinstance(found, (list, tuple)) else ()
        answers = []
        for name, load in self._found[group]:
            answer = await self._in_thread(group, name, partial(run_hook, load, argument))
            if answer is not None:
                answers.append((name, answer))
        return answers

    async def _in_thread(self, group: str, name: str, work: Callable[[], object]) -> object:
        """What `work` returns; None if it fails or takes too long, in which case its thread is left behind."""
        done, result = anyio.Event(), []
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                result.append(work())
            except BaseException:
                logger.exception("%s: %s failed and is passed over", group, name)
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(done.set)

        # a daemon, so that a hook that hangs cannot hold the exit
        threading.Thread(target=run, name=f"{group} {name}", daemon=True).start()
        with anyio.move_on_after(self._timeout_s):
            await done.wait()
            return result[0] if result else None
        logger.warning("%s: %s took longer than %g s and is passed over", group, name, self._timeout_s)
        return None


def run_hook(load: Callable[[], Callable[..., object]], argument: object) -> object:
    """What a hook answers; one that is a coroutine function gets an event loop of its own."""
    answer = load()(argument)
    if inspect.iscoroutine(answer):
        coroutine: Coroutine[Any, Any, object] = answer
        return asyncio.run(coroutine)
    return answer

"""Hooks for tests of the agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crow.agent.history.branch import Branch
from crow.agent.hook_answers import HookEvent
from crow.agent.hooks import BranchHooks, Hook, Hooks, NamedHook
from crow.domain.events import NoticeShown
from crow.tools.workspace import DiskWorkspace

HookFunction = Callable[[dict[str, Any]], Any]


def python_hooks(
    functions: Mapping[HookEvent, Sequence[HookFunction]], configured: Sequence[Hook] = (), *, timeout_s: float = 300
) -> Hooks:
    """Hooks as entry points provide them: names and loaders."""

    def find() -> dict[HookEvent, list[NamedHook]]:
        return {
            event: [(each.__name__, lambda each=each: each) for each in given]  # type: ignore[misc]
            for event, given in functions.items()
        }

    return Hooks(find, configured=lambda: configured, timeout_s=timeout_s)


def hooks_on(branch: Branch, hooks: Hooks | None = None) -> BranchHooks:
    """The hooks of a branch; none without `hooks`. Failures are published as notices."""

    async def report(words: str) -> None:
        await branch.publish(NoticeShown(severity="warning", title=words))

    return BranchHooks(hooks or Hooks(), branch, DiskWorkspace(branch.row.cwd), report)

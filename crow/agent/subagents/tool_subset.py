"""The tools that a subagent gets: some of the tools of its session."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from crow.agent.subagents.kinds import Speciality
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolCall, ToolSpec
from crow.tools import PlannedCall, SkillInfo, Task, Toolbox

_ONLY_FOR_THE_SESSION = frozenset({"task", "update_plan", "recall"})
"""Tools that subagents do not get."""
_CALL_TOOL = "call_tool"
_FINDING = frozenset({"find_tools", _CALL_TOOL})
"""The tools that find and call deferred tools."""
_NO_TOOLS = "There are no tools in this conversation. Answer without them."
_NAMES_TOLD = 50
"""An error names at most this many tools."""


def tools_for(task: Task, kind: Speciality, session: Speciality, toolbox: Toolbox) -> ToolSubset:
    """Return the tools of a task, chosen from the tools of its session. If the session is itself a subagent with a
    kind, the limits of that kind (`session`) apply, too.

    :raises ~crow.domain.errors.ArgumentError: the kind allows no tool, or the task names one that it cannot use.
    """
    deferred = toolbox.deferred()
    allowed = _allowed_specs(kind.specs(session.specs((*toolbox.specs(), *deferred))), task.tools)
    if deferred and _CALL_TOOL in (*(kind.tools or ()), *(task.tools or ())):  # it stands for all deferred tools
        allowed = (*allowed, *session.specs(deferred))
    return ToolSubset(toolbox, allowed)


class ToolSubset:
    """A toolbox with some of the tools of another toolbox."""

    def __init__(self, toolbox: Toolbox, specs: Sequence[ToolSpec]) -> None:
        allowed = {spec.name for spec in specs}
        self._toolbox = toolbox = toolbox.narrowed(allowed)
        self._specs = tuple(spec for spec in toolbox.specs() if spec.name in allowed or spec.name in _FINDING)
        self._names = frozenset(allowed | {spec.name for spec in self._specs})
        self.deferred = toolbox.deferred
        self.narrowed = toolbox.narrowed
        self.isolated = toolbox.isolated
        self.changes_of = toolbox.changes_of
        self.servers = toolbox.servers
        self.agents = toolbox.agents
        self.restart = toolbox.restart
        self.prepare = toolbox.prepare
        self.run = toolbox.run
        self.understood = toolbox.understood

    def specs(self) -> tuple[ToolSpec, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._specs

    def skills(self) -> tuple[SkillInfo, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._toolbox.skills() if "skill" in self._names else ()

    async def plan(self, call: ToolCall) -> PlannedCall:
        """See :class:`crow.tools.Toolbox`."""
        plan = await self._toolbox.plan(call)
        if call.name in self._names:
            return plan
        names = ", ".join(spec.name for spec in self._specs)
        fault = f'This task has no tool "{call.name}". It has: {names}.' if names else _NO_TOOLS
        return PlannedCall(announcement=plan.announcement, access="none", fault=fault)


def _allowed_specs(specs: Sequence[ToolSpec], names: Sequence[str] | None) -> tuple[ToolSpec, ...]:
    """Return the tools that a task may use. :raises ~crow.domain.errors.ArgumentError: `names` contains a tool that
    tasks cannot use."""
    allowed = {spec.name: spec for spec in specs if spec.name not in _ONLY_FOR_THE_SESSION}
    if names is None:
        return tuple(allowed.values())
    for name in names:
        if name not in allowed:
            known = ", ".join(islice(allowed, _NAMES_TOLD)) + (", ..." if len(allowed) > _NAMES_TOLD else "")
            raise ArgumentError(f'task: tools contains "{name}"; a task can only use {known}')
    return tuple(spec for name, spec in allowed.items() if name in names)

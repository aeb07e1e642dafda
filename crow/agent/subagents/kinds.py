"""Kinds of subagents: which kinds are offered, and what each of them sets and restricts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from crow.agent.permissions.judge import Permissions
from crow.agent.permissions.rules import narrower_mode
from crow.agent.turns.adapters import Adapters
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject, ToolSpec
from crow.tools import AGENT_CONTEXT, AGENT_MODES, AgentKind, Task

_CONFIG_KEY = "agent"
"""The key of the subagent's kind in the subagent's configuration."""

_ISOLATED_KEY = "isolated"
"""The key in a subagent's configuration for whether the subagent works in a layer of its own: a private copy of the
workspace, whose changes the caller merges or drops."""

_ISOLATED_ROLE = (
    "You work on a copy of the workspace of your own, at the same paths. What you change stays in it until the other "
    "agent takes it over."
)
"""Added after `SUBAGENT_ROLE` if the subagent works in a layer of its own."""

SUBAGENT_ROLE = (
    "You are a subagent: another agent gave you this task and reads your last answer, nothing else of what you do. "
    "Answer with all that it needs to know, and do not ask back."
)
"""Added to a subagent's system message, before the instructions of its kind. If a client opens the subagent as a
session of its own, this text is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedAgents:
    """Says which kinds of subagents the model is offered. Implements :class:`crow.tools.AgentPolicy`."""

    adapters: Adapters
    permissions: Permissions

    def may_offer(self, kind: AgentKind) -> bool:
        """See :class:`crow.tools.AgentPolicy`."""
        return not kind.is_from_workspace or self.permissions.may_read()(Path(kind.source))

    def has_model(self, name: str) -> bool:
        """See :class:`crow.tools.AgentPolicy`."""
        return name in self.adapters.models


@dataclass(frozen=True, slots=True, kw_only=True)
class Speciality:
    """The settings that a subagent gets from its kind. A subagent without a kind works like its session."""

    name: str = ""
    """The name of the kind. Empty if the subagent has no kind."""
    instructions: str = ""
    """Added to the subagent's system message."""
    tools: tuple[str, ...] | None = None
    """Globs of the names of the tools that the subagent may use. None means all tools of its session."""
    model: str = ""
    """Empty if the subagent uses the model of its session."""
    mode: str = ""
    """A mode: the subagent may do nothing that this mode does not allow. Empty if only the mode of the session
    counts."""
    isolated: bool = False
    """The subagent works in a layer of its own."""
    context: tuple[str, ...] = AGENT_CONTEXT
    """The information that the subagent may get besides its prompt: `files`, `state`, or both."""

    @classmethod
    def of(cls, task: Task, models: Iterable[str]) -> Speciality:
        """Return the speciality of a new task. A model that is not among `models` is ignored."""
        kind = task.kind
        if kind is None:
            return cls(isolated=task.isolated)
        return cls(
            name=kind.name,
            instructions=task.instructions,
            tools=kind.tools,
            model=kind.model if kind.model in models else "",
            mode=kind.mode,
            isolated=kind.isolated or task.isolated,
            context=kind.context,
        )

    @classmethod
    def stored(cls, config: JsonObject) -> Speciality:
        """Read the speciality from a subagent's configuration. A damaged value allows nothing: no tool, no context, and
        only the mode `plan`."""
        isolated = config.get(_ISOLATED_KEY) is True
        match config.get(_CONFIG_KEY):
            case None:
                return cls(isolated=isolated)
            case {"name": str(name), "instructions": str(instructions), **rest}:
                tools, model, mode = rest.get("tools"), rest.get("model"), rest.get("mode", "")
                context = rest.get("context", AGENT_CONTEXT)
                return cls(
                    name=name,
                    instructions=instructions,
                    tools=None if tools is None else tuple(map(str, tools)) if isinstance(tools, list | tuple) else (),
                    model=model if isinstance(model, str) else "",
                    mode=mode if isinstance(mode, str) and mode in ("", *AGENT_MODES) else "plan",
                    isolated=isolated,
                    context=tuple(map(str, context)) if isinstance(context, list | tuple) else (),
                )
            case _:
                return cls(tools=(), mode="plan", isolated=isolated, context=())

    def config(self, config: JsonObject) -> JsonObject:
        """Return `config` with the kind added to it. The kind's instructions come at the end of the system message,
        after the text about the subagent's layer."""
        if self.isolated:
            append = f"{config.get('system_prompt_append') or ''} {_ISOLATED_ROLE}".strip()
            config = {**config, "system_prompt_append": append, _ISOLATED_KEY: True}
        if not self.name:
            return config
        prompt = f"{config.get('system_prompt_append') or ''}\n\n{self.instructions}".strip()
        kind = {
            "name": self.name,
            "instructions": self.instructions,
            "model": self.model,
            "mode": self.mode,
            "tools": None if self.tools is None else list(self.tools),
            "context": list(self.context),
        }
        return {**config, "system_prompt_append": prompt, _CONFIG_KEY: kind}

    def mode_in(self, mode: str) -> str:
        """Return the subagent's mode while its session is in `mode`."""
        return narrower_mode(mode, self.mode) if self.mode else mode

    def permissions(self, permissions: Permissions) -> Permissions:
        """Return the session's `permissions`, limited to the mode of the kind if the kind sets one."""
        return permissions.narrowed(self.mode) if self.mode else permissions

    def check_context(self, task: Task) -> None:
        """Check that the task gives its subagent only what the kind accepts.

        :raises ~crow.domain.errors.ArgumentError: the kind does not accept files, or does not accept a summary of the
            caller's conversation (`state`).
        """
        for given, what in ((task.files, "files"), (task.state, "state")):
            if given and what not in self.context:
                takes = " and ".join(("its prompt", *self.context))
                raise ArgumentError(f"task: the agent {self.name} gets no {what}, only {takes}; put it into the prompt")

    def specs(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return those tools in `specs` that the kind allows. :raises ~crow.domain.errors.ArgumentError: the kind
        allows none of them."""
        if self.tools is None:
            return tuple(specs)
        allowed = tuple(spec for spec in specs if any(fnmatchcase(spec.name, name) for name in self.tools))
        if not allowed:
            wanted = ", ".join(self.tools) or "none"
            raise ArgumentError(
                f"task: the agent {self.name} may only use {wanted}, but none of these tools is available now"
            )
        return allowed


def changes_of_own(config: JsonObject) -> JsonObject:
    """Return the changes that remove the texts and keys for subagents from a subagent's configuration. They are made
    when a client opens the subagent as a session of its own."""
    append = config.get("system_prompt_append")
    before, role, after = append.rpartition(SUBAGENT_ROLE) if isinstance(append, str) else ("", "", "")
    if not role:
        return {}
    after = after.lstrip().removeprefix(_ISOLATED_ROLE)  # the rest is the instructions of the subagent's kind
    rest = f"{before.rstrip()}\n\n{after.lstrip()}".strip()
    isolated = {_ISOLATED_KEY: None} if _ISOLATED_KEY in config else {}
    return {"system_prompt_append": rest or None, **isolated}

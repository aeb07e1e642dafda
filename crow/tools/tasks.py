"""Values of the `task` tool: the kinds of subagents, their tasks, and the results."""

from __future__ import annotations

from dataclasses import dataclass

from crow.domain.messages import Usage

AGENT_CONTEXT = ("files", "state")
"""The data that the agent which starts a subagent can give to it besides the prompt: files, and a summary of its own
conversation (`state`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKind:
    """A kind of subagent."""

    name: str
    source: str
    """The path of its file."""
    description: str = ""
    is_from_workspace: bool = False
    """If set, using the kind needs the user's permission."""
    tools: tuple[str, ...] | None = None
    """The names or globs of the tools that the subagent may use. None means all. If the task also names tools, it must
    choose from these."""
    model: str = ""
    """If empty, the subagent uses the session's model."""
    mode: str = ""
    """If not empty, the subagent has at most the permissions of this mode."""
    isolated: bool = False
    """The subagent works in a layer of its own, also if the task does not ask for it."""
    context: tuple[str, ...] = AGENT_CONTEXT
    """Which of `AGENT_CONTEXT` the subagent may get."""
    problem: str = ""
    """Why the file cannot be used, as a clause without a full stop. Empty if the file can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work for a subagent."""

    title: str
    prompt: str
    tools: tuple[str, ...] | None = None
    """The names of the tools that the subagent may use, out of those that its kind allows. None allows all of these,
    except those that subagents may never use."""
    resume: str | None = None
    """The id of an earlier task to continue."""
    background: bool = False
    """If set, the call returns as soon as the subagent has started to work."""
    kind: AgentKind | None = None
    """None for a plain subagent."""
    instructions: str = ""
    """The text of the kind's agent file below the front matter. Empty for a plain subagent."""
    isolated: bool = False
    """The subagent works in a layer of its own, also if the kind does not ask for it."""
    files: tuple[str, ...] = ()
    """The paths of files whose text goes with the prompt."""
    state: bool = False
    """If set, a summary of the conversation that starts the task goes with the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentResult:
    """The result of a task."""

    id: str
    """Can be used to resume the task."""
    text: str
    """The subagent's last answer, or the error."""
    is_error: bool = False
    steps: int = 0
    usage: Usage | None = None
    cost: float | None = None
    changes: str = ""
    """The changes that the subagent has made in its layer, in words for the model."""
    is_running: bool = False
    """If set, the subagent still works in the background and has not given an answer yet."""

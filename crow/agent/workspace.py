"""Tells the user what confines commands, and which files of a workspace matter to an agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crow.agent.instructions import (
    FALLBACK_FILE,
    INSTRUCTION_FILE,
    distrust,
    file_size,
    instruction_file,
    instruction_folders,
)
from crow.domain.events import NoticeShown
from crow.domain.rendering import code
from crow.tools import AGENT_FOLDERS, SKILL_FOLDERS, AgentKind, SandboxStatus, SkillInfo
from crow.tools.layers import Recovered

_MAX_SKILLS = 200
_MAX_AGENTS = 50
_IGNORED = (
    *(".crow/config.toml", ".crow/commands", ".claude/settings.json", ".claude/settings.local.json"),
    *(".claude/commands", ".codex/config.toml", "GEMINI.md", ".gemini/settings.json", ".cursor/rules", ".mcp.json"),
    *(".cursor/mcp.json", ".vscode/mcp.json"),
)
"""Files and folders that instruct or configure other agents. Crow does not read them."""

_WHY_IGNORED = "a workspace cannot set servers, commands, endpoints, keys or permissions"
TRY = "`crow doctor` says what would help."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceContents:
    """The contents of a workspace that matter to an agent."""

    cwd: str
    instructions: tuple[tuple[str, int], ...] = ()
    """The files that the model gets as text, with their sizes in bytes."""
    left_out: tuple[tuple[str, str], ...] = ()
    """The instruction files that the model does not get, each with the reason."""
    skills: int = 0
    """The number of skills."""
    agents: int = 0
    """The number of agent files."""
    ignored: tuple[str, ...] = ()
    """The names of files and folders that crow does not read."""

    @property
    def concerns_agents(self) -> bool:
        """Whether the workspace contains anything that matters to an agent."""
        return bool(self.instructions or self.left_out or self.skills or self.agents or self.ignored)


def inspect_workspace(cwd: str, may_read: Callable[[Path], bool]) -> WorkspaceContents:
    """Find the files of a workspace that matter to an agent, except those included with `@path`. This call opens no
    file and does not walk the directory tree, but it blocks.

    `may_read` takes a resolved path and returns whether the model may get that file without a tool call.
    """
    folder = Path(cwd)
    instructions, left_out = [], []
    for directory in reversed(instruction_folders(folder)):
        file = instruction_file(directory)
        if file is None:
            continue
        try:
            reason = distrust(file.resolve(), directory, folder, may_read)
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        if reason:
            left_out.append((str(file), reason))
        else:
            instructions.append((str(file), file_size(file)))
        fallback = directory / FALLBACK_FILE
        if file != fallback and file_size(fallback) and not fallback.samefile(file):
            left_out.append((str(fallback), f"{INSTRUCTION_FILE} is used instead"))
    return WorkspaceContents(
        cwd=cwd,
        instructions=tuple(instructions),
        left_out=tuple(left_out),
        skills=min(_MAX_SKILLS, sum(1 for _ in _skill_files(folder))),
        agents=min(_MAX_AGENTS, sum(1 for _ in _agent_files(folder))),
        ignored=() if _is_home(folder) else tuple(name for name in _IGNORED if os.path.exists(folder / name)),
    )


def _is_home(folder: Path) -> bool:
    """Return whether this is the user's home directory, where the files in `_IGNORED` are the user's own settings for
    other agents."""
    try:
        return os.path.samefile(folder, os.path.expanduser("~"))
    except (OSError, ValueError):
        return False


def _skill_files(folder: Path) -> Iterator[Path]:
    for name in SKILL_FOLDERS:
        try:
            with os.scandir(folder / name) as entries:
                paths = [Path(entry.path, "SKILL.md") for entry, _ in zip(entries, range(_MAX_SKILLS), strict=False)]
        except (OSError, ValueError):
            continue
        yield from (path for path in paths if file_size(path))


def _agent_files(folder: Path) -> Iterator[Path]:
    for name in AGENT_FOLDERS:
        try:
            with os.scandir(folder / name) as entries:
                paths = [Path(entry.path) for entry, _ in zip(entries, range(_MAX_SKILLS), strict=False)]
        except (OSError, ValueError):
            continue
        yield from (path for path in paths if path.suffix == ".md" and file_size(path))


def notice_of_workspace(contents: WorkspaceContents) -> NoticeShown:
    """Return the notice about a workspace in which the user has not worked yet."""
    sentences = []
    if contents.instructions:
        names = _and_more([f"{code(path)} ({size:,} bytes)" for path, size in contents.instructions], 2)
        sentences.append(f"The model gets {names} as text.")
    if contents.left_out:
        names = _and_more([f"{code(path)} ({reason})" for path, reason in contents.left_out], 2)
        sentences.append(f"It does not get {names}." if contents.instructions else f"The model does not get {names}.")
    if contents.skills:
        number = f"There are {contents.skills} skills" if contents.skills > 1 else "There is 1 skill"
        sentences.append(f"{number}; crow asks before the model may load {'them' if contents.skills > 1 else 'it'}.")
    if contents.agents:
        several = contents.agents > 1
        number = f"There are {contents.agents} kinds of subagents" if several else "There is 1 kind of subagent"
        sentences.append(f"{number}; crow asks before the model may use {'them' if several else 'it'}.")
    if contents.ignored:
        sentences.append(f"Ignored: {_and_more([code(name) for name in contents.ignored], 4)}; {_WHY_IGNORED}.")
    if sentences:
        sentences.append("Check this before you trust the workspace; `/permissions` shows more.")
    title = f"You have not worked in {code(contents.cwd)} with crow before"
    return NoticeShown(severity="info", title=title, description=" ".join(sentences))


def notice_of_recovery(recovered: Recovered) -> NoticeShown:
    """Return the notice about the changes of a command that crow was moving into the workspace when crow was killed."""
    names = _and_more([code(path) for path in recovered.paths], 5)
    if recovered.problem:
        words = f"It could be neither completed nor taken back: {recovered.problem}. Check {names}."
        return NoticeShown(severity="error", title="A change of a command is incomplete", description=words)
    done = "completed" if recovered.is_kept else "taken back"
    words = f"Crow was killed while it moved the changes of a command into the workspace. They are {done} now: {names}."
    return NoticeShown(severity="warning", title=f"A change of a command was {done}", description=words)


def notice_of_sandbox(status: SandboxStatus) -> NoticeShown | None:
    """Return a warning if nothing confines commands, or if some of the settings for confinement cannot be used. Return
    None if all is well, or if the user has turned confinement off."""
    if status.setting == "off":
        return None
    if status.name and not status.problem and not status.has_overlay:
        words = (
            f"{status.name} confines commands, but not in layers. So commands name their access before they run, and "
            "an undo restores only files that crow could copy before. `crow doctor` says what would give layers."
        )
        return NoticeShown(severity="info", title="Commands run without layers", description=words)
    if status.name and not status.problem:
        return None
    if status.name:
        return NoticeShown(severity="warning", title="[sandbox] in config.toml", description=status.problem)
    if status.setting == "required":
        title, words = "Commands cannot be confined", "So commands with the access `read` or `write` fail."
        return NoticeShown(severity="error", title=title, description=f"{status.problem} {words} {TRY}")
    title = "Nothing confines commands"
    words = "So every command has full access, and needs your permission unless a rule allows it."
    return NoticeShown(severity="warning", title=title, description=f"{status.problem} {words} {TRY}")


def describe_sandbox(status: SandboxStatus) -> list[str]:
    """Return the part of `/permissions` that says what commands may do, as lines of Markdown."""
    if not status.withheld:
        return _describe_confinement(status)
    names = _and_more([code(name) for name in status.withheld], 8)
    words = f"Commands do not get {names}: these variables hold secrets. `pass_env` in `[sandbox]` passes some."
    return [*_describe_confinement(status), words]


def _describe_confinement(status: SandboxStatus) -> list[str]:
    setting = f'`[sandbox]` in config.toml changes this: `enabled` is "{status.setting}"'
    if not status.name:
        if status.setting == "required":
            return [
                f"Nothing can confine commands: {status.problem}",
                "Commands with the access `read` or `write` fail; commands with `full` need your permission.",
                f"{setting}. {TRY}",
            ]
        return [
            f"Nothing confines commands: {status.problem}",
            "Every command has `full` access: it can do everything that you can.",
            f"{setting}. {TRY}",
        ]
    network = "it has network access" if status.has_network else "it has no network access"
    problem = [f"Not used: {status.problem}"] if status.problem else []
    more = [f"`{name}` adds {_and_more([code(path) for path in paths], 5)}" for name, paths in _added(status) if paths]
    ways = [
        f"{status.name} holds each command to the access that it asked for:",
        "- `read`: sees the system, the workspace and your toolchains; it can write nothing, and has no network access",
        f"- `write`: can also change files in the workspace, except protected ones; {network}",
    ]
    if status.has_overlay:
        layered = (
            f"{status.name} runs each command in a layer over the workspace. Its changes are kept or dropped "
            "afterwards, as the mode, your rules or you decide."
        )
        ways = [
            layered,
            f"- `write`, in the background: changes files in the workspace at once, except protected ones; {network}",
        ]
    return [
        *ways,
        "- `full`: is not confined, and can do everything that you can",
        "; ".join([setting, f"`network` is {'true' if status.has_network else 'false'}", *more])
        + ". `crow doctor` tries it out.",
        *problem,
    ]


def _added(status: SandboxStatus) -> Iterable[tuple[str, tuple[str, ...]]]:
    return (("readable", status.readable), ("writable", status.writable))


def describe_workspace(
    contents: WorkspaceContents, skills: Iterable[SkillInfo], agents: Iterable[AgentKind] = (), *, is_known: bool
) -> list[str]:
    """Return the part of `/permissions` about the workspace, as lines of Markdown. `skills` are all skills of the
    session, and `agents` are all its kinds of subagents."""
    own = [skill for skill in skills if skill.is_from_workspace]
    lines = [f"- {code(path)} ({size:,} bytes): the model gets it as text" for path, size in contents.instructions]
    lines += [f"- {code(path)}: left out, because {reason}" for path, reason in contents.left_out]
    lines += [f"- skill {code(skill.name)} ({code(skill.source)}): crow asks before it is loaded" for skill in own[:20]]
    lines += [f"- {len(own) - 20} more skills: crow asks before these are loaded, too"] if len(own) > 20 else []
    lines += [
        f"- subagent {code(kind.name)} ({code(kind.source)}): crow asks before it is used"
        for kind in agents
        if kind.is_from_workspace and not kind.problem
    ]
    lines += [f"- {code(name)}: ignored; {_WHY_IGNORED}" for name in contents.ignored]
    new = "" if is_known else ", where you have not worked with crow before"
    head = f"The workspace is {code(contents.cwd)}{new}."
    return [f"{head} For an agent, it holds:", *lines] if lines else [f"{head} It holds nothing for an agent."]


def _and_more(names: list[str], most: int) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

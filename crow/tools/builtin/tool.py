"""What a built-in tool is: a spec, a way to look at a call, a way to run it.

Strategy: one frozen value per tool, made once. Looking announces a call and finds its faults without changing
anything; running reaches the world through the workspace and the session through the ports. What cannot be done is an
`ArgumentError` whose words go to the model as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from crow.domain.entries import CallKind
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import Access, Log, Offer, OnOutput, Outcome, Plan, Workspace
from crow.tools.jobs import Jobs
from crow.tools.process import HiddenKeys, KeySource
from crow.tools.seen import Seen
from crow.tools.skills import FoundSkill

__all__ = ["Arguments", "Around", "Builtin", "Running", "path_names", "shown_name", "shown_path", "system_words"]

Arguments: TypeAlias = Mapping[str, Any]
"""Checked against the tool's schema; optional ones may be absent."""


@dataclass(slots=True, kw_only=True)
class Around:
    """What the tools of a session share: the world, and what they remember of it. `skills` may be found anew."""

    workspace: Workspace
    jobs: Jobs
    seen: Seen = field(default_factory=Seen)
    skills: tuple[FoundSkill, ...] = ()
    fetches_private: bool = False
    keys: KeySource = HiddenKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a running call reaches: the world, the session, and whoever watches. `place` is the file or directory that
    it was allowed to touch, `allowed` its offer's `argument`; both are None if nobody judged it."""

    around: Around
    log: Log
    plan: Plan
    call_id: str
    on_output: OnOutput
    place: str | None = None
    allowed: str | None = None

    @property
    def workspace(self) -> Workspace:
        """The files and processes."""
        return self.around.workspace

    def resolve(self, path: str) -> Path:
        """The place that `path` leads to. :raises ~crow.domain.errors.ArgumentError: not the one that was allowed."""
        resolved = self.workspace.resolve(path)
        if self.place is not None and str(resolved) != self.place:
            raise ArgumentError(
                f"{path} led elsewhere when this call was allowed; call it again if {resolved} is meant"
            )
        return resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A built-in tool. `kind`, `access` and `is_barrier` hold for every call of it, faulty ones too.

    `look` may leave a fault in its offer, or raise :class:`~crow.domain.errors.ArgumentError` with the same meaning.
    """

    spec: ToolSpec
    kind: CallKind
    access: Access
    look: Callable[[Around, Arguments], Awaitable[Offer]]
    run: Callable[[Running, Arguments], Awaitable[Outcome]]
    is_barrier: bool = False


def system_words(tool: str, error: OSError) -> str:
    """What the operating system said, with the file it said it of; or what the editor said."""
    where = f": {error.filename}" if error.filename is not None else ""
    return f"{tool}: {error.strerror or str(error) or type(error).__name__}{where}"


def shown_path(workspace: Workspace, path: Path) -> str:
    """A resolved path as the client knows it: below the cwd that it gave, even if links lead there."""
    root = workspace.resolve(".")
    return str(workspace.cwd / path.relative_to(root)) if path.is_relative_to(root) else str(path)


def shown_name(workspace: Workspace, path: Path) -> str:
    """A resolved path for words and titles: relative to cwd where it lies below it."""
    root = workspace.resolve(".")
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def path_names(workspace: Workspace, path: Path) -> tuple[str, ...]:
    """A resolved path as rules may name it: absolute, and below cwd also relative to it."""
    name = shown_name(workspace, path)
    return (str(path),) if name == str(path) else (str(path), name)

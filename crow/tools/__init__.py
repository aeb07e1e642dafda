"""Tools, as the agent sees them, and what tools need from above.

Strategy: one `Toolbox` per session hides every MCP server, the built-in one among them; the world is reached through
a `Workspace`; what a tool needs of the session (its log, its plan, sub-agents) comes through the ports. The adapters
are wired by `crow.app` alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from crow.domain.entries import Announcement, PlanItem
from crow.domain.messages import Image, JsonObject, ToolCall, ToolSpec

__all__ = [
    "Access",
    "Delegate",
    "FileStat",
    "HttpServer",
    "Log",
    "McpServer",
    "Offer",
    "OnOutput",
    "Outcome",
    "Plan",
    "ServerStatus",
    "StdioServer",
    "Toolbox",
    "Workspace",
]

Access: TypeAlias = Literal["none", "read", "write", "execute", "fetch", "external"]
"""What a call does to the world: `none` touches only the session (plan, recall); `external` is an MCP server's."""

OnOutput: TypeAlias = Callable[[str], Awaitable[None]]
"""Told the whole output retained so far while a call runs; throttled by the caller of the tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioServer:
    """An MCP server to start: `command` is an executable, `env` is added to a minimal environment."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """An MCP server to call: `transport` is streamable HTTP or the older SSE."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    transport: Literal["http", "sse"] = "http"


McpServer: TypeAlias = StdioServer | HttpServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """An MCP server given for the session. `detail`: why it failed, or empty."""

    name: str
    state: Literal["starting", "ready", "failed"]
    detail: str = ""
    tools: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A call about to run, looked at but not run.

    `outside` is true when a path it touches lies outside the workspace after resolving links. `argument` is what an
    "always" answer would be about, beside the tool's name: the command line of `shell`, None elsewhere. `fault`, when
    set, is the precise error for the model: the call must not run. `is_barrier`: it writes files, so
    nothing may run beside it.
    """

    announcement: Announcement
    access: Access
    outside: bool = False
    argument: str | None = None
    fault: str | None = None
    is_barrier: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call gave. `text` is whole (the agent cuts it for the model). `announcement` replaces the first one when
    set (the diff as really applied)."""

    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()
    announcement: Announcement | None = None
    plan: tuple[PlanItem, ...] | None = None
    raw_output: JsonObject = field(default_factory=dict)


class Toolbox(Protocol):
    """All tools of one session. Opened and closed in the session's task by whoever made it."""

    def specs(self) -> tuple[ToolSpec, ...]:
        """What is offered now, in a stable order: built-ins first, then servers in the order given."""
        ...

    def servers(self) -> tuple[ServerStatus, ...]:
        """The servers given for this session."""
        ...

    async def offer(self, call: ToolCall) -> Offer:
        """Look at `call` without running it; never raises for a bad call (see `Offer.fault`)."""
        ...

    async def run(self, call: ToolCall, call_id: str, on_output: OnOutput) -> Outcome:
        """Run it. A failure is an `Outcome` with `is_error`; only cancellation and bugs are raised.

        `call_id` is handed to the ports, so that they know which call asks. Cancelled: children get SIGTERM at once
        and SIGKILL 2 s later, without being waited for here.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """`kind` of what a resolved path is; `size` in bytes, `mtime_ns` as the system says."""

    path: Path
    kind: Literal["file", "directory", "other", "missing"]
    size: int = 0
    mtime_ns: int = 0


class Workspace(Protocol):
    """The files and processes of a session: cwd and additional directories.

    Paths are absolute and resolved by `resolve`. Text comes from the editor where it serves it (unsaved buffers),
    bytes and existence from disk.
    """

    @property
    def cwd(self) -> Path:
        """Where relative paths and commands start."""
        ...

    def resolve(self, path: str) -> Path:
        """Absolute, links and `..` resolved, also for a file that does not exist yet; `~` is not expanded.

        :raises ~crow.domain.errors.ArgumentError: empty, or with a NUL.
        """
        ...

    def contains(self, path: Path) -> bool:
        """Whether a resolved path lies inside cwd or an additional directory."""
        ...

    async def stat(self, path: Path) -> FileStat:
        """What is there now."""
        ...

    async def read_bytes(self, path: Path, limit: int | None = None) -> bytes:
        """The file on disk, at most `limit` bytes. :raises OSError:"""
        ...

    async def read_text(self, path: Path) -> str:
        """The whole text as the user sees it: the editor's buffer if it is open there, else the disk's, UTF-8 with
        `surrogateescape` never used: undecodable bytes become U+FFFD. Newlines and BOM as they are.

        :raises OSError: as from disk, the editor's refusal included (`PermissionError`).
        """
        ...

    async def write_text(self, path: Path, text: str) -> str:
        """Replace the file atomically (mode kept, parents made), through the editor where it serves it, and return
        what the file holds afterwards (editors format on save). :raises OSError:"""
        ...

    async def put_back(self, path: Path, content: bytes | None) -> None:
        """Make the file hold exactly this again (mode kept, parents made), or remove it for None. :raises OSError:"""
        ...

    async def run(self, command: str, *, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """Run a shell command in its own process group, stdin closed, non-interactive environment.

        Returns the exit code (None: timed out and killed; negative: minus the signal) and stdout and stderr as they
        came, the middle dropped with a marker beyond 10 MB. Cancelled: SIGTERM to the group at once, SIGKILL after
        2 s from `reap`, no waiting here.
        """
        ...

    async def reap(self) -> None:
        """Kill what is left of cancelled commands; called by the session's task; bounded to 3 s."""
        ...


class Log(Protocol):
    """The session's log, for `recall` and for what must be stored before a file changes."""

    async def recall(self, *, query: str | None, entry: int | None, limit: int) -> str:
        """Text of entries of this session's path that match `query`, or of one entry, compacted ones included."""
        ...

    async def before_change(self, call_id: str, path: Path, before: bytes | None, after: bytes) -> None:
        """Store what `path` held (None: nothing) before the call writes `after`."""
        ...


class Plan(Protocol):
    """The session's plan."""

    def current(self) -> tuple[PlanItem, ...]:
        """The newest plan on the session's path."""
        ...


class Delegate(Protocol):
    """Runs a sub-agent; the tool that uses it is `task`."""

    async def delegate(self, call_id: str, prompt: str, tools: Sequence[str] | None) -> str:
        """Run `prompt` in a conversation of its own and return its last answer."""
        ...

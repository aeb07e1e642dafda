"""Tools, as the agent sees them, and what tools need from above.

Strategy: one `Toolbox` per session hides every MCP server, the built-in one among them; the world is reached through
a `WriteJobspace`; what a tool needs of the session (its log, its plan, sub-agents) comes through the ports. The adapters
are wired by `crow.app` alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from crow.domain.entries import Announcement, Attachment, PlanItem
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind
from crow.domain.messages import Image, JsonObject, Part, ToolCall, ToolSpec, Usage

__all__ = [
    "Access",
    "BackgroundCommand",
    "ElicitationHandler",
    "FileStat",
    "HttpServer",
    "Log",
    "McpServer",
    "OnOutput",
    "Outcome",
    "Plan",
    "PlannedCall",
    "Ports",
    "PromptArgument",
    "Protection",
    "ServerOptions",
    "ServerPrompt",
    "ServerPrompts",
    "ServerStatus",
    "SkillInfo",
    "StdioServer",
    "SubagentResult",
    "SubagentRunner",
    "Task",
    "Toolbox",
    "Workspace",
]

Access: TypeAlias = Literal["none", "read", "write", "execute", "fetch", "external"]
"""What a call does to the world: `none` touches only the session (plan, recall); `external` is an MCP server's."""

Protection: TypeAlias = Literal["none", "ask", "never"]
"""Of a path: `ask`, the user is asked about each write and no rule allows it; `never`, it is crow's own."""

OnOutput: TypeAlias = Callable[[str], Awaitable[None]]
"""Told the whole output retained so far while a call runs; throttled by the caller of the tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the user says of an MCP server. The patterns are globs over the server's own tool names.

    `allow` empty: every tool; `deny` wins. Tools that match `read_only` may be asked for in plan mode. A timeout of
    None is the general one. `problem`, when set, says why the server cannot be started as it is configured.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    start_timeout_s: float | None = None
    call_timeout_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioServer:
    """An MCP server to start: `command` is an executable, `env` is added to a minimal environment."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    options: ServerOptions = ServerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """An MCP server to call: `transport` is streamable HTTP or the older SSE."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    transport: Literal["http", "sse"] = "http"
    options: ServerOptions = ServerOptions()


McpServer: TypeAlias = StdioServer | HttpServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """An MCP server given for the session. `detail`: why it failed, also while it starts again; or empty.
    `losses`: how often it ended after it had worked, and `loss` why it did so last."""

    name: str
    state: Literal["starting", "ready", "failed"]
    detail: str = ""
    tools: int = 0
    losses: int = 0
    loss: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A call about to run, looked at but not run.

    `outside` is true when a path it touches lies outside the workspace after resolving links. `argument` is what an
    "always" answer would be about, beside the tool's name: the command line of `shell`, the URL of `fetch`, None where
    it is the tool alone. `paths` are the names under which rules may speak of the file that it touches, links resolved:
    the absolute one, and inside cwd the relative one. `tool` is whose rules hold, where it is not the name called.
    `fault`, when set, is the precise error for the model: the call must not run. `is_protected`: it writes to a path
    of protection `ask`. `is_barrier`: it writes files, so nothing may run beside it. `is_read_only`: the user's file
    says so of this external tool. `asks_once`: only a yes about exactly this `argument` allows it, and holds for the
    session; `shown` is what the user should read before.
    """

    announcement: Announcement
    access: Access
    outside: bool = False
    argument: str | None = None
    paths: tuple[str, ...] = ()
    tool: str | None = None
    fault: str | None = None
    is_protected: bool = False
    is_barrier: bool = False
    is_read_only: bool = False
    asks_once: bool = False
    shown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call gave. `text` is whole (the agent cuts it for the model). `announcement` replaces the first one when
    set (the diff as really applied). `skill` is a skill's name and text, to be given to the model after the results.
    `cost` is what models asked on the way took, in US dollars."""

    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    announcement: Announcement | None = None
    plan: tuple[PlanItem, ...] | None = None
    raw_output: JsonObject = field(default_factory=dict)
    skill: tuple[str, str] | None = None
    usage: Usage | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillInfo:
    """A skill that may be loaded. `source` says where it comes from; one `of_workspace` needs the user's permission."""

    name: str
    description: str
    source: str
    of_workspace: bool = False


class Toolbox(Protocol):
    """All tools of one session. Opened and closed in the session's task by whoever made it."""

    def specs(self) -> tuple[ToolSpec, ...]:
        """What is offered now, in a stable order: built-ins first, then servers in the order given."""
        ...

    def servers(self) -> tuple[ServerStatus, ...]:
        """The servers given for this session."""
        ...

    def skills(self) -> tuple[SkillInfo, ...]:
        """The skills that may be loaded, in a stable order."""
        ...

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        """Start the server of this name again, or every one that is not ready; the names of those that were."""
        ...

    async def offer(self, call: ToolCall) -> PlannedCall:
        """Look at `call` without running it; never raises for a bad call (see `PlannedCall.fault`)."""
        ...

    async def run(
        self, call: ToolCall, call_id: str, on_output: OnOutput, *, judged: PlannedCall | None = None
    ) -> Outcome:
        """Run it. A failure is an `Outcome` with `is_error`; only cancellation and bugs are raised.

        `call_id` is handed to the ports, so that they know which call asks. `judged` is the offer that was allowed: a
        file that the call would touch elsewhere by now, since a link was changed meanwhile, is left alone. Cancelled:
        children get SIGTERM at once and SIGKILL 2 s later, without being waited for here.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """`kind` of what a resolved path is; `size` in bytes, `mtime_ns` as the system says; `head`, the first bytes of a
    file, where they were asked for."""

    path: Path
    kind: Literal["file", "directory", "other", "missing"]
    size: int = 0
    mtime_ns: int = 0
    head: bytes = field(default=b"", repr=False)


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

    def protection(self, path: Path) -> Protection:
        """How a resolved path is protected from tools that write."""
        ...

    async def stat(self, path: Path, *, head: int = 0) -> FileStat:
        """What is there now, with the first `head` bytes if it is a file. :raises OSError: they cannot be read."""
        ...

    async def read_bytes(self, path: Path, limit: int | None = None, start: int = 0) -> bytes:
        """The file on disk, at most `limit` bytes from `start` on. :raises OSError: also of what is no regular file."""
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

    async def spawn(self, command: str, on_output: Callable[[str], None]) -> BackgroundCommand:
        """Start a command as `run` does and leave it running; whoever asks must end it. :raises OSError:"""
        ...

    @property
    def has_leftovers(self) -> bool:
        """Whether there is something for `reap` to do."""
        ...

    async def reap(self) -> None:
        """Kill what is left of cancelled commands; called by the session's task; bounded to 3 s."""
        ...


class BackgroundCommand(Protocol):
    """A command that runs in the background."""

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, None while it runs."""
        ...

    async def wait(self) -> None:
        """Until it has ended and its output was read."""
        ...

    async def end(self, grace_s: float) -> None:
        """SIGTERM to the group, SIGKILL after `grace_s`; returns within 0.3 s after that."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work for a sub-agent. `tools`: the names it may use, None for all but those that only the session has.
    `resume` is the id of an earlier task whose conversation goes on."""

    title: str
    prompt: str
    tools: tuple[str, ...] | None = None
    resume: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentResult:
    """How a task ended. `id` resumes it; `text` is the last answer, or what went wrong."""

    id: str
    text: str
    is_error: bool = False
    steps: int = 0
    usage: Usage | None = None
    cost: float | None = None


class SubagentRunner(Protocol):
    """Runs sub-agents; the tool that uses it is `task`."""

    async def delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        """Run a task with the tools of `toolbox` in a conversation of its own, telling its progress.

        :raises ~crow.domain.errors.ArgumentError: an unknown tool, or no such task.
        """
        ...


class ElicitationHandler(Protocol):
    """Hands questions of MCP servers to the user."""

    @property
    def elicits(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that can be asked."""
        ...

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask. An editor that fails, or answers nonsense, dismisses the question."""
        ...

    async def elicited(self, question_id: str) -> None:
        """What a question led to is done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What tools may ask of the session. Without `delegate` there is no `task`; without `asker` questions of servers
    are declined."""

    log: Log
    plan: Plan
    delegate: SubagentRunner | None = None
    asker: ElicitationHandler | None = None


# FROM tools.prompts: The prompts that MCP servers offer, as the agent sees them: templates that the server fills in
# when they are used.


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgument:
    """What a prompt is filled in with."""

    name: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrompt:
    """A prompt on offer. `name` is `server:prompt`, unique in the session, without blanks; `server` is for people."""

    name: str
    server: str
    description: str
    arguments: tuple[PromptArgument, ...] = ()


class ServerPrompts(Protocol):
    """The prompts of a session's servers."""

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """What is offered now, in the order of the servers; only of those that are ready."""
        ...

    async def prompt(self, name: str) -> ServerPrompt | None:
        """The prompt of this name. A server that is still starting is waited for, one that has failed is started
        again; None: no server has it, or its server is not there."""
        ...

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """What the prompt says with these arguments; not empty.

        :raises ~crow.domain.errors.ToolServerError: the server is gone, refused, or gave nothing that can be used.
        """
        ...

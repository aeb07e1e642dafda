"""Tools as the agent sees them, and what tools need from the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from crow.domain.entries import Announcement, Attachment, PlanItem
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind
from crow.domain.messages import Image, JsonObject, Part, ToolCall, ToolSpec, Usage

Access: TypeAlias = Literal["none", "read", "write", "execute", "fetch", "external"]
"""The effect of a call: `none` touches only the session (plan, recall), `external` is a call of an MCP server."""

Protection: TypeAlias = Literal["none", "ask", "never"]
"""Of a path: with `ask` the user is asked about each write and no rule allows it; `never` is for crow's own files."""

OnOutput: TypeAlias = Callable[[str], Awaitable[None]]
"""Called with the whole output kept so far while a call runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A call as it would run.

    `outside`: it touches a path outside the workspace, links resolved. `argument`: what a permanent permission would
    be for besides the tool's name: the command line of `shell`, the URL of `fetch`, else None. `paths`: the names that
    rules may use for the file it touches, links resolved: absolute, and inside cwd also relative. `tool`: the tool
    whose rules apply, if not the one called. `fault`: the error for the model; the call must not run.

    `is_protected`: it writes to a path of protection `ask`. `is_barrier`: it writes files, so nothing may run in
    parallel. `is_read_only`: the user's configuration says so of this external tool. `asks_once`: only permission for
    exactly this `argument` allows it, and lasts for the session; `shown` is the text that the user should read first.
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
    """The result of a call.

    `text` is complete; the agent cuts it for the model. `announcement` replaces the planned one (the diff as applied).
    `skill` is the name and text of a skill, given to the model after the results. `cost` is what models used by the
    call cost, in US dollars.
    """

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
    """A skill. `source` is the path of its file. One `of_workspace` needs the user's permission."""

    name: str
    description: str
    source: str
    of_workspace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """An MCP server of the session. `detail`: why it failed, also while it starts again. `losses`: how often it ended
    after it had worked; `loss`: why it ended the last time."""

    name: str
    state: Literal["starting", "ready", "failed"]
    detail: str = ""
    tools: int = 0
    losses: int = 0
    loss: str = ""


class Toolbox(Protocol):
    """All tools of one session. It is opened and closed in the session's task."""

    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools on offer now in a stable order: built-in ones, then those of the servers."""

    def servers(self) -> tuple[ServerStatus, ...]:
        """The session's MCP servers."""

    def skills(self) -> tuple[SkillInfo, ...]:
        """The skills on offer in a stable order."""

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        """Restart the server with this name, or all that are not ready; returns the names of those restarted."""

    async def offer(self, call: ToolCall) -> PlannedCall:
        """Plan `call` without running it. A bad call does not raise; it has a `fault`."""

    async def run(
        self, call: ToolCall, call_id: str, on_output: OnOutput, *, judged: PlannedCall | None = None
    ) -> Outcome:
        """Run `call`. A failure is an `Outcome` with `is_error`; only cancellation and bugs are raised.

        The ports get `call_id`. `judged` is the planned call that was allowed: if a link was changed since and the
        call would now touch another file, it fails. On cancellation child processes get SIGTERM at once and SIGKILL
        2 s later; this does not wait for them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """A resolved path. `size` in bytes; `head` has the first bytes of a file if they were requested.

    Two equal ones of a file mean that it was not written in between, as far as `mtime_ns` can tell.
    """

    path: Path
    kind: Literal["file", "directory", "other", "missing"]
    size: int = 0
    mtime_ns: int = 0
    head: bytes = field(default=b"", repr=False)


class BackgroundCommand(Protocol):
    """A command that runs in the background."""

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""

    async def wait(self) -> None:
        """Wait until it has ended and its output was read."""

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM to the group, SIGKILL after `grace_s`; returns within 0.3 s after that."""


class Workspace(Protocol):
    """The files and processes of a session: cwd and additional directories.

    Paths are absolute and come from `resolve`. Text comes from the editor if it serves it (with unsaved changes),
    bytes and existence from disk.
    """

    @property
    def cwd(self) -> Path:
        """Where relative paths and commands start."""

    def resolve(self, path: str) -> Path:
        """The absolute path, links and `..` resolved, even if no such file exists; `~` is not expanded.

        :raises ~crow.domain.errors.ArgumentError: empty, too long, or with a NUL.
        """

    def contains(self, path: Path) -> bool:
        """Whether a resolved path is inside cwd or an additional directory."""

    def protection(self, path: Path) -> Protection:
        """The protection of a resolved path from tools that write."""

    async def stat(self, path: Path, *, head: int = 0) -> FileStat:
        """What is at the path, with the first `head` bytes of a file. :raises OSError: it cannot be read."""

    async def read_bytes(self, path: Path, limit: int | None = None, start: int = 0) -> bytes:
        """At most `limit` bytes from `start`, from disk. :raises OSError: also if it is not a regular file."""

    async def read_text(self, path: Path) -> str:
        """The whole text as the user sees it: the editor's buffer if open there, else from disk as UTF-8. Undecodable
        bytes become U+FFFD; newlines and BOM stay.

        :raises OSError: it cannot be read, or the editor refuses (`PermissionError`).
        """

    async def write_text(self, path: Path, text: str) -> str:
        """Replace the file in one step, through the editor if it serves it; keeps the mode and makes parents.

        Returns what the file holds then, because editors format on save. :raises OSError: it cannot be written.
        """

    async def put_back(self, path: Path, content: bytes | None) -> None:
        """Restore this content (keeps the mode, makes parents), or remove the file if None. :raises OSError:"""

    async def run(self, command: str, *, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """Run a shell command in its own process group, without input or a terminal.

        Returns the exit code (None: timed out and killed; negative: minus the signal), and standard output and error
        as they came; beyond 10 MB a marker replaces the middle. On cancellation the group gets SIGTERM at once, and
        SIGKILL 2 s later from `reap`; this does not wait for it.
        """

    async def spawn(self, command: str, on_output: Callable[[str], None]) -> BackgroundCommand:
        """Start a command like `run` and leave it running. The caller must end it. :raises OSError: it cannot start."""

    @property
    def has_leftovers(self) -> bool:
        """Whether `reap` has something to do."""

    async def reap(self) -> None:
        """Kill the remaining processes of cancelled commands, within 3 s. The session's task calls it."""


class Log(Protocol):
    """The session's log."""

    async def recall(self, *, query: str | None, entry: int | None, limit: int) -> str:
        """Text of the entries on the session's path that match `query`, or of one entry; also of compacted ones."""

    async def before_change(self, call_id: str, path: Path, before: bytes | None, after: bytes) -> None:
        """Store what the file held (None: there was none) before the call writes `after`."""


class Plan(Protocol):
    """The session's plan."""

    def current(self) -> tuple[PlanItem, ...]:
        """The newest plan on the session's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work for a sub-agent. `tools` are the names it may use; None for all except those only for the session.
    `resume` is the id of an earlier task to continue."""

    title: str
    prompt: str
    tools: tuple[str, ...] | None = None
    resume: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentResult:
    """The end of a task. `id` resumes it; `text` is the last answer, or the error."""

    id: str
    text: str
    is_error: bool = False
    steps: int = 0
    usage: Usage | None = None
    cost: float | None = None


class SubagentRunner(Protocol):
    """Runs sub-agents for the `task` tool."""

    async def delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        """Run a task in its own conversation with the tools of `toolbox`, and report progress.

        :raises ~crow.domain.errors.ArgumentError: an unknown tool, or no such task.
        """


class ElicitationHandler(Protocol):
    """Passes questions of MCP servers to the user."""

    @property
    def elicits(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that the editor supports."""

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask the user. An editor that fails or sends an invalid answer dismisses the question."""

    async def elicited(self, question_id: str) -> None:
        """Report that the server has finished what the question was about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What tools may use of the session. Without `delegate` there is no `task` tool; without `asker` questions of
    servers are declined."""

    log: Log
    plan: Plan
    delegate: SubagentRunner | None = None
    asker: ElicitationHandler | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The user's options for an MCP server. The patterns are globs over the server's own tool names.

    An empty `allow` allows every tool; `deny` wins. Tools that match `read_only` may be used in plan mode. A timeout
    of None is the general one. `problem` says why the server cannot be started as configured.
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
    """An MCP server to connect to: `transport` is streamable HTTP or the older SSE."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    transport: Literal["http", "sse"] = "http"
    options: ServerOptions = ServerOptions()


McpServer: TypeAlias = StdioServer | HttpServer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgument:
    """An argument of a server's prompt."""

    name: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrompt:
    """A prompt that an MCP server offers. `name` is `server:prompt`, unique in the session and without blanks;
    `server` is the name to show."""

    name: str
    server: str
    description: str
    arguments: tuple[PromptArgument, ...] = ()


class ServerPrompts(Protocol):
    """The prompts of a session's MCP servers."""

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts on offer now, in the order of the servers; only of servers that are ready."""

    async def prompt(self, name: str) -> ServerPrompt | None:
        """The prompt with this name, None if no ready server has it. Waits for a server that is starting, and starts
        a failed one again."""

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """The prompt's content with these arguments; not empty.

        :raises ~crow.domain.errors.ToolServerError: the server is gone, refused, or sent nothing usable.
        """

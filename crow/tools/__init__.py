"""The interface that tools offer to the agent, and the interfaces that tools need from the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from crow.domain.entries import Announcement, Attachment, PlanItem
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind
from crow.domain.messages import Image, JsonObject, ToolCall, ToolSpec, Usage
from crow.tools.in_context import InContext, always
from crow.tools.layers import Changes, Layer
from crow.tools.layers.session import Layers
from crow.tools.network import CommandNetwork, Host, HostVerdict, Use
from crow.tools.process import Process
from crow.tools.sampling import Sampler
from crow.tools.tasks import AGENT_CONTEXT as AGENT_CONTEXT
from crow.tools.tasks import AgentKind as AgentKind
from crow.tools.tasks import SubagentResult as SubagentResult
from crow.tools.tasks import Task as Task
from crow.tools.urls import NO_URL_RULES, UrlRules

Access: TypeAlias = Literal["none", "read", "write", "execute", "fetch", "external"]
"""What a call may affect. With `none`, the call affects nothing outside the session: for example, it only changes the
plan. With `external`, the call runs a tool of an MCP server and may affect anything."""

CommandAccess: TypeAlias = Literal["read", "write", "full"]
"""What a command may do: `read` changes nothing, `write` changes files in the workspace, and `full` is not confined. By
default, only `full` can use the network. The user's settings can also allow it for `write`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStatus:
    """The state of the sandbox that confines the commands of a workspace."""

    name: str = ""
    """The sandbox with its version, such as `bubblewrap 0.8.0`. Empty if nothing confines commands."""
    problem: str = ""
    """If `name` is empty, a sentence that tells the user why."""
    setting: Literal["auto", "off", "required"] = "auto"
    """The value of `sandbox.enabled`."""
    has_overlay: bool = False
    """If set, commands can run in layers."""
    has_network: bool = False
    """If set, commands with the access `write` can use the network."""
    readable: tuple[str, ...] = ()
    """Additional directories that commands can read, from the user's settings."""
    writable: tuple[str, ...] = ()
    """Additional directories that commands can change, from the user's settings."""
    withheld: tuple[str, ...] = ()
    """The environment variables that no command gets, because they hold secrets other than keys of endpoints."""


Protection: TypeAlias = Literal["none", "ask", "never"]
"""How a path is protected from tools that write it, or from tools that read it. With `ask`, the user is asked about
each access, and no rule can allow an access in advance. With `never`, nobody can allow an access. For example, crow's
own files are protected in this way."""

SKILL_FOLDERS = (".crow/skills", ".agents/skills", ".claude/skills")
"""Folders of a workspace that may hold skills."""

AGENT_FOLDERS = (".crow/agents", ".agents/agents", ".claude/agents")
"""Folders of a workspace that may hold agent files. Each agent file describes a kind of subagent."""

AGENT_MODES = ("plan", "ask", "accept-edits", "auto")
"""The permission modes that an agent file can name, the strictest first."""

OnOutput: TypeAlias = Callable[[str], Awaitable[None]]
"""A function that is called repeatedly while a tool call runs, each time with all of the output kept so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedPaths:
    """The files that the user's deny rules cover."""

    patterns: tuple[str, ...] = ()
    """Regular expressions that ignore case. A file is excluded if a pattern matches its whole absolute path. A file
    inside cwd is also excluded if a pattern matches its whole path relative to cwd. Both paths are compared in
    Unicode's form NFC."""
    places: tuple[str, ...] = ()
    """The paths of the rules, each only up to its first part with a wildcard: absolute, or relative to cwd."""


NOTHING_EXCLUDED = ExcludedPaths()


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """The file that a call touches. Links are resolved in its paths, except in `other_paths`."""

    rule_paths: tuple[str, ...] = ()
    """The paths by which permission rules may name the file: the absolute and, inside cwd, also the relative path."""
    other_paths: tuple[str, ...] = ()
    """The path as it was given, and hard links to the file. Only deny rules use these paths."""
    has_hard_links: bool = False
    """The file has several names."""
    has_unknown_names: bool = False
    """At least one of the file's hard links was not found."""
    is_outside: bool = False
    """The file is outside the workspace."""
    is_protected: bool = False
    """The call writes to a path whose protection is `ask`, or reads a secret place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What a permission for a call would cover, and which rules cover the call."""

    argument: str | None = None
    """What a permanent permission would cover in addition to the tool's name, such as the command line of `shell` or
    the URL of `fetch`. None if it would cover only the name."""
    wider_arguments: tuple[str, ...] = ()
    """If `asks_once` is set, an allow rule about one of these also covers the call."""
    narrower_arguments: tuple[str, ...] = ()
    """A deny rule about one of these also covers the call."""
    asks_once: bool = False
    """The user must be asked, but only until they have allowed exactly this `argument` or one of `wider_arguments` in
    this session."""
    rule_tool: str | None = None
    """The tool whose rules apply, if that is not the called tool."""
    inner_arguments: str | None = None
    """The arguments that the call passes on to `rule_tool`, if the call does nothing else."""
    like: tuple[str, ...] = ()
    """Other tools that together would do the same as the call. A deny rule about one of them also covers the call.
    Allow rules cover the call if they cover all of these tools."""
    is_read_only: bool = False
    """The tool belongs to an MCP server, and the user's configuration says that it only reads."""
    fingerprint: str = ""
    """A hash of the called MCP tool's title, description and schema. An answer "always" holds only for this
    fingerprint."""
    definition: str = ""
    """The title, description and schema of that tool as text, which may be cut."""


_NOTHING_TOUCHED = Touched()
_NAME_ALONE = Coverage()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """The plan of a tool call: what the call would do if it ran."""

    announcement: Announcement
    """The title, files and diffs that clients show before the call runs."""
    review_text: str = ""
    """The text that the user should read before they answer."""
    access: Access
    """What the call may affect."""
    command_access: CommandAccess | None = None
    """The access that the kernel gives to the command. `full` if nothing confines it, None if there is no command."""
    requested_access: CommandAccess | None = None
    """The access that the model asked for."""
    touched: Touched = _NOTHING_TOUCHED
    coverage: Coverage = _NAME_ALONE
    excluded: ExcludedPaths = NOTHING_EXCLUDED
    """The files that a search or a confined command must leave out; the agent sets this value."""
    url_rules: UrlRules = NO_URL_RULES
    """The rules for the redirects of a fetch; the agent sets this value."""
    fault: str | None = None
    """The error message for the model. A call with a fault must not run."""
    unknown_tool: str = ""
    """The called name if no tool has it. The agent then adds the names of the offered tools to `fault`."""
    is_barrier: bool = False
    """The call writes files, so no other call may run in parallel."""
    is_isolated: bool = False
    """The files that the call writes are in the layer of a subagent, and the workspace stays as it is."""
    parts: tuple[PlannedCall, ...] = ()
    """One plan for each file, if the call touches several. `touched` and `coverage` of a file are then in its part, and
    the call may run only if each part may."""
    is_followed: bool = False
    """A later call of the same step also changes files, so the user's checks wait; the agent sets this value."""
    changed: tuple[str, ...] = ()
    """The absolute paths of the files that a command has changed in its layer. Set only in a plan that is made after
    the command has run, for the decision about these changes."""
    silently_changed: tuple[str, ...] = ()
    """The other changed files, which git ignores. Nobody is asked about them; only deny rules use these paths."""
    changed_below: str = ""
    """The resolved cwd of the session, if files were changed. Rules may name these files relative to cwd."""

    @property
    def each(self) -> tuple[PlannedCall, ...]:
        """The parts, or the call itself if it has none."""
        return self.parts or (self,)

    @property
    def paths(self) -> tuple[str, ...]:
        """The absolute paths of the touched files, as far as they are known in advance."""
        return tuple(dict.fromkeys(part.touched.rule_paths[0] for part in self.each if part.touched.rule_paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a call."""

    text: str
    """The complete text. The agent shortens it for the model."""
    is_error: bool = False
    images: tuple[Image, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    announcement: Announcement | None = None
    """Replaces the announcement in the plan, for example to show the diff that was really applied."""
    plan: tuple[PlanItem, ...] | None = None
    raw_output: JsonObject = field(default_factory=dict)
    skill: tuple[str, str] | None = None
    """The name and the text of a skill. The model gets this text after the results of the calls."""
    unloads: str = ""
    """The name of a skill whose text the model no longer gets."""
    usage: Usage | None = None
    cost: float | None = None
    """The cost in US dollars of the models that the call used."""
    max_chars: int | None = None
    """If set, the agent shortens the text to this many characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillInfo:
    """A skill."""

    name: str
    description: str
    source: str
    """The path of its file."""
    is_from_workspace: bool = False
    """If set, loading the skill needs the user's permission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The state of an MCP server of the session."""

    name: str
    state: Literal["starting", "ready", "failed"]
    detail: str = ""
    """Why the server failed. It stays set while the server starts again."""
    tools: int = 0
    """The number of tools."""
    resources: int = 0
    """The number of resources and templates."""
    losses: int = 0
    """The number of times that the server was ready and then failed."""
    loss: str = ""
    """The reason for the latest of these failures."""


class Toolbox(Protocol):
    """All tools of one session. The session's task opens and closes the toolbox."""

    def specs(self) -> tuple[ToolSpec, ...]:
        """Return the tools that the model can use now, in a stable order: the built-in tools, then those of servers."""

    def deferred(self) -> tuple[ToolSpec, ...]:
        """Return the tools of servers that `specs` leaves out, because the model finds and calls them with other
        tools."""

    def isolated(self, task_id: str) -> AbstractAsyncContextManager[Toolbox]:
        """Open the built-in tools for a subagent that works in its own layer. Close them in the task that opened them.

        :raises ~crow.domain.errors.ArgumentError: this workspace has no layers, or the subagent's layer cannot be used.
        """

    async def changes_of(self, task_id: str) -> str:
        """Return a text for the model about the changes of a subagent in its layer. :raises
        ~crow.domain.errors.ArgumentError: the layer cannot be used."""

    def narrowed(self, names: Collection[str]) -> Toolbox:
        """Return a toolbox with only the tools of these names. If some of these tools are deferred, it also has the
        tools with which the model finds and calls deferred tools."""

    def servers(self) -> tuple[ServerStatus, ...]:
        """Return the session's MCP servers."""

    def skills(self) -> tuple[SkillInfo, ...]:
        """Return the skills on offer in a stable order."""

    def agents(self) -> tuple[AgentKind, ...]:
        """Return the kinds of subagents in a stable order, including those that cannot be used."""

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        """Restart the server with this name. Without a name, restart all servers that are not ready. Return the names
        of the restarted servers."""

    def prepare(self) -> None:
        """Start to prepare for tool calls. The preparations run in the background while the model answers."""

    def understood(self, call: ToolCall) -> ToolCall:
        """Return `call` in terms of the tools on offer, if it was clearly meant for one of them but written for the
        tools of another agent. Otherwise return it as it is."""

    async def plan(self, call: ToolCall) -> PlannedCall:
        """Plan `call` without running it. For an invalid call, return a plan with a `fault` instead of raising an
        error."""

    async def run(
        self, call: ToolCall, call_id: str, on_output: OnOutput, *, planned: PlannedCall | None = None
    ) -> Outcome:
        """Run `call`. A failure is returned as an `Outcome` with `is_error`. Only cancellation and errors in crow
        itself are raised.

        The session's ports get `call_id`. `planned` is the planned call that was allowed. If a link has changed since
        the call was planned, so that the call would now touch another file, the call fails. On cancellation, child
        processes get SIGTERM at once and SIGKILL 2 s later. This method does not wait for their end.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """The state of a resolved path. If two states of the same path are equal, the file was probably not written between
    them."""

    path: Path
    kind: Literal["file", "directory", "other", "missing"]
    size: int = 0
    """In bytes."""
    mtime_ns: int = 0
    """The time of the last write. A file may be written twice within the resolution of this time."""
    mode: int | None = field(default=None, compare=False)
    """The permission bits of a file."""
    head: bytes = field(default=b"", repr=False)
    """The first bytes of the file, if they were requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The result of a program that the user configured, such as a hook."""

    code: int | None
    """The exit code. None if the program took too long and crow ended it."""
    output: bytes
    """The beginning of the program's standard output."""
    errors: bytes
    """The beginning of the program's standard error."""
    is_cut: bool = False
    """If set, `output` is incomplete."""


class BackgroundCommand(Protocol):
    """A command that runs in the background."""

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the command; None while it runs."""

    async def wait(self) -> None:
        """Wait until the command has ended and its output was read."""

    async def check(self) -> None:
        """Restore protected files that the command has changed. Call this every few seconds while it runs."""

    async def serve(self) -> None:
        """Serve the command's network until the command has ended."""

    async def refresh(self) -> None:
        """Let a command in a layer see the files that were replaced in the workspace meanwhile."""

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM to the process group, and SIGKILL after `grace_s`. Return at most 0.3 s after `grace_s`."""


class Workspace(Protocol):
    """The files and processes of a session: cwd and additional directories.

    Paths are absolute and come from `resolve`. If the editor serves a file, its text comes from the editor and includes
    unsaved changes. Bytes and existence are always read from disk.
    """

    @property
    def cwd(self) -> Path:
        """Where relative paths and commands start."""

    @property
    def directories(self) -> tuple[Path, ...]:
        """cwd and the additional directories, as they were given: links are not resolved."""

    def resolve(self, path: str) -> Path:
        """Return the absolute path, with links and `..` resolved. The file need not exist. `~` is not expanded. A name
        may be written in another Unicode normalization form than on the disk.

        :raises ~crow.domain.errors.ArgumentError: the path is empty, too long, or has a NUL.
        """

    def contains(self, path: Path) -> bool:
        """Return whether a resolved path is inside cwd or an additional directory."""

    def protection(self, path: Path) -> Protection:
        """Return how a resolved path is protected from tools that write."""

    def read_protection(self, path: Path) -> Protection:
        """Return how a resolved path is protected from tools that read. The result is `ask` for a file in a secret
        place and for a hard link to such a file, and `never` for crow's own configuration and data."""

    async def find_names(
        self, paths: Collection[Path], places: Sequence[str] = ()
    ) -> Mapping[Path, tuple[tuple[str, ...], bool]]:
        """For each file with hard links, return its absolute names in the workspace and below `places`, and whether
        these are all of its names. The result contains no files without hard links. The search ends after a limited
        number of directory entries."""

    async def stat(self, path: Path, *, head: int = 0) -> FileStat:
        """Return the state of the path, which need not exist. The state of a file includes its first `head` bytes.
        :raises OSError: the path cannot be read."""

    async def read_bytes(self, path: Path, limit: int | None = None, start: int = 0) -> bytes:
        """Return at most `limit` bytes of the file on disk, beginning at byte `start`. :raises OSError: the file cannot
        be read, or is not a regular file."""

    async def read_text(self, path: Path) -> str:
        """Return the whole text as the user sees it: the editor's buffer if the file is open there, else the file on
        disk as UTF-8. Bytes that cannot be decoded become U+FFFD. Newlines and the byte order mark are not changed.

        :raises OSError: the file cannot be read. If the editor refuses the request, the error is a `PermissionError`.
        """

    async def write_text(self, path: Path, text: str) -> str:
        """Replace the file in one step. If the editor serves the file, the editor replaces it. Keep the file's mode,
        and create missing parent directories.

        Return the text of the file afterwards. It may differ from `text`, because editors may format a file when they
        save it. :raises OSError: the file cannot be written.
        """

    async def restore(self, path: Path, content: bytes | None, *, mode: int | None = None) -> None:
        """Give a file this content again, or remove the file if `content` is None. Keep the file's mode, and create
        missing parent directories. If there is no file, the new one gets the permission bits `mode`. :raises OSError:
        the file cannot be written or removed."""

    @property
    def is_bounded(self) -> bool:
        """Whether tools can never leave the workspace, even if a user or a rule allows it. In that case, paths outside
        the workspace have the protection `never`."""

    @property
    def confines(self) -> bool:
        """Whether commands with the access `read` or `write` are confined by the kernel. If not, every command has full
        access. The value is valid only after a call of `sandbox_status`."""

    @property
    def credential_hosts(self) -> tuple[str, ...]:
        """The hosts for which crow adds a credential of the user to requests of commands in layers."""

    async def sandbox_status(self) -> SandboxStatus:
        """Return the state of the sandbox. The first call in this process tests the sandbox, in a thread."""

    def explain_failure(self, access: CommandAccess, output: str, *, has_failed: bool = True) -> str:
        """Return a line for the model if a command's output shows that its access was not enough; otherwise return an
        empty string. The line says which access or setting would be enough. `has_failed` says whether the command
        failed. A command that succeeds may also have lacked access for a part of its work."""

    async def run(
        self,
        command: str,
        *,
        access: CommandAccess,
        timeout_s: float,
        on_output: OnOutput,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> tuple[int | None, str]:
        """Run a shell command in its own process group, without input or a terminal. If the command is confined, it
        cannot read the `excluded` files. With a `layer`, its changes to files in the workspace stay in the layer. With
        a `network`, a confined command reaches the hosts that the network allows, if the sandbox can do that.

        Return the exit code, and the text that the command wrote to standard output and standard error, in the order
        of arrival. If the command timed out and was killed, the code is None. If a signal ended the command, the code
        is the negative signal number. If the output has more than 10 million characters, a marker replaces its middle.
        On cancellation, the process group gets SIGTERM at once, and `reap` sends SIGKILL 2 s later. This method does
        not wait for the end of the group.
        """

    async def spawn(
        self,
        command: str,
        on_output: Callable[[str], None],
        *,
        access: CommandAccess,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> BackgroundCommand:
        """Start a command in the same way as `run`, and leave it running. The caller must end it, and call `serve`
        meanwhile if the command has a `network`. :raises OSError: the command cannot be started."""

    async def run_program(self, argv: Sequence[str], data: bytes, *, timeout_s: float, max_bytes: int) -> ProgramResult:
        """Run a program that the user configured, such as a hook, in cwd and with `data` as its input. The program is
        not confined. Its environment contains no endpoint keys, but may contain other secrets of the user. All of these
        are masked in its output. If `argv` names the program without a directory, the program is looked up on PATH, but
        not in the workspace.

        At most `max_bytes` of the program's output and `max_bytes` of its errors are kept. Processes that the program
        leaves running are ended. If the call is cancelled, the program is ended in the same way as a command.

        :raises OSError: the program cannot be started.
        """

    @property
    def layers(self) -> Layers | None:
        """The layers in which commands can run. None if this workspace has none."""

    def find_program(self, name: str) -> str | None:
        """Return the absolute path of a program that crow starts for itself; None if there is none that can be trusted.
        See :meth:`crow.programs.Programs.find`. This call blocks."""

    async def start_confined(
        self,
        argv: Sequence[str],
        *,
        access: Literal["read", "write"],
        cwd: Path,
        directory: Path,
        env: Mapping[str, str],
        on_output: Callable[[bytes], None],
        on_errors: Callable[[bytes], None],
    ) -> Process:
        """Start a program that takes input and keeps running, such as an MCP server. The sandbox confines the program
        in the same way as it confines commands with this `access`.

        `directory` is the program's own directory for temporary files; the program can write to it. End the program
        with `end_confined`.

        :raises OSError: the program cannot be started, or nothing confines programs here. The program never runs
            unconfined.
        """

    async def end_confined(self, process: Process, grace_s: float) -> None:
        """End a program that `start_confined` started. The program gets SIGTERM, and SIGKILL after `grace_s`."""

    @property
    def has_leftovers(self) -> bool:
        """Whether cancelled commands have left processes that `reap` must kill."""

    async def reap(self) -> None:
        """Kill the remaining processes of cancelled commands, within 3 s. The session's task calls this method."""

    async def close(self) -> None:
        """Remove the directories that commands used. The session's task calls this method at the end."""


RecallScope: TypeAlias = Literal["this", "workspace", "all"]
"""The sessions that `recall` searches: this session, all sessions of the same working directory, or all sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallQuery:
    """A query of `recall`."""

    words: str = ""
    """Find the entries that contain all of these words."""
    entry: int | None = None
    """The id of an entry to read. With `words`, find the places in this entry where one of the words occurs."""
    session: str | None = None
    """If given, only this session is searched."""
    scope: RecallScope = "this"
    since_ms: int | None = None
    """Only entries at or after this time are searched (Unix ms). None means no limit."""
    before_ms: int | None = None
    """Only entries before this time are searched (Unix ms). None means no limit."""


class Log(Protocol):
    """The part of the session's log that tools use."""

    async def recall(self, query: RecallQuery, *, limit: int) -> str:
        """Return the text that `query` asks for, with at most `limit` entries or places. Compacted entries are
        included. For any scope other than `this`, the caller must first get the user's permission."""

    async def before_change(
        self, call_id: str, path: Path, before: bytes | None, after: bytes | None, *, mode: int | None = None
    ) -> None:
        """Record that a tool call is about to replace the content of a file. `before` is the old content, and `mode`
        has the permission bits. Both are None if there was no file. `after` is the new content, or None if the file is
        removed."""

    async def before_keeping(self, call_id: str, change_set: str, directory: Path) -> None:
        """Record that a change set is about to be moved into the workspace at `directory`."""


class ChangeReviewer(Protocol):
    """Decides about the changes that commands have made in layers, and about the hosts that commands may reach."""

    async def review(self, call_id: str, changes: Changes, command: PlannedCall | None = None) -> str:
        """Decide whether the changes that a command made in a layer are kept, and ask the user where needed. Return an
        empty string if they are kept, otherwise the reason for the model. `call_id` is the call that asks. If an
        earlier call started the command, `command` is the plan of that call."""

    async def review_host(self, call_id: str, host: Host, use: Use | None = None) -> HostVerdict:
        """Decide whether the command of a call may reach a host and use the user's credential there, and ask the user
        where needed."""

    async def decide_host(self, command: PlannedCall, host: Host, use: Use | None = None) -> HostVerdict:
        """Decide whether a background command, whose plan is `command`, may reach a host and use the user's credential
        there. The user is not asked: if a question would be needed, the answer is a refusal."""


class Plan(Protocol):
    """The session's plan."""

    def current(self) -> tuple[PlanItem, ...]:
        """Return the newest plan on the session's path."""


class SubagentRunner(Protocol):
    """Runs subagents for the `task` tool."""

    async def delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        """Run a task in its own conversation with the tools of `toolbox`, and report progress.

        :raises ~crow.domain.errors.ArgumentError: a tool is unknown, or the task to resume does not exist.
        """

    async def check_ended(self, task_id: str) -> None:
        """Check that this is a task of the session, and that it has ended.

        :raises ~crow.domain.errors.ArgumentError: there is no such task, or it is still running.
        """


class AgentPolicy(Protocol):
    """Decides which kinds of subagents the model gets."""

    def may_offer(self, kind: AgentKind) -> bool:
        """Return whether the user's rules allow crow to read the kind's file. This call blocks the thread."""

    def has_model(self, name: str) -> bool:
        """Return whether the user can choose this model."""


class ElicitationHandler(Protocol):
    """Passes questions of MCP servers to the user."""

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that the editor supports."""

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask the user as soon as all earlier questions have been answered, and return the answer. The answer is
        `decline` if too many questions are waiting, and `cancel` if the editor fails or sends an invalid answer."""

    async def finish_question(self, question_id: str) -> None:
        """Tell the editor that the page of the question with this id is no longer needed."""


class WatchedCommand(Protocol):
    """The parts of a background command that a session uses while it waits for the command's end."""

    @property
    def id(self) -> str:
        """The name that the model uses for the command."""

    @property
    def line(self) -> str:
        """The command line."""

    @property
    def state(self) -> str:
        """The state in words, such as `ended with exit code 1`."""

    def is_known(self) -> bool:
        """Return whether the model has been told that the command ended."""

    @property
    def is_layered(self) -> bool:
        """Whether its changes stay in a layer until `shell_output` looks at them."""

    @property
    def waiting(self) -> str:
        """The changes in its layer when it ended, in words. Empty while it runs, or if there are none."""

    async def ended(self) -> None:
        """Wait until the command has ended."""


class BackgroundWatcher(Protocol):
    """Tells the model when a background command has ended."""

    async def watch(self, call_id: str, command: WatchedCommand) -> None:
        """Watch a command that the call has started. Return at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The parts of the session that tools may use."""

    log: Log
    plan: Plan
    reviewer: ChangeReviewer | None = None
    """If None, the changes of commands in layers are dropped, and commands reach no hosts."""
    subagents: SubagentRunner | None = None
    """If None, there is no `task` tool."""
    agents: AgentPolicy | None = None
    elicitation: ElicitationHandler | None = None
    """If None, questions from servers are declined."""
    sampler: Sampler | None = None
    """If None, servers cannot use the model."""
    background: BackgroundWatcher | None = None
    """If None, the model is not told when a background command ends."""
    in_context: InContext | None = always
    """Tells whether the model still gets the calls that read or wrote files. If None, the model knows all files."""

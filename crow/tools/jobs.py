"""Commands that run in the background of a session. The model calls them jobs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from crow.domain.errors import ArgumentError
from crow.tools import NOTHING_EXCLUDED, BackgroundCommand, CommandAccess, ExcludedPaths, PlannedCall, Workspace
from crow.tools.layers import Layer
from crow.tools.layers.describe import named
from crow.tools.layers.session import Layers
from crow.tools.network.gate import Gate
from crow.tools.network.proxy import Proxy
from crow.tools.pipes import PipeStatuses
from crow.tools.process import HiddenKeys, KeySource
from crow.tools.sandbox import CHECK_S
from crow.tools.truncate import OutputBuffer

_MAX_RUNNING = 16
_UNREAD_CHARS = 1_000_000
"""If more output is unread, only its beginning and its end are kept."""
END_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a job that the model ends."""
_CLOSE_S = 0.3
"""The same for the jobs that still run when the session is closed."""


@dataclass(slots=True, kw_only=True, eq=False)
class JobLayer:
    """The layer of a background command, and the decisions about the changes in it."""

    layers: Layers
    layer: Layer
    plan: PlannedCall
    """The plan of the call that started the command, as it was allowed. The rules for this plan also decide about the
    changes."""
    refused: Collection[object] = ()
    """The changes that were refused, and that the model was told about: the name and the new state of each file."""
    gate: Gate | None = None
    """Decides which hosts the command may reach. If None, it reaches none."""
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while the changes are read, decided about or kept."""
    is_open: bool = True
    """False once the layer was removed."""
    waiting: str = ""
    """The changes that the command had made when it ended, in words. Empty if it has changed nothing, or still runs."""

    async def note_end(self) -> None:
        """Set `waiting`. Call this after the command has ended."""
        async with self.lock:
            if self.is_open:
                changes = await self.layers.look(self.layer)
                self.waiting = named(changes)

    async def drop(self) -> None:
        """Remove the layer with all changes that were not kept. The command must have ended."""
        if self.is_open:
            self.is_open = False
            await self.layers.drop(self.layer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A command in the background."""

    id: str
    line: str
    access: CommandAccess
    command: BackgroundCommand
    unread: OutputBuffer
    """The output that has arrived since the last read, and the report of `pipes`."""
    pipes: PipeStatuses
    own: JobLayer | None = None
    """The command's layer. None if the command changes the workspace itself."""
    keys: KeySource = HiddenKeys
    told: anyio.Event = field(default_factory=anyio.Event)
    """Set once the model has been told that the command has ended."""

    def is_known(self) -> bool:
        """See :class:`crow.tools.WatchedCommand`."""
        return self.told.is_set()

    async def ended(self) -> None:
        """See :class:`crow.tools.WatchedCommand`."""
        await self.command.wait()
        if self.own is not None:
            await self.own.note_end()

    @property
    def waiting(self) -> str:
        """See :class:`crow.tools.WatchedCommand`."""
        return "" if self.own is None else self.own.waiting

    @property
    def is_layered(self) -> bool:
        """See :class:`crow.tools.WatchedCommand`."""
        return self.own is not None

    @property
    def is_running(self) -> bool:
        """Whether the command still runs."""
        return self.command.returncode is None

    @property
    def state(self) -> str:
        """The state of the command in words."""
        code = self.command.returncode
        if code is None:
            return "running"
        if code < 0:
            return f"ended by signal {-code}"
        _, codes, earlier = self.pipes.split(self.unread.text())
        return "; ".join(filter(None, [f"ended with exit code {code}", self.pipes.note(codes, earlier)]))

    def take_output(self) -> str:
        """Return the unread output and mark it as read. While the command runs, text at the end stays unread if it may
        be the beginning of a secret. Otherwise the whole secret could not be recognised later."""
        text, report = self.pipes.without_report(self.unread.text())
        kept = self.keys().mask.unfinished(text) if self.is_running else 0
        self.unread.clear()
        self.unread.feed(text[len(text) - kept :] + report)
        return text[: len(text) - kept]

    async def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the command to end. If it has ended, wait a short time for the rest of
        its output."""
        if self.is_running:
            with anyio.move_on_after(timeout_s):
                await self.command.wait()
        if not self.is_running:
            await self.command.wait()


class Jobs:
    """The background commands of a session. The output of a command can still be read after the command has ended.

    While `watch` runs, it looks after the running commands. `close` ends all commands and `watch`; the session must
    call it at its end.
    """

    def __init__(self, workspace: Workspace, keys: KeySource = HiddenKeys) -> None:
        self._workspace = workspace
        self._keys = keys
        self._jobs: dict[str, Job] = {}
        self._started = 0  # how many commands were started so far; this makes their ids unique
        self._starting = 0  # how many commands `start` is about to start
        self._has_started = anyio.Event()  # set while a command may be running
        self._watching = anyio.CancelScope()
        self._tasks: TaskGroup | None = None  # the tasks of `watch`

    async def start(
        self,
        line: str,
        access: CommandAccess,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        own: JobLayer | None = None,
    ) -> Job:
        """Run a command line in the background. If the command is confined, it cannot read the `excluded` files. With
        `own`, the command's changes stay in that layer; the layer is removed if the command cannot be started.

        :raises ~crow.domain.errors.ArgumentError: too many commands are running.
        :raises OSError: the command cannot be started.
        """
        running = self._starting + sum(job.is_running for job in self._jobs.values())
        if running >= _MAX_RUNNING:
            if own is not None:
                await own.drop()
            raise ArgumentError(f"{running} commands are already running in the background; end one first")
        self._started += 1
        self._starting += 1
        job_id, unread, pipes = f"job{self._started}", OutputBuffer(_UNREAD_CHARS), PipeStatuses(line)
        layer = None if own is None else own.layer
        network = None if own is None or own.gate is None else Proxy(own.gate)
        try:
            command = await self._workspace.spawn(
                pipes.command, unread.feed, access=access, excluded=excluded, layer=layer, network=network
            )
        except BaseException:
            if own is not None:
                await own.drop()
            raise
        finally:
            self._starting -= 1
        self._jobs[job_id] = job = Job(
            id=job_id, line=line, access=access, command=command, unread=unread, pipes=pipes, own=own, keys=self._keys
        )
        if self._tasks is not None and network is not None:
            self._tasks.start_soon(command.serve)
        self._has_started.set()
        return job

    async def watch(self) -> None:
        """Restore protected files that running jobs change, refresh their layers, and serve their network, until
        `close`."""
        with self._watching:
            async with anyio.create_task_group() as self._tasks:
                await self._check()

    async def _check(self) -> None:
        while True:
            await self._has_started.wait()
            await anyio.sleep(CHECK_S)
            if not any(job.is_running for job in self._jobs.values()):
                self._has_started = anyio.Event()
            for job in [*self._jobs.values()]:
                if job.is_running:
                    await job.command.check()
            await self.refresh()

    async def refresh(self) -> None:
        """Let running jobs see the files that were replaced in the workspace meanwhile."""
        for job in [*self._jobs.values()]:
            if job.is_running and job.own is not None:
                await job.command.refresh()

    def find(self, job_id: str) -> Job:
        """Return the job with this id. :raises ~crow.domain.errors.ArgumentError: there is no such job."""
        if job_id not in self._jobs:
            raise ArgumentError(f'there is no job "{job_id}"; jobs: {", ".join(self._jobs) or "none"}')
        return self._jobs[job_id]

    async def close(self) -> None:
        """End all jobs, in less than a second."""
        self._watching.cancel()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for job in self._jobs.values():
                    tasks.start_soon(_end, job)


async def _end(job: Job) -> None:
    await job.command.end(_CLOSE_S)
    if job.own is not None:
        await job.own.drop()

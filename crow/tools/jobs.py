"""Commands that go on while the model does other things.

Strategy: each job keeps the head and tail of its output and the part that nobody has read yet. They belong to the
session's tools and end with them; a job that has ended stays readable. Knows the workspace as a protocol only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from crow.domain.errors import ArgumentError
from crow.tools import BackgroundCommand, Workspace
from crow.tools.truncate import OutputBuffer

__all__ = ["Job", "Jobs"]

MOST_RUNNING = 16
UNREAD_CHARS = 1_000_000
END_S = 2.0
CLOSE_S = 0.3


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A command in the background. `unread` is what it printed since somebody last looked."""

    id: str
    line: str
    unread: OutputBuffer = field(default_factory=lambda: OutputBuffer(UNREAD_CHARS))
    command: BackgroundCommand | None = None

    @property
    def state(self) -> str:
        """How it is, in words."""
        code = None if self.command is None else self.command.returncode
        if code is None:
            return "running"
        return f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.command is None or self.command.returncode is None

    def hear(self, text: str) -> None:
        """It printed `text`."""
        self.unread.feed(text)

    def take(self) -> str:
        """What was printed since the last time."""
        unread, self.unread = self.unread, OutputBuffer(UNREAD_CHARS)
        return unread.text()


class Jobs:
    """The jobs of a session. `close` must be called by whoever made it."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._jobs: dict[str, Job] = {}
        self._started = 0

    async def start(self, line: str) -> Job:
        """Run a command line in the background.

        :raises ~crow.domain.errors.ArgumentError: too many run already.
        :raises OSError: it cannot be started.
        """
        running = [job.id for job in self._jobs.values() if job.is_running]
        if len(running) >= MOST_RUNNING:
            raise ArgumentError(f"shell: {len(running)} commands run in the background already; end one first")
        self._started += 1
        job = self._jobs[f"job{self._started}"] = Job(id=f"job{self._started}", line=line)
        try:
            job.command = await self._workspace.spawn(line, job.hear)
        finally:
            if job.command is None:
                del self._jobs[job.id]
        return job

    def named(self, tool: str, job_id: str) -> Job:
        """The job of this id. :raises ~crow.domain.errors.ArgumentError: there is none."""
        started = {job.id: job for job in self._jobs.values() if job.command is not None}
        if job_id not in started:
            known = ", ".join(started) or "none was started"
            raise ArgumentError(f'{tool}: there is no job "{job_id}"; there are: {known}')
        return started[job_id]

    async def wait(self, job: Job, timeout_s: float) -> None:
        """Until the job has ended, at most `timeout_s`."""
        assert job.command is not None
        with anyio.move_on_after(timeout_s):
            await job.command.wait()

    async def end(self, job: Job) -> None:
        """End a job and all it started."""
        assert job.command is not None
        await job.command.end(END_S)

    async def close(self) -> None:
        """End all jobs, in less than a second."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for job in self._jobs.values():
                    if job.command is not None:
                        tasks.start_soon(job.command.end, CLOSE_S)

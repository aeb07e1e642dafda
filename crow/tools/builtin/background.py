"""`shell_output` and `shell_kill`: looking after commands that run in the background.

Strategy: both touch only what `shell` has started with the user's permission, so they need none of their own.
"""

from __future__ import annotations

from crow.domain.entries import Announcement
from crow.domain.messages import ToolSpec
from crow.domain.titles import in_title
from crow.tools import Offer, Outcome
from crow.tools.builtin.tool import Arguments, Around, Builtin, Running
from crow.tools.jobs import Job

__all__ = ["SHELL_KILL", "SHELL_OUTPUT", "started_words"]

MAX_WAIT_S = 600
FIRST_LOOK_S = 0.3


async def started_words(running: Running, line: str) -> Outcome:
    """Start a command in the background; what it printed at once is part of the outcome."""
    job = await running.around.jobs.start(line)
    await running.around.jobs.wait(job, FIRST_LOOK_S)
    words = f"[{job.id}: {job.state}; shell_output gives what it prints, shell_kill ends it]"
    return told(job, words)


async def look_at_output(around: Around, args: Arguments) -> Offer:
    job = around.jobs.named("shell_output", args["job"])
    title = f"Output of {job.id}: {in_title(' '.join(job.line.split()))}"
    return Offer(announcement=Announcement(title=title, kind="read"), access="none")


async def run_output(running: Running, args: Arguments) -> Outcome:
    job = running.around.jobs.named("shell_output", args["job"])
    if job.is_running and args.get("wait_s", 0):
        await running.around.jobs.wait(job, args["wait_s"])
    return told(job, f"[{job.id}: {job.state}]")


async def look_at_kill(around: Around, args: Arguments) -> Offer:
    job = around.jobs.named("shell_kill", args["job"])
    title = f"End {job.id}: {in_title(' '.join(job.line.split()))}"
    return Offer(announcement=Announcement(title=title), access="none")


async def run_kill(running: Running, args: Arguments) -> Outcome:
    job = running.around.jobs.named("shell_kill", args["job"])
    if not job.is_running:
        return told(job, f"[{job.id} had {job.state} already]")
    await running.around.jobs.end(job)
    return told(job, f"[{job.id}: {job.state}]")


def told(job: Job, words: str) -> Outcome:
    output = job.take().removesuffix("\n")
    text = "\n".join(filter(None, [output, words]))
    return Outcome(text=text, raw_output={"job": job.id, "state": job.state})


JOB = {"type": "string", "minLength": 1, "description": "The job's id, such as job1."}

SHELL_OUTPUT = Builtin(
    spec=ToolSpec(
        name="shell_output",
        description="What a command in the background has printed since the last look, and whether it still runs.",
        input_schema={
            "type": "object",
            "properties": {
                "job": JOB,
                "wait_s": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": MAX_WAIT_S,
                    "description": "Seconds to wait for its end first. Default 0.",
                },
            },
            "required": ["job"],
        },
    ),
    kind="read",
    access="none",
    look=look_at_output,
    run=run_output,
)

SHELL_KILL = Builtin(
    spec=ToolSpec(
        name="shell_kill",
        description="End a command in the background and all that it started.",
        input_schema={"type": "object", "properties": {"job": JOB}, "required": ["job"]},
    ),
    kind="other",
    access="none",
    look=look_at_kill,
    run=run_kill,
)

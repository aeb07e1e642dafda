"""`shell`: one command line, run to its end or its timeout.

Strategy: the workspace runs it in a process group of its own, without a terminal or input; this module only words the
result. A command that fails is an error for the model, with its output.
"""

from __future__ import annotations

import signal

from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.domain.rendering import in_title
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation
from crow.tools.jobs import Job

__all__ = ["SHELL", "SHELL_KILL", "SHELL_OUTPUT", "started_words"]

DEFAULT_TIMEOUT_S = 120
MAX_TIMEOUT_S = 3_600
TITLE_CHARS = 300


async def look(_around: ToolContext, args: Arguments) -> PlannedCall:
    command: str = args["command"]
    title = " ".join(command.split())
    return PlannedCall(
        announcement=Announcement(
            title=title if len(title) <= TITLE_CHARS else title[:TITLE_CHARS] + "…", kind="execute"
        ),
        access="execute",
        argument=command,
        fault="shell: command holds a NUL character; expected a command line" if "\0" in command else None,
    )


async def run(running: ToolInvocation, args: Arguments) -> Outcome:
    timeout_s: int = args.get("timeout_s", DEFAULT_TIMEOUT_S)
    try:
        if args.get("background", False):
            return await started_words(running, args["command"])
        code, output = await running.workspace.run(args["command"], timeout_s=timeout_s, on_output=running.on_output)
    except ValueError:
        raise ArgumentError("shell: command holds a NUL character; expected a command line") from None
    words = verdict(code, timeout_s)
    return Outcome(
        text="\n".join(filter(None, [output.removesuffix("\n"), words])) or "(no output)",
        is_error=bool(words),
        raw_output={"exit_code": code, "timed_out": code is None},
    )


def verdict(code: int | None, timeout_s: int) -> str:
    """What is to be said about the end of the command; nothing if it succeeded."""
    if code is None:
        return (
            f"[timed out after {timeout_s} s; it and all it started were ended. timeout_s may be up to {MAX_TIMEOUT_S}]"
        )
    if code < 0:
        try:
            return f"[ended by {signal.Signals(-code).name}]"
        except ValueError:
            return f"[ended by signal {-code}]"
    return f"[exit code {code}]" if code else ""


SHELL = Builtin(
    spec=ToolSpec(
        name="shell",
        description=(
            "Run a command line with bash in the working directory. There is no terminal and no input, each call "
            "starts anew, and what it leaves in the background is ended with it; for a server or a watcher set "
            "background. Gives output and errors as they came, and the exit code if it is not 0."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "command": {"type": "string", "minLength": 1, "description": "The command line."},
                "timeout_s": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MAX_TIMEOUT_S,
                    "description": f"Seconds after which it is ended. Default {DEFAULT_TIMEOUT_S}.",
                },
                "background": {
                    "type": "boolean",
                    "description": "Start it and go on: shell_output and shell_kill look after it. No timeout then.",
                },
                "description": {"type": "string", "description": "What it is for, in a few words."},
            },
            "required": ["command"],
        },
    ),
    kind="execute",
    access="execute",
    look=look,
    run=run,
)


# FROM tools.builtin.background: `shell_output` and `shell_kill`: looking after commands that run in the background.
#
# Strategy: both touch only what `shell` has started with the user's permission, so they need none of their own.


MAX_WAIT_S = 600
FIRST_LOOK_S = 0.3


async def started_words(running: ToolInvocation, line: str) -> Outcome:
    """Start a command in the background; what it printed at once is part of the outcome."""
    job = await running.around.jobs.start(line)
    await running.around.jobs.wait(job, FIRST_LOOK_S)
    words = f"[{job.id}: {job.state}; shell_output gives what it prints, shell_kill ends it]"
    return told(job, words)


async def look_at_output(around: ToolContext, args: Arguments) -> PlannedCall:
    job = around.jobs.named("shell_output", args["job"])
    title = f"Output of {job.id}: {in_title(' '.join(job.line.split()))}"
    return PlannedCall(announcement=Announcement(title=title, kind="read"), access="none")


async def run_output(running: ToolInvocation, args: Arguments) -> Outcome:
    job = running.around.jobs.named("shell_output", args["job"])
    if job.is_running and args.get("wait_s", 0):
        await running.around.jobs.wait(job, args["wait_s"])
    return told(job, f"[{job.id}: {job.state}]")


async def look_at_kill(around: ToolContext, args: Arguments) -> PlannedCall:
    job = around.jobs.named("shell_kill", args["job"])
    title = f"End {job.id}: {in_title(' '.join(job.line.split()))}"
    return PlannedCall(announcement=Announcement(title=title), access="none")


async def run_kill(running: ToolInvocation, args: Arguments) -> Outcome:
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

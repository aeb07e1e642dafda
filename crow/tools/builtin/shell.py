"""`shell`, and `shell_output` and `shell_kill` for commands in the background.

`shell_output` and `shell_kill` need no permission: they touch only commands that the user has already allowed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.domain.rendering import in_title
from crow.domain.text import shorten, title_line
from crow.tools import CommandAccess, Coverage, Outcome, PlannedCall
from crow.tools.builtin.changes import Settled, settle, settle_job, undoable
from crow.tools.builtin.output import MAX_CHARS
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation, argument, session_call, tool_spec
from crow.tools.jobs import END_S, Job, JobLayer
from crow.tools.layers.session import Layers
from crow.tools.limits import COMMANDS
from crow.tools.network.gate import Gate
from crow.tools.network.proxy import Proxy
from crow.tools.pipes import PipeStatuses

_DEFAULT_ACCESS: CommandAccess = "read"
_DEFAULT_TIMEOUT_S = 120
MAX_TIMEOUT_S = 3_600
_MAX_COMMAND_BYTES = 125_000
"""Linux accepts no argument of 131,072 bytes or more, and crow adds some text to the command line."""
_MAX_WAIT_S = 600
_FIRST_OUTPUT_S = 0.3
"""How long the start of a background command waits for its first output, in seconds. Most errors come within this
time."""
_HOSTS_CHARS = 400
_SILENT_CHARS = 200
"""A command that prints less may have failed without saying why."""

_HIDES = re.compile(r"\|\||;|\n|2>\s*/dev/null|&>")
"""Matches the parts of a command line because of which it may succeed although one of its commands failed."""
_ERROR = re.compile(r"[\w./+-]{1,60}: |(?i:error|warning|fatal|npm \w+!?)\b")
"""Matches the beginning of an error message of a program."""
_NEEDS_NETWORK = re.compile(
    r"(?:^|[;&|(\n]|\$\()\s*(?:sudo )?(?:curl|wget|ssh|scp|pip3? (?:install|download)|uv (?:pip|add|sync)|"
    r"python3? -m pip (?:install|download)|(?:npm|pnpm|yarn|bun) (?:i|ci|install|add|view)|"
    r"git (?:clone|fetch|pull|push|ls-remote)|apt(?:-get)? (?:update|install)|go (?:get|mod download)|"
    r"cargo (?:add|fetch|install)|gem install|bundle install|docker (?:pull|push))(?!\S)"
)
"""Matches commands that can do nothing without the network."""


async def _plan_shell(context: ToolContext, args: Arguments) -> PlannedCall:
    access = await _effective_access(context, args)
    # in a layer, the user is asked about the changes after the command has run
    layered = access != "full" and await _layers_for(context, args) is not None
    return PlannedCall(
        announcement=Announcement(title=in_title(title_line(args["command"])), kind="execute"),
        access="execute",
        command_access="read" if layered else access,
        requested_access=args.get("access", _DEFAULT_ACCESS),
        fault=_fault_in(args["command"]),
        coverage=Coverage(argument=args["command"]),
    )


def _fault_in(command: str) -> str | None:
    """Return why a command line cannot be run, or None if it can."""
    if "\0" in command:
        return "command contains a NUL character; expected a command line"
    size = len(command.encode())
    if size > _MAX_COMMAND_BYTES:
        return f"command has {size:,} bytes, too many for the system; write long text to a file with write_file first"
    return None


async def _effective_access(context: ToolContext, args: Arguments) -> CommandAccess:
    """Return the access that the command gets. If commands are not confined, the command gets full access, even if the
    model asked for less."""
    requested: CommandAccess = args.get("access", _DEFAULT_ACCESS)
    await context.workspace.sandbox_status()  # `confines` is unknown before this call
    return requested if context.workspace.confines else "full"


async def _layers_for(context: ToolContext, args: Arguments) -> Layers | None:
    """Return the layers if the command runs in one, otherwise None. A background command with the access `write` runs
    without a layer, because it may watch files, and a mounted layer does not notify it of changes by others."""
    layers = context.workspace.layers
    watches = args.get("background", False) and args.get("access") == "write"
    is_layered = layers is not None and not watches and await layers.works()
    return layers if is_layered else None


async def _run_shell(invocation: ToolInvocation, args: Arguments) -> Outcome:
    command, timeout_s = str(args["command"]), int(args.get("timeout_s", _DEFAULT_TIMEOUT_S))
    if fault := _fault_in(command):
        raise ArgumentError(fault)
    access = await _effective_access(invocation.context, args)
    layers = await _layers_for(invocation.context, args) if access != "full" else None
    if args.get("background", False):
        return await _start_job(invocation, command, access, layers)
    await invocation.context.jobs.refresh()  # the command may ask a server about files that were just changed
    statuses = PipeStatuses(command)
    layer, settled = None, Settled()
    reviewer = invocation.ports.reviewer
    gate = None if layers is None or reviewer is None else Gate(partial(reviewer.review_host, invocation.call_id))
    try:
        is_direct = layers is None and access == "write"
        async with COMMANDS.slot(invocation.context.workspace), undoable(invocation, is_needed=is_direct) as lost:
            if layers is not None:
                layer = await layers.open()
                access = "write"
            if layers is not None and layer is None:
                raise ArgumentError("the command was not run, because no layer could be opened for it")
            code, output = await invocation.context.workspace.run(
                statuses.command,
                access=access,
                timeout_s=timeout_s,
                on_output=lambda so_far: invocation.on_output(statuses.split(so_far)[0]),
                excluded=invocation.excluded,
                layer=layer,
                network=None if gate is None else Proxy(gate),
            )
        if layers is not None and layer is not None:
            settled = await settle(invocation, layers, layer)
    finally:
        if layers is not None and layer is not None:
            await layers.drop(layer)
    output, codes, earlier = statuses.split(output)
    hidden = statuses.note(codes, earlier)
    end = _describe_end(code, timeout_s) or (f"[{hidden}]" if hidden else "")
    shown = await invocation.context.outputs.shown(output.removesuffix("\n"))
    has_failed = code != 0 or hidden != ""
    is_served = gate is not None and gate.has_allowed and not has_failed
    hint = "" if is_served else _explain(invocation.context, command, access, output, has_failed=has_failed)
    unreached = "" if gate is None else gate.describe()
    announcement = Announcement(title=in_title(title_line(command)), kind="execute")
    return Outcome(
        text="\n".join(filter(None, [shown, end, settled.words, *lost, unreached or hint])) or "(no output)",
        announcement=settled.announced(announcement),
        is_error=code != 0,
        raw_output={
            "exit_code": code,
            "timed_out": code is None,
            "access": "layer" if layers is not None else access,
            **({"pipes": [list(each) for each in (codes, *earlier)]} if codes else {}),
        },
        max_chars=MAX_CHARS if len(shown) > MAX_CHARS else None,
    )


async def _start_job(invocation: ToolInvocation, command: str, access: CommandAccess, layers: Layers | None) -> Outcome:
    """Start a command in the background, in a layer if possible. Return its output of the first moments."""
    own = None
    if layers is not None and invocation.planned is not None:
        layer = await layers.open()
        if layer is not None:
            plan = replace(invocation.planned, coverage=replace(invocation.planned.coverage, rule_tool="shell"))
            reviewer = invocation.ports.reviewer
            gate = None if reviewer is None else Gate(partial(reviewer.decide_host, plan))
            own, access = JobLayer(layers=layers, layer=layer, plan=plan, gate=gate), "write"
    job = await invocation.context.jobs.start(command, access, invocation.excluded, own)
    await job.wait(_FIRST_OUTPUT_S)
    if job.is_running and invocation.ports.background is not None:
        await invocation.ports.background.watch(invocation.call_id, job)
    status = f"{job.id}: {job.state}; read its output with shell_output, end it with shell_kill"
    begun = await _job_outcome(invocation, job, status, settles=not job.is_running)
    return replace(begun, raw_output={**begun.raw_output, "access": access if own is None else "layer"})


def _describe_end(code: int | None, timeout_s: int) -> str:
    """Say how the command ended. Return an empty string if it succeeded."""
    if code is None:
        return (
            f"[timed out after {timeout_s} s; the command and all processes it started were ended. timeout_s can be at "
            f"most {MAX_TIMEOUT_S}]"
        )
    if code < 0:
        try:
            return f"[ended by {signal.Signals(-code).name}]"
        except ValueError:
            return f"[ended by signal {-code}]"
    return f"[exit code {code}]" if code else ""


def _explain(context: ToolContext, command: str, access: CommandAccess, output: str, *, has_failed: bool) -> str:
    """Return a line for the model if the sandbox may be the reason why a command failed, or why a part of it failed
    although the command succeeded, as in `curl URL || true`. Return an empty string otherwise."""
    hint = context.workspace.explain_failure(access, output, has_failed=has_failed)
    hides = not has_failed and _HIDES.search(command) is not None
    if not hint and hides:
        errors = "\n".join(line for line in output.splitlines() if _ERROR.match(line))
        hint = context.workspace.explain_failure(access, errors) if errors else ""
    if not hint and (has_failed or hides) and len(output) < _SILENT_CHARS and _NEEDS_NETWORK.search(command):
        hint = context.workspace.explain_failure(access, "Network is unreachable")
    return hint


async def _plan_output(context: ToolContext, args: Arguments) -> PlannedCall:
    job = context.jobs.find(args["job"])
    return session_call(f"Output of {job.id}: {in_title(title_line(job.line))}", "read")


async def _run_output(invocation: ToolInvocation, args: Arguments) -> Outcome:
    job = invocation.context.jobs.find(args["job"])
    await job.wait(args.get("wait_s", 0))
    return await _job_outcome(invocation, job, f"{job.id}: {job.state}")


async def _plan_kill(context: ToolContext, args: Arguments) -> PlannedCall:
    job = context.jobs.find(args["job"])
    return session_call(f"End {job.id}: {in_title(title_line(job.line))}", "other")


async def _run_kill(invocation: ToolInvocation, args: Arguments) -> Outcome:
    job = invocation.context.jobs.find(args["job"])
    was_running = job.is_running
    await job.command.end(END_S)  # a command that has ended may have left processes running
    return await _job_outcome(invocation, job, f"{job.id}{':' if was_running else ' had already'} {job.state}")


async def _job_outcome(invocation: ToolInvocation, job: Job, status: str, *, settles: bool = True) -> Outcome:
    """Return the output of a background command since the last call. If `settles` is set, also decide about the changes
    in its layer, and report the decision."""
    context = invocation.context
    settled = await settle_job(invocation, job) if settles else Settled()
    output = job.take_output()
    if not job.is_running:
        job.told.set()
    has_failed = bool(job.command.returncode)
    gate = None if job.own is None else job.own.gate
    unreached = "" if gate is None else gate.take_refused()
    hint = "" if job.is_running else _explain(context, job.line, job.access, output, has_failed=has_failed)
    shown = await context.outputs.shown(output.removesuffix("\n"))
    text = "\n".join(filter(None, [shown, f"[{status}]", settled.words, unreached or hint]))
    max_chars = MAX_CHARS if len(shown) > MAX_CHARS else None
    announcement = None if invocation.planned is None else settled.announced(invocation.planned.announcement)
    return Outcome(
        text=text, announcement=announcement, raw_output={"job": job.id, "state": job.state}, max_chars=max_chars
    )


_SHELL_SPEC = tool_spec(
    "shell",
    "Run a command line with bash in the working directory, in a new shell without terminal or input. Processes that "
    "it leaves running are ended: set background for a server or a watcher.",
    required="command",
    command=argument("string", minLength=1),
    access=argument(
        "string",
        "Usually left out: the command may change the working directory and use HTTP(S), and the user is asked where "
        "needed. full: also ssh, services and all else; the user is asked. write: for background "
        "commands that watch files. Where crow says so: "
        f"{_DEFAULT_ACCESS} (default) or write.",
        enum=["read", "write", "full"],
    ),
    timeout_s=argument(
        "integer", f"Seconds until it is ended. Default {_DEFAULT_TIMEOUT_S}.", minimum=1, maximum=MAX_TIMEOUT_S
    ),
    background=argument(
        "boolean",
        "Return at once, without a timeout. You are told when it ends.",
    ),
)


def shell_spec(spec: ToolSpec, hosts: Sequence[str]) -> ToolSpec:
    """Return the spec for a model that should know for which hosts the user has credentials."""
    if not hosts:
        return spec
    named = shorten(", ".join(hosts), _HOSTS_CHARS)
    words = f" For HTTPS to {named}, crow adds the user's credential (git push, too), except with access full."
    return replace(spec, description=spec.description + words)


SHELL = Builtin(_SHELL_SPEC, "execute", "execute", _plan_shell, _run_shell)

_JOB = argument("string", "Such as job1.")

_SHELL_OUTPUT_SPEC = tool_spec(
    "shell_output",
    "Get what a background command has printed since the last call, and whether it still runs.",
    required="job",
    job=_JOB,
    wait_s=argument("integer", "Seconds to wait for its end. Default 0.", minimum=0, maximum=_MAX_WAIT_S),
)
SHELL_OUTPUT = Builtin(_SHELL_OUTPUT_SPEC, "read", "none", _plan_output, _run_output)

_SHELL_KILL_SPEC = tool_spec(
    "shell_kill", "End a background command and all processes it started.", required="job", job=_JOB
)
SHELL_KILL = Builtin(_SHELL_KILL_SPEC, "other", "none", _plan_kill, _run_kill)

"""Counts the questions about commands, with and without confinement: `python -m benchmarks.questions`.

Each line of `commands.jsonl` is a command line as coding agents send them, with the access that a sensible model asks
for under the description of the `shell` tool. Each runs twice in a fresh copy of a scratch repository, through crow's
own settings, workspace, tools and decisions: first with the sandbox off, then confined. If a confined command does not
do what it did unconfined, the model asks again with more access, and that counts too. No command reaches the network.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from benchmarks.questions.repository import changes, ignored, make_area, toolchains
from benchmarks.rows import Row, arguments, report
from benchmarks.tools import Chosen, call, sandboxes, unwatched
from crow.adapters import open_toolbox, open_workspace
from crow.agent.permissions.decisions import Ask, decide
from crow.agent.permissions.host_rules import decide_about_host
from crow.agent.permissions.judge import about_changes
from crow.agent.permissions.rules import Mode, PermissionRule, rule_for_writes, user_rules
from crow.settings import load_settings
from crow.tools import CommandAccess, Outcome, PlannedCall, Ports
from crow.tools.layers import Changes
from crow.tools.network import Host, HostVerdict, Use
from crow.tools.network.hosts import parse_host
from crow.tools.network.registries import DEFAULT_REGISTRIES, siblings_of
from crow.tools.no_session import NoSession
from crow.tools.sandbox.confiner import SANDBOXES
from tests.tools.conftest import FixedPlan

__all__ = ["Command", "Result", "corpus", "summary"]

FORGE = user_rules(
    [
        f"shell(gh {what} *)"
        for what in ("issue view", "issue list", "pr view", "pr list", "pr diff", "pr checks", "run list", "run view")
    ],
    (),
)
"""Rules of a user whose models often read in a forge."""

ALLOWED = "ask, one answer for writes"

MODES: Mapping[str, tuple[Mode, Sequence[PermissionRule]]] = {
    "ask": ("ask", ()),
    ALLOWED: ("ask", (rule_for_writes("/"),)),
    "accept-edits": ("accept-edits", ()),
    "auto": ("auto", ()),
    "ask, with rules for a forge": ("ask", FORGE),
    "ask, with the registries": ("ask", user_rules(["network(registries)"], ())),
}
"""What is counted: modes, each with the rules that count from the start. `ALLOWED` is a user who answers the first
question about a `write` command with "Always allow commands that can only change files here". This one question is
added to the sum of all lines."""

MORE: Mapping[CommandAccess, tuple[CommandAccess, ...]] = {
    "read": ("read", "write", "full"),
    "write": ("write", "full"),
    "full": ("full",),
}
"""What a model tries, one after the other."""

TIMEOUT_S = 60
MISSING = re.compile(
    r"(\S+): (?:command )?not found|No module named '?(?!birdhouse)(\w+)|no such command: `(\w+)|"
    r"'cargo-(\w+)' is not installed|(could not determine executable|missing packages|ENOTCACHED)|"
    r"unrecognized arguments: (-n)"
)
"""Output of a command line whose program is not on this machine."""

DENIED = re.compile(
    r"Read-only file system|Permission denied|Operation not permitted|EROFS|EACCES|EPERM|cannot create|"
    r"No such file or directory|Network is unreachable|Could not resolve|Connection refused|"
    r"unable to open database|readonly database"
)
"""Errors that want of access causes. Lines with one that an unconfined run does not print count as a failure, because
the exit code of a pipe is that of its last program."""

MIXES: Mapping[str, Mapping[str, float]] = {
    "issues": {"look": 17.6, "search": 43.3, "test": 13.8, "run": 14.5, "check": 0.95, "build": 0.95, "files": 3.4},
    "daily": {
        "look": 5.9,
        "search": 29.8,
        "git: read": 14.7,
        "git: change": 6.2,
        "forge": 17.3,
        "remote": 5.0,
        "test": 2.6,
        "check": 3.45,
        "build": 3.45,
        "run": 5.6,
        "files": 1.6,
        "packages": 0.4,
        "services": 0.3,
    },
}
"""How often models send commands of each group, in per cent. `issues`: two models on a benchmark of issues; `daily`:
two models in the sessions of a maintainer, who has them read much in a forge. Both come from published counts of steps
by their purpose. Half of the steps that compile or check count as builds."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A line of the corpus. `{work}`, `{area}` and `{worker}` in it are replaced. `access`: what a sensible model asks
    for. Lines without `runs` are not run, because they stop programs by name or need root, Docker or another machine.
    """

    group: str
    access: CommandAccess
    line: str
    background: bool = False
    runs: bool = True
    hosts: tuple[str, ...] = ()
    """What the line reaches over HTTP or HTTPS: in the file, hosts, or the tool whose `registry` it is. Its end is not
    compared, because no command reaches the network."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a command. `missing`: the program that is not on this machine. `tries`: the access of each try
    with confinement. `before` and `after`: the questions without and with confinement, by mode. `faults`: how the
    confined run differs from the other, for each try."""

    command: Command
    missing: str | None = None
    tries: tuple[CommandAccess, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[tuple[str, ...], ...] = ()
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether the last try ended as the unconfined run did."""
        return not self.faults or not self.faults[-1]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run: its questions by mode, its end (exit code or state), its output, and the state afterwards."""

    asks: Mapping[str, int]
    end: object
    output: str
    state: Mapping[str, str]


def corpus() -> tuple[Command, ...]:
    """All lines of the corpus."""
    lines = Path(__file__).with_name("commands.jsonl").read_text("utf-8").splitlines()
    values = [json.loads(line) for line in lines]
    hosts = [DEFAULT_REGISTRIES.get(value.pop("registry", ""), tuple(value.get("hosts", ()))) for value in values]
    return tuple(Command(**value | {"hosts": each}) for value, each in zip(values, hosts, strict=True))


class Worker:
    """Runs commands in one process, in a directory of its own."""

    def __init__(self, root: Path, number: int) -> None:
        self._number = number
        self._template, self._area = root / f"template{number}", root / f"area{number}"
        self._area.mkdir(parents=True)
        self._env = make_area(self._area)
        self._area.rename(self._template)
        home = root / f"crow{number}"
        home.mkdir()
        readable = json.dumps([str(path) for path in toolchains()])
        (home / "config.toml").write_text(f"[sandbox]\nreadable = {readable}\n")
        os.environ.clear()
        os.environ.update(self._env, CROW_HOME=str(home))

    def measure(self, command: Command) -> Result:
        """Run a command unconfined, then confined with more and more access until it does the same."""
        if not command.runs:
            return Result(command=command, before=self._asks(command, "off"), after=self._asks(command, "auto"))
        since = time.monotonic()
        self._renew()
        plain = self._run(command, command.access, "off")
        found = MISSING.search(plain.output)
        if found is not None:
            missing = next(filter(None, found.groups()))
            after = self._asks(command, "auto")
            return Result(command=command, missing=missing, before=plain.asks, after=after)
        skipped = ignored(self._area / "work")
        self._renew()
        tries: list[CommandAccess] = []
        faults = []
        after = dict.fromkeys(MODES, 0)
        for access in MORE[command.access]:
            confined = self._run(command, access, "auto")
            tries.append(access)
            compared = differences(plain, confined, skipped if access == "read" else ())
            faults.append(() if command.hosts else tuple(compared))
            after = {mode: after[mode] + confined.asks[mode] for mode in MODES}
            if not faults[-1]:
                break
        return Result(
            command=command,
            tries=tuple(tries),
            before=plain.asks,
            after=after,
            faults=tuple(faults),
            seconds=time.monotonic() - since,
        )

    def _renew(self) -> None:
        shutil.rmtree(self._area, ignore_errors=True)
        subprocess.run(["/bin/cp", "-a", str(self._template), str(self._area)], check=True)
        refresh = ["git", "update-index", "--refresh"]  # the index knows the inodes of the files
        subprocess.run(refresh, cwd=self._area / "work", check=False, capture_output=True)

    def _asks(self, command: Command, sandbox: str) -> Mapping[str, int]:
        """The questions about a command that is not run."""
        self._renew()
        return asyncio.run(self._call(command, command.access, sandbox, runs=False))[0]

    def _run(self, command: Command, access: CommandAccess, sandbox: str) -> Ran:
        asks, outcome = asyncio.run(self._call(command, access, sandbox, runs=True))
        assert outcome is not None
        end = outcome.raw_output.get("exit_code", outcome.raw_output.get("state"))
        return Ran(asks=asks, end=end, output=outcome.text, state=changes(self._area))

    async def _call(
        self, command: Command, access: CommandAccess, sandbox: str, *, runs: bool
    ) -> tuple[Mapping[str, int], Outcome | None]:
        work = self._area / "work"
        line = command.line
        for name, value in (("{work}", work), ("{area}", self._area), ("{worker}", self._number)):
            line = line.replace(name, str(value))
        loaded = load_settings({}, {**os.environ, "CROW_SANDBOX": sandbox})
        if loaded.problem is not None:
            raise loaded.problem
        workspace = open_workspace(lambda: loaded, str(work), ())
        reviewer = Reviewer(str(work))
        ports = Ports(log=NoSession(), plan=FixedPlan(), reviewer=reviewer)
        async with open_toolbox(lambda: loaded, workspace, ports, ()) as box:
            shell = call("shell", command=line, access=access, timeout_s=TIMEOUT_S, background=command.background)
            plan = await box.plan(shell)
            assert plan.fault is None, plan.fault
            asks = reviewer.ask(plan)
            if sandbox != "off":
                reviewer.ask_about(command.hosts)
            outcome = await box.run(shell, "call_1_0", unwatched, planned=plan) if runs else None
        await workspace.reap()
        await workspace.close()
        return asks, outcome


class Reviewer:
    """Counts the questions about a command in each mode: before it runs, and about what it has changed in a layer.
    Everything is kept."""

    def __init__(self, cwd: str) -> None:
        self._cwd = cwd
        """The directory of the session."""
        self._plan: PlannedCall | None = None
        self._asks = dict.fromkeys(MODES, 0)

    def ask(self, plan: PlannedCall) -> dict[str, int]:
        """Count the question about a planned call. The returned counts grow with later questions about it."""
        if self._plan is None:
            self._plan = plan
        for name, (mode, rules) in MODES.items():
            self._asks[name] += isinstance(decide("shell", plan, mode, rules), Ask)
        return self._asks

    def ask_about(self, hosts: Sequence[str]) -> None:
        """Count the questions about hosts. An answer holds for the whole command, and for the same registry."""
        assert self._plan is not None
        for name, (mode, rules) in MODES.items():
            known: set[str] = set()
            for host in hosts:
                if host not in known:
                    decision, _ = decide_about_host("shell", self._plan, parse_host(host, 443), mode, rules)
                    self._asks[name] += isinstance(decision, Ask)
                known |= {host, *siblings_of(host)}

    async def review_host(self, _call_id: str, _host: Host, _use: Use | None = None) -> HostVerdict:
        """See :class:`crow.tools.ChangeReviewer`. Nothing is reached."""
        return HostVerdict(refusal="no command of the corpus reaches the network")

    async def decide_host(self, _command: PlannedCall, host: Host, use: Use | None = None) -> HostVerdict:
        """See :class:`crow.tools.ChangeReviewer`. The same for a command in the background."""
        return await self.review_host("", host, use)

    async def review(self, _call_id: str, changes: Changes, command: PlannedCall | None = None) -> str:
        """See :class:`crow.tools.ChangeReviewer`."""
        plan = command or self._plan
        if changes.shown and plan is not None:
            self.ask(about_changes(plan, changes, (), self._cwd))
        return ""


def differences(plain: Ran, confined: Ran, skipped: Sequence[str]) -> Iterable[str]:
    """How a confined run differs from the same command unconfined. `skipped` are paths that may differ."""
    if plain.end != confined.end:
        yield f"ended with {confined.end} instead of {plain.end}: {confined.output[-300:]!r}"
    known = set(plain.output.splitlines())
    yield from (line for line in confined.output.splitlines() if DENIED.search(line) and line not in known)
    for path in sorted(plain.state.keys() | confined.state.keys()):
        if plain.state.get(path) == confined.state.get(path):
            continue
        if not any(f"{path}/".startswith(f"work/{name}") for name in skipped):
            yield f"{path}: {confined.state.get(path)} instead of {plain.state.get(path)}"


def summary(results: Sequence[Result]) -> list[Row]:
    """The figures of a whole run. What is left are the questions with confinement, in per cent of the lines."""
    ran = [result for result in results if result.tries]
    rows = [
        count("command lines", len(results)),
        count("  whose program is not on this machine", sum(result.missing is not None for result in results)),
        count("  that must not run on a developer's machine", sum(not result.command.runs for result in results)),
        count("  that ran", len(ran)),
        count("  that ran with the same files and exit code", sum(result.is_same for result in ran)),
        count("  repetitions with more access", sum(len(result.tries) - 1 for result in ran)),
    ]
    groups = {group: [result for result in results if result.command.group == group] for group in names(results)}
    for mode in MODES:
        asked = sum(result.after[mode] for result in results) + first_questions(results, mode)
        rows += [
            count(f"mode {mode}: questions without confinement", sum(result.before[mode] for result in results)),
            count("  with confinement", asked),
            share("  what is left", asked / len(results), limit=20 if mode in ("ask", ALLOWED) else None),
        ]
        for mix, weights in MIXES.items():
            weighed = {group: weight for group, weight in weights.items() if group in groups}
            sums = sum(weight * left(groups[group], mode) for group, weight in weighed.items())
            if weighed:
                rows.append(share(f"  what is left, weighed as in {mix}", sums / sum(weighed.values())))
    rows += [
        share(f"mode ask, {group}: what is left of {len(those)} questions", left(those, "ask"))
        for group, those in groups.items()
    ]
    return rows


def first_questions(results: Sequence[Result], mode: str) -> int:
    """The question whose answer is the rule of the mode `ALLOWED`; 0 if it is never asked, and in the other modes."""
    return int(mode == ALLOWED and any(result.after["ask"] > result.after[ALLOWED] for result in results))


def left(results: Sequence[Result], mode: str) -> float:
    """The questions for each line with confinement."""
    return sum(result.after[mode] for result in results) / len(results)


def names(results: Sequence[Result]) -> list[str]:
    """The groups in the order of the corpus."""
    return list(dict.fromkeys(result.command.group for result in results))


def count(what: str, number: int) -> Row:
    return Row(what, number, number, "")


def share(what: str, fraction: float, *, limit: float | None = None) -> Row:
    return Row(what, 100 * fraction, 100 * fraction, "%", limit)


def measure(root: Path, number: int, commands: Sequence[Command], sandbox: str | None) -> list[Result]:
    """Run commands in this process, confined by what has this name; None: by what crow chooses."""
    with nullcontext() if sandbox is None else patch.object(SANDBOXES, "choose", Chosen(sandboxes()[sandbox]).choose):
        worker = Worker(root, number)
        return [worker.measure(command) for command in commands]


def describe(results: Iterable[Result]) -> list[str]:
    """What needs a look: lines that did not run here, that were repeated, and that never did the same."""
    lines = []
    for result in results:
        line = " ".join(result.command.line.split())[:110]
        if not result.command.runs:
            lines.append(f"not run: {line}")
        elif result.missing:
            lines.append(f"no {result.missing} here: {line}")
        elif any(result.faults):
            lines.append(f"{'again' if result.is_same else 'DIFFERS'}, {' → '.join(result.tries)}: {line}")
            lines += [
                f"    {access}: {fault}"
                for access, all_ in zip(result.tries, result.faults, strict=True)
                for fault in all_[:4]
            ]
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many commands run at once")
    parser.add_argument("--group", nargs="+", help="run these groups alone")
    parser.add_argument("--grep", metavar="REGEX", help="run the lines that match alone")
    parser.add_argument("--sandbox", choices=sandboxes(), help="what confines; without it, what crow chooses")
    parser.add_argument(
        "--details", action="store_true", help="print the lines that did not run or did not do the same"
    )
    options = parser.parse_args()
    commands = [
        command
        for command in corpus()
        if (not options.group or command.group in options.group)
        and (not options.grep or re.search(options.grep, command.line))
    ]
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crow-questions-", ignore_cleanup_errors=True) as directory:
        root, jobs = Path(directory).resolve(), range(options.jobs)
        with ProcessPoolExecutor(options.jobs) as pool:
            shares = [
                pool.submit(measure, root, number, commands[number :: options.jobs], options.sandbox) for number in jobs
            ]
        found = {result.command: result for share in shares for result in share.result()}
    results = [found[command] for command in commands]
    print(f"{len(commands)} lines in {time.monotonic() - since:.0f} s", file=sys.stderr)
    if options.details:
        print("\n".join(describe(results)))
    report(summary(results), options.json)


if __name__ == "__main__":
    main()

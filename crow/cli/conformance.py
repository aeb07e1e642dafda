"""`crow acp-check` and `crow trace check`: check whether an agent follows the rules of the protocol."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crow.cli.output import print_json, say
from crow.domain.errors import ArgumentError
from crow.trace import show
from crow.trace.client import CheckStopped, TimeLimits
from crow.trace.record import read_recording
from crow.trace.report import Report, check
from crow.trace.rules import RULES, judge
from crow.trace.scratch import Subject, check_agent

MAX_TIMEOUT_S = 3600


def run_acp_check(options: argparse.Namespace) -> int:
    """`crow acp-check`: start an agent, check it and print the findings. Return the exit code, which is 1 if a rule
    failed."""
    if options.rules:
        for rule in RULES:
            print(rule.id, rule.severity, rule.says, rule.link, sep="\t")
        return 0
    if not options.agent:
        raise ArgumentError("crow acp-check needs the command of an agent: crow acp-check -- COMMAND ...")
    if not 0 < options.timeout <= MAX_TIMEOUT_S:
        raise ArgumentError(f"--timeout {options.timeout:g}: expected a number of seconds from 0.1 to {MAX_TIMEOUT_S}.")
    variables, inherited = {}, []
    for given in options.env:
        name, is_set, value = given.partition("=")
        if not name:
            raise ArgumentError(f"--env {given}: expected NAME=VALUE or NAME.")
        if is_set:
            variables[name] = value
        else:
            inherited.append(name)
    subject = Subject(
        command=options.agent,
        variables=variables,
        endpoint_variables=options.endpoint_env,
        inherited=inherited,
    )
    trace = None if options.trace is None else Path(options.trace)
    timeout_s = options.timeout
    limits = TimeLimits(answer_s=timeout_s, exit_s=min(10.0, timeout_s), total_s=max(600.0, 20 * timeout_s))
    try:
        with _signals() as signalled:
            run = check_agent(subject, limits, trace=trace, report=_progress, signalled=signalled)
    except CheckStopped as error:
        return 128 + error.number
    report = Report(run=run, verdicts=tuple(judge(run)))
    _print(report, options, shlex.join(options.agent))
    if not options.json:
        for line in _hints(report):
            print(line)
    return 1 if report.failed(strict=options.strict) else 0 if run.is_complete else 2


def run_trace(options: argparse.Namespace) -> int:
    """`crow trace`: show or check a recording."""
    if options.action == "check":
        return check_recording(options)
    for line in show.format_recording(read_recording(Path(options.file))):
        say(line)
    return 0


def check_recording(options: argparse.Namespace) -> int:
    """`crow trace check`: check a recording and print the findings. Return 1 if a rule failed, otherwise 0."""
    report = check(read_recording(Path(options.file)))
    _print(report, options, options.file)
    return 1 if report.failed(strict=options.strict) else 0


def _print(report: Report, options: argparse.Namespace, name: str) -> None:
    if options.junit is not None:
        try:
            Path(options.junit).write_bytes(report.junit(name))
        except OSError as error:
            raise ArgumentError(f"--junit {options.junit}: {error.strerror or error}") from error
    if options.json:
        print_json(report.rows())
    else:
        for line in report.text(everything=options.all):
            say(line)


def _hints(report: Report) -> list[str]:
    hints = []
    if any(verdict.rule.id == "prompt.text" and verdict.findings for verdict in report.verdicts):
        hints.append(
            "No prompt worked, so many rules could not be tried. The agent may need a model: see --endpoint-env, --env"
            " and {base_url} in crow acp-check --help."
        )
    elif report.run.endpoint is not None and not report.run.endpoint.requests:
        hints.append("The agent did not use the endpoint of the check; rules that need it do not apply.")
    if not report.run.is_complete:
        hints.append("The check ran out of time and is not complete.")
    return hints


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """During the block, SIGINT and SIGTERM do not end crow, so that crow can end the agent's processes first. The
    yielded function returns the number of the last signal that arrived, or 0."""
    arrived = [0]

    def keep(number: int, _: object) -> None:
        arrived[0] = number

    before = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: arrived[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress(words: str) -> None:
    if sys.stderr.isatty():
        say(f"... {words}", file=sys.stderr)

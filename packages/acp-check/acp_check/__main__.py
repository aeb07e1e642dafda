"""The command `acp-check`: checks an agent, or the recording of a connection."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from acp_check import __version__
from acp_check.client import CheckStopped, TimeLimits
from acp_check.errors import CheckError
from acp_check.recording import read_recording
from acp_check.report import Report, check
from acp_check.rules import RULES, judge
from acp_check.scratch import Subject, check_agent

MAX_TIMEOUT_S = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code: 0 if no rule of severity MUST failed, 1 if one failed, 2 if the check
    could not be run or completed, and 128 plus the number of a signal that ended it."""
    options = _parser().parse_args(arguments)
    try:
        code = _run(options)
        sys.stdout.flush()
    except CheckError as error:
        print(f"acp-check: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has left. Python would report the pipe again when it flushes stdout at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _run(options: argparse.Namespace) -> int:
    if options.rules:
        for rule in RULES:
            print(rule.id, rule.severity, rule.says, rule.link, rule.sentence, sep="\t")
        return 0
    if options.recording is not None:
        if options.agent:
            raise CheckError("give either --recording FILE or the command of an agent, not both")
        return _print(check(read_recording(Path(options.recording))), options, options.recording)
    if not options.agent:
        raise CheckError("the command of an agent is missing: acp-check -- COMMAND ...")
    return _check_agent(options)


def _check_agent(options: argparse.Namespace) -> int:
    if not 0 < options.timeout <= MAX_TIMEOUT_S:
        raise CheckError(f"--timeout {options.timeout:g}: expected a number of seconds from 0.1 to {MAX_TIMEOUT_S}.")
    variables, inherited = {}, []
    for given in options.env:
        name, is_set, value = given.partition("=")
        if not name:
            raise CheckError(f"--env {given}: expected NAME=VALUE or NAME.")
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
    limits = TimeLimits.of(timeout_s)
    try:
        with _signals() as signalled:
            run = check_agent(subject, limits, trace=trace, report=_progress, signalled=signalled)
    except CheckStopped as error:
        return 128 + error.number
    report = Report(run=run, verdicts=tuple(judge(run)))
    code = _print(report, options, shlex.join(options.agent))
    if not options.json:
        for line in _hints(report):
            print(line)
    return code if code or run.is_complete else 2


def _print(report: Report, options: argparse.Namespace, name: str) -> int:
    """Print or write the report. Return 1 if a rule failed, otherwise 0."""
    if options.junit is not None:
        try:
            Path(options.junit).write_bytes(report.junit(name))
        except OSError as error:
            raise CheckError(f"--junit {options.junit}: {error.strerror or error}") from error
    if options.json:
        for row in report.rows():
            line = json.dumps(row, ensure_ascii=False)
            print(line if line.isprintable() else json.dumps(row))  # texts of the agent may control a terminal
    else:
        for line in report.text(everything=options.all):
            print(line)
    return 1 if report.failed(strict=options.strict) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="acp-check",
        description="Check whether an agent follows the rules of the Agent Client Protocol.",
        epilog="Exit code: 0 if no rule of severity MUST failed, 1 if one failed, 2 if the check could not be run.",
    )
    add = parser.add_argument
    add(
        "agent",
        metavar="COMMAND",
        nargs="*",
        help="the agent's command, after --; {base_url}, {model}, {key}, {workspace} and {home} in it are filled in",
    )
    add("--recording", metavar="FILE", help="check this recording of a connection instead of an agent")
    add(
        "--endpoint-env",
        metavar="NAME",
        action="append",
        default=[],
        help="another environment variable, besides OPENAI_BASE_URL, that gets the base URL of the check's endpoint",
    )
    add(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="an environment variable for the agent; with NAME alone, the value comes from the current environment",
    )
    add("--timeout", metavar="SECONDS", type=float, default=30.0, help="how long to wait for each answer (default: 30)")
    add("--trace", metavar="FILE", help="record all messages, one JSON object per line")
    add("--all", action="store_true", help="print all rules, not only those that failed")
    add("--strict", action="store_true", help="exit with 1 also if a rule of severity SHOULD failed")
    add("--json", action="store_true", help="print one JSON object for each rule")
    add("--junit", metavar="FILE", help="write the result as JUnit XML")
    add("--rules", action="store_true", help="only list the rules")
    add("--version", action="version", version=f"acp-check {__version__}")
    return parser


def _hints(report: Report) -> list[str]:
    hints = []
    if any(verdict.rule.id == "prompt.text" and verdict.findings for verdict in report.verdicts):
        hints.append(
            "No prompt worked, so many rules could not be tried. The agent may need a model: see --endpoint-env, --env"
            " and {base_url} in acp-check --help."
        )
    elif report.run.endpoint is not None and not report.run.endpoint.requests:
        hints.append("The agent did not use the endpoint of the check; rules that need it do not apply.")
    if not report.run.is_complete:
        hints.append("The check ran out of time and is not complete.")
    return hints


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """During the block, SIGINT and SIGTERM do not end this process, so that it can end the agent's processes first. The
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
        print(f"... {words}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

"""Checks an agent in a temporary directory, with the check's own endpoint and MCP server."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acp_check.client import TimeLimits
from acp_check.drive import Drive
from acp_check.endpoint import FILE, MODEL, ScriptedEndpoint
from acp_check.errors import AgentEnded, CheckError
from acp_check.process import AgentProcess
from acp_check.run import Run

KEY = "acp-check"
_SERVER_ARGUMENTS = ("one", "two words")
_SERVER_VARIABLE = "ACP check ☕"
_INHERITED = (
    "PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "USER", "LOGNAME", "SHELL", "TZ", "SYSTEMROOT",
    "VIRTUAL_ENV", "NODE_PATH", "LD_LIBRARY_PATH",
)  # fmt: skip

_SERVER = """
import json, os, sys
with open(sys.argv[1], "a", encoding="utf-8") as log:
    variable = os.environb.get(b"ACP_CHECK", b"").decode("utf-8", "replace")
    log.write(json.dumps({"arguments": sys.argv[2:], "variable": variable}) + "\\n")
for line in sys.stdin.buffer:
    request = json.loads(line)
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if request.get("method") == "initialize":
        version = request["params"].get("protocolVersion")
        info = {"name": "acp-check", "version": "1"}
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif request.get("method") == "tools/list":
        answer["result"] = {"tools": []}
    elif request.get("method") == "ping":
        answer["result"] = {}
    else:
        answer["error"] = {"code": -32601, "message": "Method not found"}
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""
"""An MCP server without tools. It logs its arguments and one environment variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The agent to check. The placeholders `{base_url}`, `{model}`, `{key}`, `{workspace}` and `{home}` are replaced in
    the command and in the values of variables."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for the agent's environment."""
    endpoint_variables: Sequence[str] = ()
    """The names of variables that are set to the base URL."""
    inherited: Sequence[str] = ()
    """The names of variables that the agent gets from the current environment."""


def check_agent(
    subject: Subject,
    limits: TimeLimits,
    *,
    trace: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
    signalled: Callable[[], int] = lambda: 0,
) -> Run:
    """Run the whole check of an agent, and return all that happened. The check ends early if `signalled` returns a
    number other than 0.

    :raises CheckError: the agent cannot be started, or ends before it answers `initialize`; or `trace` cannot be
        written.
    :raises CheckStopped: `signalled` returned a number other than 0.
    """
    with tempfile.TemporaryDirectory(prefix="acp-check-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch).resolve()
        home, workspace, log = root / "home", root / "workspace", root / "server.jsonl"
        for directory in (home, workspace, root / "tmp"):
            directory.mkdir()
        (workspace / FILE).write_text("A file of the check.\n", "utf-8")
        script = root / "server.py"
        script.write_text(_SERVER, "utf-8")
        server = {
            "name": "acp-check",
            "command": sys.executable,
            "args": [str(script), str(log), *_SERVER_ARGUMENTS],
            "env": [{"name": "ACP_CHECK", "value": _SERVER_VARIABLE}],
        }
        with ScriptedEndpoint(str(workspace)) as endpoint, _Trace(trace) as write:
            values = {
                "base_url": endpoint.base_url,
                "model": MODEL,
                "key": KEY,
                "workspace": str(workspace),
                "home": str(home),
            }
            command = [_filled(word, values) for word in subject.command]
            environment = _environment(subject, values, root)
            stderr, started_in = root / "stderr.txt", Path.cwd()  # lets the command use relative paths
            drive = Drive(
                start=lambda _: AgentProcess(command, environment, started_in, stderr),
                workspace=workspace,
                endpoint=endpoint.log,
                limits=limits,
                server=server,
                trace=write,
                report=report,
                signalled=signalled,
            )
            run = _run(drive, stderr)
            endpoint.wait_until_left(limits.optional_s)
            run.stderr = _end_of(stderr)
        run.servers_started = _started(log)
        return run


def _run(drive: Drive, stderr: Path) -> Run:
    """Run a check. :raises CheckError: the agent ended before it answered the first `initialize`."""
    try:
        return drive.run()
    except AgentEnded as error:
        told = _end_of(stderr).strip()
        raise CheckError(f"{error} " + (f"Its stderr: {told}" if told else "It wrote nothing to stderr.")) from None


def _environment(subject: Subject, values: Mapping[str, str], root: Path) -> dict[str, str]:
    home = values["home"]
    environment = {name: os.environ[name] for name in (*_INHERITED, *subject.inherited) if name in os.environ}
    environment |= {
        "HOME": home,
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_STATE_HOME": f"{home}/.local/state",
        "XDG_CACHE_HOME": f"{home}/.cache",
        "TMPDIR": str(root / "tmp"),
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_BASE": values["base_url"],
        "OPENAI_API_KEY": KEY,
        "OPENAI_MODEL": MODEL,
    }
    environment |= dict.fromkeys(subject.endpoint_variables, values["base_url"])
    return environment | {name: _filled(value, values) for name, value in subject.variables.items()}


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _started(log: Path) -> list[dict[str, Any]]:
    """Return the arguments and the environment variable of each start of the MCP server."""
    try:
        return [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        return []


def _end_of(stderr: Path) -> str:
    try:
        return stderr.read_bytes()[-2000:].decode(errors="replace")
    except OSError:
        return ""


class _Trace:
    """Writes a recording to a file. If no file was given, nothing is written."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._descriptor: int | None = None

    def __enter__(self) -> Callable[[bytes], None]:
        if self._file is not None:
            try:
                self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            except OSError as error:
                raise CheckError(f"{self._file}: cannot be written: {error.strerror or error}") from error
        return self._write

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, line)

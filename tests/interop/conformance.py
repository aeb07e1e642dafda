"""Runs the official conformance suite of MCP against crow's connections to MCP servers.

Run with `make conformance`. For each scenario, the suite starts a server and then this module with the server's URL as
its argument. The module then starts a real `crow acp` whose scripted model calls all tools of that server.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, calls, text

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "conformance"
RESULTS = BUILD / "results"
SUITE = (
    str(BUILD / "node_modules" / ".bin" / "node"),
    str(BUILD / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"),
)
REVISIONS = ("2025-11-25", "2026-07-28")
WITHOUT_OAUTH = "auth/"
"""The scenarios whose names begin like this need OAuth, which crow does not have. They are run, but may fail."""

SERVER = "conf"
EXAMPLES: Mapping[str, Any] = {
    "string": "text",
    "integer": 7,
    "number": 2.5,
    "boolean": True,
    "array": [],
    "object": {},
}


# What the suite starts: one crow, one session, one prompt


async def drive(url: str, home: Path, work: Path) -> None:
    """Let a crow call the tools of the server at `url`, and print what its session shows."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    async with FakeEndpoint(otherwise=lambda request: reply(request, context)) as endpoint:
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_SANDBOX": "off",
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": "sk-test-0123456789",
            "CROW_MODEL": "fake-model",
        }
        answers = {"elicitation/create": lambda _: {"action": "accept", "content": {}}}
        argv = (sys.executable, "-m", "crow", "acp")
        async with CrowProcess(argv, env=env, cwd=work, answers=answers) as crow:
            await crow.initialize(elicitation={"form": {}, "url": {}})
            server = {"type": "http", "name": SERVER, "url": url, "headers": []}
            session = await crow.new_session(work, mcpServers=[server])
            await crow.prompt(session, "Use the tools.")
            for update in crow.updates(session, "tool_call", "tool_call_update"):
                print(json.dumps(update))


def drive_here(url: str) -> None:
    """Run `drive` in an empty folder, and print crow's log."""
    with tempfile.TemporaryDirectory(prefix="crow-conformance-") as name:
        home, work = Path(name, "home"), Path(name, "work")
        home.mkdir()
        work.mkdir()
        asyncio.run(drive(url, home, work))
        for log in home.rglob("*.log"):
            print(log.read_text(), file=sys.stderr)


def reply(request: Recorded, context: Mapping[str, Any]) -> Reply:
    """The model's answer: calls of all tools of the server, and then a word."""
    if request.body["messages"][-1]["role"] == "tool":
        return text("Done.")
    if "toolCalls" in context:
        named = [(f"{SERVER}__{call['name']}", call["arguments"]) for call in context["toolCalls"]]
    else:
        tools = [tool["function"] for tool in request.body.get("tools", ())]
        own = [tool for tool in tools if tool["name"].startswith(f"{SERVER}__")]
        named = [(tool["name"], example(tool["parameters"])) for tool in own]
    return calls(*named) if named else text("There are no tools.")


def example(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a tool with this schema should accept."""
    required = schema.get("required", ())
    return {name: EXAMPLES.get(schema["properties"][name].get("type")) for name in required}


# What `make conformance` runs: the required scenarios, one after the other


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a scenario: how many of its checks passed, and which failed."""

    revision: str
    scenario: str
    passed: int
    failed: Sequence[str]
    seconds: float

    @property
    def is_passed(self) -> bool:
        return self.passed > 0 and not self.failed


def required(revision: str) -> list[str]:
    """The client scenarios that a revision of the protocol requires."""
    command = [*SUITE, "list", "--requirements", revision]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    section = listed.partition("\nClient scenarios")[2].partition("\n\n")[0]
    return [line.removeprefix("  - ") for line in section.splitlines() if line.startswith("  - ")]


def run(revision: str, scenario: str) -> Result:
    """Run one scenario."""
    began = time.monotonic()
    driver = shlex.join([sys.executable, "-m", "tests.interop.conformance"])
    command = [*SUITE, "client", "--command", driver, "--scenario", scenario, "--spec-version", revision]
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run([*command, "-o", name], cwd=ROOT, check=False, capture_output=True, text=True)
        found = next(Path(name).rglob("checks.json"), None)
        checks = [] if found is None else json.loads(found.read_text())
        words = "".join(f"\n{file.name}\n{file.read_text()}" for file in sorted(Path(name).rglob("*.txt")))
    log = RESULTS / f"{revision}-{scenario.replace('/', '-')}.txt"
    log.write_text(f"{done.stdout}{done.stderr}{words}")
    failed = [check["name"] for check in checks if check["status"] in ("FAILURE", "WARNING")]
    if done.returncode != 0 and not failed:
        failed = ["the suite or crow failed"]
    passed = sum(check["status"] == "SUCCESS" for check in checks)
    return Result(revision=revision, scenario=scenario, passed=passed, failed=failed, seconds=time.monotonic() - began)


def main(chosen: Sequence[str]) -> int:
    """Run the required scenarios, or the `chosen` ones, and print a table. Return 1 if a scenario without OAuth
    failed."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = []
    print(f"{'revision':<12}{'scenario':<42}{'checks':>9}{'s':>7}  failed")
    for revision in REVISIONS:
        for scenario in required(revision):
            if chosen and scenario not in chosen:
                continue
            result = run(revision, scenario)
            results.append(result)
            total = result.passed + len(result.failed)
            failed = ", ".join(dict.fromkeys(result.failed))
            if failed and scenario.startswith(WITHOUT_OAUTH):
                failed = "needs OAuth"
            row = f"{revision:<12}{scenario:<42}{f'{result.passed} of {total}':>9}{result.seconds:>7.1f}  {failed}"
            print(row.rstrip(), flush=True)
    for revision in REVISIONS:
        own = [result for result in results if result.revision == revision]
        plain = [result for result in own if not result.scenario.startswith(WITHOUT_OAUTH)]
        print(
            f"{revision}: {sum(result.is_passed for result in own)} of {len(own)} scenarios pass; "
            f"{sum(result.is_passed for result in plain)} of the {len(plain)} that need no OAuth"
        )
    print(f"The output of each scenario is in {RESULTS.relative_to(ROOT)}.")
    return int(any(not one.is_passed and not one.scenario.startswith(WITHOUT_OAUTH) for one in results))


if __name__ == "__main__":
    if "MCP_CONFORMANCE_SCENARIO" in os.environ:
        drive_here(sys.argv[1])
    else:
        sys.exit(main(sys.argv[1:]))

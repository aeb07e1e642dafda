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

import httpx2

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
CLIENT_METADATA = "https://conformance-test.local/client-metadata.json"
"""The client metadata document that the suite expects in the scenario of that name."""
READY_CHECKS = 120

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
        write_settings(home, url, context)
        browser = Browser()
        answers = {"elicitation/create": browser.answer}
        argv = (sys.executable, "-m", "crow", "acp")
        async with CrowProcess(argv, env=env, cwd=work, answers=answers) as crow:
            await crow.initialize(elicitation={"form": {}, "url": {}})
            session = await crow.new_session(work)
            await until_started(crow, session)
            await crow.prompt(session, "Use the tools.")
            await browser.close()
            for update in crow.updates(session, "tool_call", "tool_call_update"):
                print(json.dumps(update))


def write_settings(home: Path, url: str, context: Mapping[str, Any]) -> None:
    """Configure the server, and the client if the scenario expects one that was registered by hand."""
    settings = {"url": url}
    if os.environ["MCP_CONFORMANCE_SCENARIO"] == "auth/basic-cimd":
        settings["oauth_client_metadata_url"] = CLIENT_METADATA
    if "client_id" in context:
        settings |= {f"oauth_{key}": context[key] for key in ("client_id", "client_secret", "issuer")}
    lines = [f"[mcp_servers.{SERVER}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    (home / "config.toml").write_text("\n".join(lines))


async def until_started(crow: CrowProcess, session: str) -> None:
    """Wait until the server is ready or has failed, with the user's command for that."""
    for _ in range(READY_CHECKS):
        seen = len(crow.updates(session))
        await crow.prompt(session, "/mcp")
        shown = json.dumps(crow.updates(session)[seen:])
        print(shown)
        if "starting" not in shown:
            return
        await asyncio.sleep(0.25)


class Browser:
    """A user who accepts every form and visits every page."""

    def __init__(self) -> None:
        self._visits: list[asyncio.Task[None]] = []

    def answer(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Answer `elicitation/create`."""
        if params["mode"] == "url":
            self._visits.append(asyncio.create_task(self._visit(params["url"])))
        return {"action": "accept", "content": {}}

    async def close(self) -> None:
        """Wait for the visits."""
        await asyncio.gather(*self._visits)

    async def _visit(self, page: str) -> None:
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            print(page, (await client.get(page)).status_code)


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
    """Run the required scenarios, or the `chosen` ones, and print a table. Return 1 if one failed."""
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
            row = f"{revision:<12}{scenario:<42}{f'{result.passed} of {total}':>9}{result.seconds:>7.1f}  {failed}"
            print(row.rstrip(), flush=True)
    for revision in REVISIONS:
        own = [result for result in results if result.revision == revision]
        print(f"{revision}: {sum(result.is_passed for result in own)} of {len(own)} scenarios pass")
    print(f"The output of each scenario is in {RESULTS.relative_to(ROOT)}.")
    return int(not all(one.is_passed for one in results))


if __name__ == "__main__":
    if "MCP_CONFORMANCE_SCENARIO" in os.environ:
        drive_here(sys.argv[1])
    else:
        sys.exit(main(sys.argv[1:]))

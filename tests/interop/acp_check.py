"""`acp-check` has no false finding on crow, nor on agents built with the published SDKs.

Run by `make interop-acp-check`. AGENT_MJS is where the TypeScript agent stands beside its SDK.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from acp_check.__main__ import main

ROOT = Path(__file__).parents[2]
OFFERED_NO_SERVERS = "session.mcp-connected"
AGENTS = {
    "crow": ([sys.executable, "-m", "crow", "acp", "--model", "{model}"], set()),
    "typescript": (["node", os.environ.get("AGENT_MJS", "agent.mjs")], {OFFERED_NO_SERVERS}),
    "python": (
        [sys.executable, str(ROOT / "tests" / "interop" / "agent.py")],
        {
            OFFERED_NO_SERVERS,
            "jsonrpc.invalid-request",
            "jsonrpc.parse-error",
            "jsonrpc.survives-batch",
            "jsonrpc.survives-invalid-request",
        },
    ),
}
"""Each agent's command, and what is truly wrong with it. The small agents start no MCP servers; the Python SDK does not
answer lines that are not JSON, and stops reading at a line that is JSON but no object."""


@pytest.mark.parametrize("name", AGENTS)
def test_findings_are_true(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, expected = AGENTS[name]
    code = main(["--json", "--timeout", "120", "--env", f"PYTHONPATH={ROOT}", "--", *command])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["rule"] for row in rows if row["state"] == "failed"} == expected
    assert code == 0

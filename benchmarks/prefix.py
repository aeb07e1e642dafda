"""Measures how many bytes of requests a provider's cache saves: `python -m benchmarks.prefix [SESSIONS]`.

Scripted sessions run in the real process, against an endpoint whose cache compares bytes. Between two prompts they
change mode, model, AGENTS.md, skills and MCP servers, compact, undo, or are opened again. Answers call tools, start
subagents, break off, are cancelled, or are refused as too long. The exit code is 1 if a request changed bytes that
were sent before, and no declared break explains it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import anyio

from benchmarks.rows import ROOT, Row, arguments, report
from tests.support.acp_client import CrowProcess
from tests.support.prefix_cache import CachingEndpoint, Prefixes, run_session, write_config

__all__ = ["rows_of"]

SESSIONS = 50
PROMPTS = {True: 12, False: 40}
"""Prompts of a session, with changes between them and without."""

CAUSES = {
    "added": "new messages",
    "summary": "requests for a summary",
    "checkpoint": "checkpoints",
    "kept": "messages that a checkpoint kept",
    "mask": "hidden tool outputs",
    "restore": "compactions taken back",
    "prompt": "changes of system message, tools or model",
    "move": "undo, redo and retry",
    "first": "first requests",
}


async def measure(directory: Path, sessions: int, *, changes: bool, wire: str = "chat") -> Prefixes:
    home, work = directory / "home", directory / "work"
    work.mkdir(parents=True)
    model = CachingEndpoint(home / "crow.db")
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url, wire)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_SANDBOX": "off",
            "OPENAI_API_KEY": "sk-test-0123456789",
        }
        async with CrowProcess([sys.executable, "-m", "crow", "acp"], env=env, cwd=work) as agent:
            agent.checks_schema = False
            await agent.initialize()
            for seed in range(sessions):
                await run_session(agent, model, work / str(seed), seed, prompts=PROMPTS[changes], changes=changes)
                agent.log.clear()
    return model.found


def rows_of(found: Prefixes, sessions: int) -> list[Row]:
    missed = 100 * found.missed / max(1, found.repeated)
    fresh = 100 * (1 - found.hits / max(1, found.sent))
    megabytes = found.sent / 1e6
    rows = [
        Row("repeated bytes that missed the cache, outside breaks", missed, missed, "%", 0.5),
        Row("requests with an undeclared break", len(found.undeclared), len(found.undeclared), "", 0),
        Row("bytes that missed the cache, of all bytes sent", fresh, fresh, "%"),
        Row(f"requests of {sessions} sessions", found.requests, found.requests, ""),
        Row("… bytes of their prompts", megabytes, megabytes, "MB"),
    ]
    rows += [Row(f"declared breaks: {kind}", count, count, "") for kind, count in sorted(found.breaks.items())]
    for cause, name in CAUSES.items():
        share = 100 * found.fresh[cause] / max(1, found.sent)
        rows.append(Row(f"of all bytes, missed by {name}", share, share, "%"))
    return rows


async def main(sessions: int, changes: bool, wire: str, file: Path | None) -> int:
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).resolve()) as directory:  # noqa: ASYNC240
        found = await measure(Path(directory), sessions, changes=changes, wire=wire)
    rows = rows_of(found, sessions)
    report(rows, file)
    print("\n".join(found.undeclared))
    return any(row.is_over for row in rows)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("sessions", nargs="?", type=int, default=SESSIONS, help="how many sessions to run")
    parser.add_argument("--no-changes", action="store_true", help="only prompt: longer sessions, which crow compacts")
    parser.add_argument("--wire", choices=["chat", "responses", "messages"], default="chat", help="which API to speak")
    options = parser.parse_args()
    sys.exit(anyio.run(main, options.sessions, not options.no_changes, options.wire, options.json))

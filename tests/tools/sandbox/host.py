"""A process in crow's place: it runs confined commands for tests, if wanted as another user.

It reads a JSON object from each line of standard input, and answers with one. Everything is imported before the user
changes, because the other user may not be able to read crow's files.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from crow.tools.process import Process, start
from crow.tools.sandbox import Confinement, Sandbox
from crow.tools.sandbox.landlock import Landlock

LIMIT_S = 30


async def run(sandbox: Sandbox, request: dict[str, Any]) -> tuple[int | None, str]:
    """Run a confined command. Return its exit code and output."""
    paths: dict[str, Any] = {name: tuple(map(Path, value)) for name, value in request["paths"].items()}
    confinement = Confinement(
        access=request["access"],
        temporary=Path(request["temporary"]),
        has_network=request["has_network"],
        **paths,
    )
    output = bytearray()
    process: Process = await sandbox.start(
        request["argv"], confinement, cwd=Path(request["cwd"]), env=request["env"], on_output=output.extend
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            await process.exited.wait()
            await process.output_ended.wait()
    finally:
        await process.end(1)
    return process.returncode, output.decode(errors="replace")


async def warm_up() -> None:
    """Import everything. No confined thread may run while the user changes: glibc changes all threads at once."""
    process = await start(["/bin/true"], cwd=Path("/"), env={}, on_output=lambda _: None)
    await process.wait()
    await process.end(1)


def describe(secret: str) -> dict[str, object]:
    """What this process may still do."""
    limits = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            limits |= {line.strip() for line in file if line.startswith(("NoNewPrivs", "Seccomp:", "CapEff"))}
    with open(secret) as file:
        return {"limits": sorted(limits), "secret": file.read()}


def main() -> None:
    """Answer requests until standard input ends. The first argument is a user's id."""
    user = int(sys.argv[1])
    sandboxes = {0: Landlock(), 1: Landlock(abi=1)}
    if user != os.geteuid():
        asyncio.run(warm_up())
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        if not os.access(os.getcwd(), os.R_OK):
            os.chdir("/")
    for line in sys.stdin:
        request = json.loads(line)
        answer: object
        try:
            if "secret" in request:
                answer = describe(request["secret"])
            elif "open" in request:
                handle = os.open(request["open"], os.O_RDONLY)
                os.set_inheritable(handle, True)
                answer = handle
            else:
                answer = asyncio.run(run(sandboxes[request["abi"]], request))
        except OSError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

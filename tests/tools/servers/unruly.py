"""MCP servers that misbehave; the first argument says how. Its process id, and that of a child, go into the file that
the second argument names, if there is one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

how = sys.argv[1]


def note(*pids: int) -> None:
    if len(sys.argv) > 2:
        with open(sys.argv[2] + ".part", "w") as file:
            file.write(" ".join(map(str, pids)))
        os.rename(sys.argv[2] + ".part", sys.argv[2])


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve(before_answer: Callable[[], None] = lambda: None) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        before_answer()
        result: dict[str, Any]
        if message["method"] == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "unruly", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif message["method"] == "tools/list" and how == "no-schema":
            result = {"tools": [{"name": "echo"}]}
        elif message["method"] == "tools/list":
            tools = [{"name": "echo", "inputSchema": {"type": "object"}}] * 2
            result = {"tools": tools}
        else:
            result = {"content": [{"type": "text", "text": "still here"}]}
        send({"jsonrpc": "2.0", "id": message["id"], "result": result})


def garbage() -> None:
    sys.stdout.write('Listening...\n{"half": \n[1, 2]\nnull\n{"jsonrpc": "2.0", "id": 999, "result": {}}\n\n')
    sys.stdout.flush()


def flood() -> None:
    sys.stderr.write("complaint " * 20 + "\n")
    for _ in range(5_000):
        sys.stderr.write("x" * 200 + "\n")
    sys.stderr.flush()


match how:
    case "mute":
        note(os.getpid())
        time.sleep(600)
    case "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-I", "-S", __file__, "deaf-child"], stdin=subprocess.DEVNULL)
        note(os.getpid(), child.pid)
        serve()
        while True:
            time.sleep(600)
    case "deaf-child":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    case "early-end":
        print("bad configuration: no token", file=sys.stderr)
        sys.exit(3)
    case "leaves-child":
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        note(os.getpid(), child.pid)
        sys.exit(0)
    case "leaves-stray":
        program = [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "stray.py"), "deaf"]
        note(int(subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout))
        serve()
    case "garbage":
        serve(garbage)
    case "no-schema":
        serve()
    case "flood":
        serve(flood)
    case "endless-line":
        while True:
            sys.stdout.write("x" * 1_000_000)

"""An MCP server over standard streams that starts slowly: after a number of seconds, or when a file exists."""

import json
import os
import sys
import time
from typing import Any

when = sys.argv[1]
TOOL = {"name": "ping", "description": "Ping.", "inputSchema": {"type": "object"}}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    match message["method"]:
        case "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "slow", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": "pong"}]}
    return {}


if when.isdecimal():
    time.sleep(int(when))
else:
    while not os.path.exists(when):
        time.sleep(0.01)
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and "method" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer(message)}), flush=True)

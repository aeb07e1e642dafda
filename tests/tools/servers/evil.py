"""An MCP server over standard streams whose every text tries to control a terminal; the second argument is that text.

The first argument says what it does: `lists` offers tools, prompts and resources with such names, `refuses` refuses to
start, `dies` writes the text to standard error and ends.
"""

import json
import sys
from typing import Any

how, evil = sys.argv[1], json.loads(sys.argv[2])
ANY = {"type": "object"}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    match message["method"]:
        case "initialize":
            if how == "dies":
                print(evil, file=sys.stderr, flush=True)
                sys.exit(3)
            if how == "refuses":
                return {"error": {"code": -32000, "message": evil}}
            capabilities: dict[str, Any] = {"tools": {}, "prompts": {}, "resources": {}}
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": capabilities, "instructions": evil}
            return {"result": {**result, "serverInfo": {"name": evil, "version": evil, "title": evil}}}
        case "tools/list":
            bad = {"name": f"bad {evil}", "inputSchema": {"type": evil}}
            tool = {"name": f"tool {evil}", "title": evil, "description": evil, "inputSchema": ANY}
            return {"result": {"tools": [tool, bad]}}
        case "prompts/list":
            return {"result": {"prompts": [{"name": f"prompt {evil}", "description": evil}]}}
        case "resources/list":
            return {"result": {"resources": [{"uri": "docs:///a", "name": evil, "description": evil}]}}
        case "resources/templates/list":
            return {"error": {"code": -32000, "message": evil}}
        case "tools/call":
            return {"error": {"code": -32000, "message": evil}}
    return {"result": {}}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and "method" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer(message)}), flush=True)

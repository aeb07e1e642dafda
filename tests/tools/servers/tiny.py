"""A well-behaved MCP server over standard streams, without any library: each tool shows one thing a server may do.

Arguments: `modern` speaks only the newer protocol; it refuses the old handshake by the error code that follows, by
-32601 without one, and with `greets` it answers it with the newer version. `pages` lists its tools one a page. Without
arguments it speaks the classic protocol.
"""

import json
import os
import sys
import threading
from typing import Any

PICTURE = "iVBORw0KGgo="
OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": f"Does {name}.", "inputSchema": OBJECT}
    for name in (
        "echo",
        "refuse",
        "broken",
        "picture",
        "links",
        "count",
        "wait",
        "die",
        "more",
        "env",
        "log",
        "get.user",
    )
]
TOOLS.append({"name": "table", "inputSchema": {"type": "object"}, "title": "Give a table"})
TOOLS.append(
    {
        "name": "liar",
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    }
)
cancelled = threading.Event()


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(words: str, **more: object) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], **more}


def call(params: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    arguments = params.get("arguments") or {}
    match params["name"]:
        case "echo":
            return text(f"you said {arguments.get('text')}")
        case "refuse" if arguments.get("text") == "without words":
            return {"content": [], "isError": True}
        case "refuse":
            return text("no such user", isError=True)
        case "picture":
            return {"content": [{"type": "image", "data": PICTURE, "mimeType": "image/png"}]}
        case "table":
            return {"content": [], "structuredContent": {"rows": [1, 2]}}
        case "liar" if arguments:
            return {"content": "no list"}
        case "liar":
            return {"content": [], "structuredContent": {"n": "one"}}
        case "links":
            inside = {"uri": "file:///a.txt", "text": "inside"}
            packed = {"uri": "file:///c.zip", "mimeType": "application/zip", "blob": "AAAA"}
            return {
                "content": [
                    {"type": "resource_link", "uri": "file:///b.txt", "name": "b", "description": "the other"},
                    {"type": "resource", "resource": inside},
                    {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
                    {"type": "resource", "resource": packed},
                    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                ]
            }
        case "count":
            for step in (1, 2):
                send(
                    {
                        "method": "notifications/progress",
                        "params": {"progressToken": meta["progressToken"], "progress": step, "total": 2},
                    }
                )
            return text("counted")
        case "wait":
            token = meta["progressToken"]
            send({"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}})
            cancelled.wait(600)
            return text("cancelled" if cancelled.is_set() else "waited")
        case "die":
            print("about to die", file=sys.stderr, flush=True)
            os._exit(7)
        case "more":
            TOOLS.append({"name": "extra", "inputSchema": {"type": "object"}})
            send({"method": "notifications/tools/list_changed"})
            return text("there are more now")
        case "env":
            return text(str(os.environ.get(arguments["text"])))
        case "log":
            # the newer protocol allows messages only if the request asks for a level
            if "modern" not in sys.argv or meta.get("io.modelcontextprotocol/logLevel") == "info":
                messages = (("warning", arguments["text"]), ("notice", {"n": 1}), ("debug", "hidden"))
                for level, data in messages * arguments.get("times", 1):
                    params = {"level": level, "logger": "db", "data": data}
                    send({"method": "notifications/message", "params": params})
            return text("logged")
        case name:
            return text(f"called {name}")


def listing(params: dict[str, Any]) -> dict[str, Any]:
    if "pages" not in sys.argv:
        return {"tools": TOOLS}
    at = int((params or {}).get("cursor") or 0)
    more = {"nextCursor": str(at + 1)} if at + 1 < len(TOOLS) else {}
    return {"tools": TOOLS[at : at + 1], **more}


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    params = message.get("params") or {}
    modern = "modern" in sys.argv
    match message["method"]:
        case "initialize" if not modern or "greets" in sys.argv:
            return {
                "protocolVersion": "2026-07-28" if modern else params["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "tiny", "version": "1"},
            }
        case "server/discover" if modern:
            return {
                "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {}},
                "ttlMs": 0,
                "cacheScope": "private",
                "resultType": "complete",
            }
        case "tools/list":
            cache = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"} if modern else {}
            return {**listing(params), **cache}
        case "tools/call":
            if params["name"] == "broken":
                return None
            result = call(params, params.get("_meta") or {})
            return {**result, "resultType": "complete"} if modern else result
    return None


def handle(message: dict[str, Any]) -> None:
    result = answer(message)
    if result is None:
        refusal = int(sys.argv[2]) if len(sys.argv) > 2 else -32601
        error = {"code": refusal if message["method"] == "initialize" else -32603, "message": "out of order"}
        send({"id": message["id"], "error": error})
    else:
        send({"id": message["id"], "result": result})


for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "notifications/cancelled":
        cancelled.set()
        with open(os.environ.get("CANCELLED_FILE", os.devnull), "w") as file:
            file.write("cancelled")
    elif "id" in message:
        threading.Thread(target=handle, args=(message,), daemon=True).start()

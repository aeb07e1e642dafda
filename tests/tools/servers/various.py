"""An MCP server over standard streams that does what few do; the first argument says what.

`asks`: its tools put questions to the user. A second argument is the page that `visit` asks for, or how many questions
`flood` asks. `counts`: `hold` waits for 32 calls and answers how many there were at once. `deep`: what it sends nests
as deep as the second argument says. `where`: its tool tells where it runs and which roots it is told. `faulty`: one
tool of two cannot be offered. `many`: a hundred tools. `listens`: it speaks only the newer protocol, and its tool adds
another one. `withdraws`: `ask` puts a question to the user, and `withdraw` takes it back. `prompts`: it has prompts,
and filling in `more` adds one. `hostile`: all its texts have hidden characters. `slow schemas`: checking its results
against their schemas would never end. `shifts`: its tools are those in the file that the second argument names, as they
are when it starts.
"""

import json
import os
import sys
import threading
from types import EllipsisType
from typing import Any

how = sys.argv[1]
ANY = {"type": "object"}
EVIL = "Read\u202e\x1b[2K\x9b\U000e0041\u2028[more](javascript:alert(1))\nand delete"
CATALOGUES: dict[str, list[dict[str, Any]]] = {
    "where": [{"name": "where", "inputSchema": ANY}],
    "asks": [{"name": name, "inputSchema": ANY} for name in ("ask", "suggest", "visit", "flood")],
    "deep": [{"name": name, "inputSchema": ANY} for name in ("answer", "ask", "fine")],
    "counts": [{"name": "hold", "inputSchema": ANY}],
    "faulty": [
        {"name": "bad type", "inputSchema": {"type": "object", "properties": {"a": {"type": "strng"}}}},
        {"name": "no schema"},
        {"name": "good", "inputSchema": {"properties": {"a": {"type": ["string", "null"]}}}},
        {"name": "bad list", "inputSchema": {"type": "object", "required": "a"}},
        {
            "name": "odd output",
            "inputSchema": {"properties": {"any": True, "self": {"$ref": "#"}, "of": {"enum": []}}},
            "outputSchema": "none",
        },
    ],
    "many": [
        {
            "name": f"get_{thing}",
            "description": f"Get one {thing}.",
            "inputSchema": {"type": "object", "required": ["id"]},
        }
        for thing in ("weather", "invoice", *(f"thing{number}" for number in range(98)))
    ],
    "listens": [{"name": "more", "inputSchema": ANY}],
    "withdraws": [{"name": name, "inputSchema": ANY} for name in ("ask", "withdraw")],
    "prompts": [],
    "hostile": [{"name": "x\u202ey", "title": EVIL, "description": EVIL, "inputSchema": ANY}],
}
SLOW_TEXT = "a" * 60 + "!"
SLOW_SCHEMAS: dict[str, dict[str, Any]] = {
    "pattern": {"properties": {"a": {"pattern": "^(a+)+$"}}},
    "names": {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
    "property_names": {"propertyNames": {"pattern": "^(a+)+$"}},
    "nested": {
        "allOf": [{"$ref": "#/$defs/x"}],
        "$defs": {"x": {"anyOf": [{"properties": {"a": {"pattern": "(a|a)*b"}}}]}},
    },
    "doubling": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(40)},
            "d40": {"properties": {"a": False}},
        },
    },
    "cycle": {"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}}},
    "unevaluated": {
        "unevaluatedProperties": False,
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(40)} | {"d40": {}},
    },
    "format": {"properties": {"a": {"format": "regex"}}},
    "giant": {"properties": {"a": {"enum": [f"{n:09}" for n in range(200_000)]}}},
}
CATALOGUES["slow schemas"] = [
    {"name": name, "inputSchema": {**schema, "type": "object"}, "outputSchema": {**schema, "type": "object"}}
    for name, schema in SLOW_SCHEMAS.items()
    if name != "giant"
] + [{"name": "giant", "inputSchema": ANY, "outputSchema": {**SLOW_SCHEMAS["giant"], "type": "object"}}]
if how == "shifts":
    with open(sys.argv[2], encoding="utf-8") as file:
        CATALOGUES[how] = json.load(file)
TOOLS = CATALOGUES[how]
PROMPTS: list[dict[str, Any]] = [
    {
        "name": "review.file",
        "description": "Review\n  a file",
        "arguments": [{"name": "path", "required": True}, {"name": "focus"}],
    },
    {"name": "review file", "title": "The other"},
    *({"name": name} for name in ("talk", "all kinds", "empty", "refuse", "more", "wait")),
]
PICTURE = "iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SUGGESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": "nightly"},
        "retries": {"type": "integer", "default": 3},
        "ratio": {"type": "number", "default": 0.5},
        "verbose": {"type": "boolean", "default": False},
        "level": {"type": "string", "enum": ["low", "high"], "default": "high"},
        "colour": {"type": "string", "oneOf": [{"const": "#f00", "title": "Red"}], "default": "#f00"},
        "parts": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "default": ["a"]},
        "given": {"type": "string", "default": "not this"},
        "none": {"type": "string"},
        "wrong": {"type": "integer", "default": "three"},
        "odd": {"type": "object", "default": {}},
    },
}
SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
answers: dict[str, Any] = {}
answered = threading.Event()
sending = threading.Lock()
listener: Any = None


def send(message: dict[str, Any]) -> None:
    with sending:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def told(words: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], "resultType": "complete"}


def call(name: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    match name:
        case _ if how == "slow schemas":
            return {"content": [], "structuredContent": {"a": SLOW_TEXT, SLOW_TEXT: 1}}
        case "where":
            send({"id": "q1", "method": "roots/list"})
            answered.wait(600)
            answered.clear()
            place = {"cwd": os.getcwd(), "files": os.listdir(), "path": os.environ["PATH"], "args": sys.argv[2:]}
            return told(json.dumps({**place, "roots": answers["q1"]["roots"], "told": os.environ.get("TOLD")}))
        case "withdraw":
            send({"method": "notifications/cancelled", "params": {"requestId": "q1"}})
            return told("withdrawn")
        case "ask":
            question: dict[str, Any] = {"mode": "form", "message": "Who are you?", "requestedSchema": SCHEMA}
        case "suggest":
            question = {"mode": "form", "message": "Which build?", "requestedSchema": SUGGESTED}
        case "visit":
            page = sys.argv[2] if len(sys.argv) > 2 else "https://example.com/"
            question = {"mode": "url", "message": "Sign in.", "url": page, "elicitationId": "e7"}
        case "x\u202ey":
            question = {"mode": "form", "message": EVIL, "requestedSchema": {**SCHEMA, "description": EVIL}}
            send({"id": "q1", "method": "elicitation/create", "params": question})
            answered.wait(600)
            link = {"type": "resource_link", "uri": "javascript:alert(1)", "name": EVIL}
            file = {"type": "resource_link", "uri": "file://evil.example/share", "name": "share"}
            return {"content": [{"type": "text", "text": EVIL}, link, file], "structuredContent": {EVIL: EVIL}}
        case "flood":
            return flood(int(sys.argv[2]))
        case "hold":
            return hold()
        case "more":
            TOOLS.append({"name": "extra", "inputSchema": ANY})
            meta = {SUBSCRIPTION: listener}
            send({"method": "notifications/tools/list_changed", "params": {"_meta": meta}})
            return told("there are more now")
        case _:
            return told(f"{name} {json.dumps(arguments)} {os.environ.get('TOKEN', '')}".strip())
    send({"id": "q1", "method": "elicitation/create", "params": question})
    answered.wait(600)
    answered.clear()
    return told(json.dumps(answers["q1"], sort_keys=True))


def flood(count: int) -> dict[str, Any]:
    """Asks `count` questions at once; tells how often each answer came."""
    for number in range(count):
        question = {"mode": "form", "message": f"Question {number}?", "requestedSchema": SCHEMA}
        send({"id": f"flood{number}", "method": "elicitation/create", "params": question})
    while len(answers) < count:
        answered.wait(600)
        answered.clear()
    actions = [answer["action"] for answer in answers.values()]
    return told(json.dumps({action: actions.count(action) for action in sorted(set(actions))}))


at_once = [0, 0]
gathering = threading.Barrier(32)
counting = threading.Lock()


def hold() -> dict[str, Any]:
    """Waits until 32 calls have come; tells how many were there at once at most."""
    with counting:
        at_once[0] += 1
        at_once[1] = max(at_once)
    gathering.wait(600)
    with counting:
        at_once[0] -= 1
    return told(str(at_once[1]))


def send_deep(message: dict[str, Any]) -> None:
    """Sends a message with a value that nests deeply in place of every `DEEP`."""
    depth = int(sys.argv[2])
    text = json.dumps({"jsonrpc": "2.0", **message}).replace('"DEEP"', '{"a":' * depth + "1" + "}" * depth)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def deep(message: dict[str, Any]) -> EllipsisType | dict[str, Any]:
    params = message["params"]
    match params["name"]:
        case "answer":
            result = {"content": [], "structuredContent": "DEEP"}
            ends = {"result": result, "id": message["id"]}
            send_deep(ends if params.get("arguments") else {"id": message["id"], "result": result})
            return ...
        case "ask":
            form = {"type": "object", "properties": {"name": "DEEP"}}
            question = {"mode": "form", "message": "Who?", "requestedSchema": form}
            send_deep({"id": "q1", "method": "elicitation/create", "params": question})
            answered.wait(600)
            answered.clear()
            return told(json.dumps(answers["q1"], sort_keys=True))
    return told(f"fine {json.dumps(params.get('arguments'))}")


def user(content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def fill(name: str, arguments: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    match name:
        case "review.file":
            return [user({"type": "text", "text": f"say reviewed {json.dumps(arguments, sort_keys=True)}"})]
        case "talk":
            return [user({"type": "text", "text": "Hi."}), user({"type": "text", "text": "Hello."}, "assistant")]
        case "all kinds":
            file = {"uri": "file:///a.txt", "text": "inside", "mimeType": "text/plain"}
            return [
                user({"type": "text", "text": "look"}),
                user({"type": "image", "data": PICTURE, "mimeType": "image/png"}),
                user({"type": "resource", "resource": file}),
                user({"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "AAAA"}}),
                user({"type": "resource_link", "uri": "file:///b.txt", "name": "b"}),
                user({"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}),
            ]
        case "empty":
            return [user({"type": "text", "text": " "})]
        case "more":
            PROMPTS.append({"name": "extra"})
            send({"method": "notifications/prompts/list_changed"})
            return [user({"type": "text", "text": "say more"})]
        case "wait":
            answered.wait(600)
    return None


def answer(message: dict[str, Any]) -> dict[str, Any] | EllipsisType | None:
    global listener
    params = message.get("params") or {}
    cache = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    match message["method"]:
        case "initialize" if how != "listens":
            version = params["protocolVersion"]
            capabilities = {
                "tools": {"listChanged": True},
                **({"prompts": {}} if how in ("prompts", "hostile") else {}),
            }
            return {
                "protocolVersion": version,
                "capabilities": capabilities,
                "serverInfo": {"name": "v", "version": "1"},
            }
        case "server/discover" if how == "listens":
            return {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {"listChanged": True}}, **cache}
        case "subscriptions/listen" if how == "listens":
            listener = message["id"]
            wanted = {"_meta": {SUBSCRIPTION: listener}, "notifications": {"toolsListChanged": True}}
            send({"method": "notifications/subscriptions/acknowledged", "params": wanted})
            return ...
        case "tools/list":
            return {"tools": TOOLS, **(cache if how == "listens" else {})}
        case "prompts/list":
            evil = [{"name": "p\u202e", "description": EVIL, "arguments": [{"name": EVIL, "required": True}]}]
            return {"prompts": evil if how == "hostile" else PROMPTS}
        case "prompts/get":
            messages = fill(params["name"], params.get("arguments"))
            return None if messages is None else {"messages": messages}
        case "tools/call" if how == "deep":
            return deep(message)
        case "tools/call":
            return call(params["name"], params.get("arguments"))
    return None


def handle(message: dict[str, Any]) -> None:
    result = answer(message)
    if result is None:
        send({"id": message["id"], "error": {"code": -32601, "message": "no such method"}})
    elif result is not ...:
        send({"id": message["id"], "result": result})


for line in sys.stdin:
    message = json.loads(line)
    if "method" not in message:
        answers[message["id"]] = message.get("result", message.get("error"))
        answered.set()
    elif "id" in message:
        threading.Thread(target=handle, args=(message,), daemon=True).start()

"""An MCP server with resources that uses the client's model.

The first argument is the protocol, `classic` or `modern`; the second says what is unusual. `huge`: it lists 100,000
resources, some of them invalid. `none`: it declares resources and has none. `bare`: it suggests no values for
templates. `broken`: listing resources fails.
"""

import json
import os
import sys
import threading
from collections import Counter
from types import EllipsisType
from typing import Any

is_modern = sys.argv[1] == "modern"
how = sys.argv[2] if len(sys.argv) > 2 else ""
ANY = {"type": "object"}
CACHE = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
PICTURE = "iVBORw0KGgo="
EVIL = "Read\u202e\x1b[2K\u2028me\nnow"
RESOURCES: list[dict[str, Any]] = [
    {"uri": "docs:///a.md", "name": "a.md", "title": "Notes", "mimeType": "text/markdown", "size": 1234},
    {"uri": "docs:///logo.png", "name": "logo", "description": EVIL},
]
TEMPLATES = [{"uriTemplate": "issue://{owner}/{number}", "name": "Issue", "description": "One issue"}]
HUGE = [
    {"uri": "docs:///new\nline", "name": "x"},
    {"uri": "docs:///bidi\u202e", "name": "x"},
    {"uri": "x:" + "a" * 3_000, "name": "x"},
    {"uri": "no-scheme", "name": "x"},
    {"uri": 7, "name": "x"},
    {"name": "no uri"},
    "text",
    *({"uri": f"docs:///{number}", "name": str(number)} for number in range(100_000)),
]
CONTENTS: dict[str, list[dict[str, Any]]] = {
    "docs:///a.md": [{"text": "# Notes\nsk-secret-0123456789"}],
    "docs:///logo.png": [{"blob": PICTURE, "mimeType": "image/png"}],
    "docs:///a.zip": [{"blob": "AAAA", "mimeType": "application/zip"}],
    "docs:///a.pdf": [{"blob": "JVBERi0xLjcK", "mimeType": "application/pdf"}],
    "docs:///bad.pdf": [{"blob": "JVBERi0xLjcK!", "mimeType": "application/pdf"}],
    "docs:///both": [{"text": "one", "uri": "docs:///1"}, {"text": "two", "uri": f"docs:///{EVIL}"}],
    "docs:///nothing": [],
    "docs:///many": [{"text": str(number)} for number in range(250)],
    "docs:///large": [{"text": "x" * 33_000_000}],
    "docs:///bad": [{"blob": 7}],
    "issue://me/7": [{"text": "Issue 7"}],
}
TOOLS = ("storm", "listed", "ask_model", "ask_often", "ask_together", "take_back", "flood", "tangle", "grow")
seen: Counter[str] = Counter()
progress: list[dict[str, Any]] = []
answers: dict[str, Any] = {}
answered = threading.Condition()
sending = threading.Lock()
listener: Any = None


def send(message: dict[str, Any]) -> None:
    with sending:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def told(value: object) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return {"content": [{"type": "text", "text": text}], "resultType": "complete"}


def ask(identity: str, method: str, params: dict[str, Any]) -> None:
    send({"id": identity, "method": method, "params": params})


def answer_to(identity: str) -> Any:
    with answered:
        answered.wait_for(lambda: identity in answers, 600)
        return answers.pop(identity)


def sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    question = [{"role": "user", "content": {"type": "text", "text": "What is it?"}}]
    return {"messages": question, "maxTokens": 100, **arguments}


def call(params: dict[str, Any]) -> dict[str, Any]:
    arguments = params.get("arguments") or {}
    token = (params.get("_meta") or {}).get("progressToken")
    match params["name"]:
        case "storm":
            for _ in range(3_000):
                for what in ("tools", "prompts", "resources"):
                    meta = {"params": {"_meta": {SUBSCRIPTION: listener}}} if is_modern else {}
                    send({"method": f"notifications/{what}/list_changed", **meta})
            return told("changed")
        case "listed":
            return told(dict(seen))
        case "grow":
            RESOURCES.append({"uri": "docs:///new.md", "name": "new.md"})
            meta = {"params": {"_meta": {SUBSCRIPTION: listener}}} if is_modern else {}
            send({"method": "notifications/resources/list_changed", **meta})
            return told("grown")
        case "flood":
            for step in range(20_000):
                note = {"progressToken": token, "progress": step, "message": "y" * 2_000}
                send({"method": "notifications/progress", "params": note})
            return told("flooded")
        case "tangle":
            strays: tuple[Any, ...] = ("unknown", 7, None, {}, 99_999)
            for stray in strays:
                send({"method": "notifications/cancelled", "params": {"requestId": stray}})
            send({"method": "notifications/progress", "params": {"progressToken": "unknown", "progress": "much"}})
            send({"method": "notifications/no-such-thing", "params": {"a": 1}})
            send({"id": "stray", "result": {}})
            return told("still here")
        case "ask_model" if is_modern and "inputResponses" not in params:
            request = {"method": "sampling/createMessage", "params": sampling(arguments)}
            return {"resultType": "input_required", "inputRequests": {"q": request}, "requestState": "s"}
        case "ask_model" if is_modern:
            return told(params["inputResponses"]["q"])
        case "ask_model":
            progress.clear()
            ask("q", "sampling/createMessage", {**sampling(arguments), "_meta": {"progressToken": "p"}})
            return told({"answer": answer_to("q"), "progress": progress})
        case "take_back":
            progress.clear()
            ask("q", "sampling/createMessage", {**sampling({}), "_meta": {"progressToken": "p"}})
            with answered:
                answered.wait_for(lambda: bool(progress), 600)
            send({"method": "notifications/cancelled", "params": {"requestId": "q"}})
            return told("taken back")
        case "ask_often":
            said: Counter[str] = Counter()
            for _ in range(arguments["times"]):
                ask("q", "sampling/createMessage", sampling({}))
                result = answer_to("q")
                said[result.get("message", "answered")] += 1
            return told(dict(said))
        case "ask_together":
            for number in range(arguments["times"]):
                ask(f"q{number}", "sampling/createMessage", sampling({}))
            results = [answer_to(f"q{number}") for number in range(arguments["times"])]
            return told(dict(Counter(result.get("message", "answered") for result in results)))
    return told("?")


def complete(params: dict[str, Any]) -> dict[str, Any]:
    values = [value for value in ("crow", "cow", EVIL) if value.startswith(params["argument"]["value"])]
    assert params["ref"] == {"type": "ref/resource", "uri": "issue://{owner}/{number}"}
    return {"completion": {"values": values, "hasMore": True}, **({"resultType": "complete"} if is_modern else {})}


def answer(message: dict[str, Any]) -> dict[str, Any] | EllipsisType | None:
    global listener
    params = message.get("params") or {}
    cache = CACHE if is_modern else {}
    changes = {"listChanged": True}
    offers = {"tools": changes, "prompts": changes, "resources": changes}
    offers |= {} if how == "bare" else {"completions": {}}
    seen[message["method"]] += 1
    match message["method"]:
        case "initialize" if not is_modern:
            info = {"name": "library", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": offers, "serverInfo": info}
        case "server/discover" if is_modern:
            return {"supportedVersions": ["2026-07-28"], "capabilities": offers, **cache}
        case "subscriptions/listen" if is_modern:
            listener = message["id"]
            wanted = {f"{what}ListChanged": True for what in ("tools", "prompts", "resources")}
            accepted = {"_meta": {SUBSCRIPTION: listener}, "notifications": wanted}
            send({"method": "notifications/subscriptions/acknowledged", "params": accepted})
            return ...
        case "tools/list":
            return {"tools": [{"name": name, "inputSchema": ANY} for name in TOOLS], **cache}
        case "prompts/list":
            return {"prompts": [], **cache}
        case "resources/list" if how != "broken":
            listed = {"none": [], "huge": HUGE}.get(how, RESOURCES)
            return {"resources": listed, **cache}
        case "resources/templates/list" if how != "broken":
            return {"resourceTemplates": [] if how == "none" else TEMPLATES, **cache}
        case "resources/read" if params["uri"] == "docs:///slow":
            send({"method": "notifications/message", "params": {"level": "warning", "data": "slow"}})
            return ...
        case "resources/read" if params["uri"] in CONTENTS:
            contents = [{"uri": params["uri"], **content} for content in CONTENTS[params["uri"]]]
            return {"contents": contents, **cache}
        case "completion/complete":
            return complete(params)
        case "tools/call":
            return call(params)
    return None


def handle(message: dict[str, Any]) -> None:
    result = answer(message)
    if result is None:
        send({"id": message["id"], "error": {"code": -32601, "message": "no such thing"}})
    elif result is not ...:
        send({"id": message["id"], "result": result})


for line in sys.stdin:
    received = json.loads(line)
    if "method" not in received:
        with answered:
            answers[received["id"]] = received.get("result", received.get("error"))
            answered.notify_all()
    elif "id" in received:
        threading.Thread(target=handle, args=(received,), daemon=True).start()
    elif received["method"] == "notifications/progress":
        with answered:
            progress.append(received["params"])
            answered.notify_all()
    elif received["method"] == "notifications/cancelled" and "CANCELLED_FILE" in os.environ:
        with open(os.environ["CANCELLED_FILE"], "w") as file:
            file.write("cancelled")

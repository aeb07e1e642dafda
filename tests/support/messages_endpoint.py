"""A server on loopback that speaks Anthropic's Messages API from a script, and refuses what the real one refuses.

It checks each request: its shape, the order of calls and results, where cache marks stand, and that every block that it
sent comes back unchanged and in its place. Thoughts are signed, and a thought may be bound to the conversation in which
it arose. Its prompt cache works like the real one, so its usage shows what a client with wrong marks would pay.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.llm.messages.streams import block_events, sse
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, body

__all__ = ["MessagesEndpoint", "Refused", "before", "check_loop", "check_results", "says", "shape_faults"]

LOOKBACK = 20
MARKS = 4
ID = re.compile(r"[a-zA-Z0-9_-]+")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
PROPERTY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

SHAPES: Mapping[str, tuple[set[str], set[str]]] = {
    # what: (members that must be there, members that may be there)
    "request": (
        {"model", "max_tokens", "messages"},
        {"system", "tools", "tool_choice", "thinking", "output_config", "stream", "stop_sequences", "metadata"},
    ),
    "message": ({"role", "content"}, set()),
    "tool": ({"name", "input_schema"}, {"description", "type", "cache_control", "strict"}),
    "text": ({"type", "text"}, {"cache_control", "citations"}),
    "image": ({"type", "source"}, {"cache_control"}),
    "document": ({"type", "source"}, {"cache_control", "citations", "context", "title"}),
    "tool_use": ({"type", "id", "name", "input"}, {"cache_control", "caller"}),
    "tool_result": ({"type", "tool_use_id"}, {"content", "is_error", "cache_control"}),
    "thinking": ({"type", "thinking", "signature"}, set()),
    "redacted_thinking": ({"type", "data"}, set()),
    "server_tool_use": ({"type", "id", "name", "input"}, {"cache_control", "caller"}),
    "web_search_tool_result": ({"type", "tool_use_id", "content"}, {"cache_control", "caller"}),
}
"""The members of the published types of the API, version 2023-06-01."""

THINKING: Mapping[str, set[str]] = {
    "adaptive": {"type", "display"},
    "enabled": {"type", "budget_tokens", "display"},
    "disabled": {"type"},
    "between_tools": {"type"},
}


class Refused(Exception):
    """The request is refused with status 400. The text is the message."""


@dataclass(kw_only=True)
class Answered:
    """An answer of the endpoint: its model, its blocks as they must come back, and the conversation before them."""

    model: str
    blocks: list[dict[str, Any]]
    before: str
    is_paused: bool = False


Script: TypeAlias = "Sequence[dict[str, Any]] | Callable[[Recorded], Reply]"


def says(*blocks: dict[str, Any], stop: str | None = None) -> list[dict[str, Any]]:
    """An answer in the short form of the fixtures. Thoughts without `sign` are signed by the endpoint."""
    end = stop or ("tool_use" if any("call" in block for block in blocks) else "end_turn")
    return [*blocks, {"stop": end}]


@dataclass
class _Cache:
    """Prefixes of prompts, by hash, with their sizes in tokens."""

    known: dict[str, int] = field(default_factory=dict)

    def usage(self, blocks: Sequence[tuple[str, bool]]) -> dict[str, int]:
        """Return the usage of a prompt whose blocks are given as text and whether each has a cache mark."""
        prefix, hashes, sizes = hashlib.sha256(), list[str](), list[int]()
        for block, _ in blocks:
            prefix.update(block.encode() + b"\0")
            hashes.append(prefix.hexdigest())
            sizes.append((sizes[-1] if sizes else 0) + max(1, len(block) // 4))
        read = written = 0
        for at in (at for at, (_, is_marked) in enumerate(blocks) if is_marked):
            near = range(max(0, at - LOOKBACK + 1), at + 1)
            read = max([read, *(sizes[each] for each in near if hashes[each] in self.known)])
            written = max(written, sizes[at])
        for at in (at for at, (_, is_marked) in enumerate(blocks) if is_marked):
            self.known[hashes[at]] = sizes[at]
        fresh = (sizes[-1] if sizes else 0) - max(read, written)
        return {
            "input_tokens": fresh,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": max(0, written - read),
            "output_tokens": 1,
        }


class MessagesEndpoint(FakeEndpoint):
    """Answers requests at `/messages` with the scripted answers in order, then with `otherwise`.

    `refused` has the messages of refused requests. If `binds` is true, a thought is refused after a change of what was
    sent before it. `usages` has the usage of each answer. `forms` are the kinds of thinking that the model takes.
    """

    def __init__(
        self,
        *,
        otherwise: Reply | Callable[[Recorded], Reply] | None = None,
        binds: bool = False,
        forms: Sequence[str] = tuple(THINKING),
    ) -> None:
        super().__init__(otherwise=otherwise)
        self.binds = binds
        self.forms = forms
        self.answers: list[Script] = []
        self.otherwise: Script = says({"text": ["Hello", " there."]})
        self.refused: list[str] = []
        self.usages: list[dict[str, int]] = []
        self.is_strict = True
        self._sent: list[Answered] = []
        self._cache = _Cache()
        self._numbers = 0

    def answer(self, *answers: Script) -> None:
        """Add answers to the next requests."""
        self.answers.extend(answers)

    @property
    def asked(self) -> list[Recorded]:
        """The requests for messages so far."""
        return [request for request in self.requests if _is_asked(request)]

    def _reply(self, request: Recorded) -> Reply:
        if not _is_asked(request):
            return super()._reply(request)
        try:
            if self.is_strict:
                self._check(request)
        except Refused as refusal:
            self.refused.append(str(refusal))
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": str(refusal)}}
            return body(json.dumps({**error, "request_id": "req_1"}).encode(), status=400)
        answer = self.answers.pop(0) if self.answers else self.otherwise
        return answer(request) if callable(answer) else self._stream(request.sent, answer)

    def _stream(self, asked: Mapping[str, Any], answer: Sequence[dict[str, Any]]) -> Reply:
        usage = self._cache.usage(list(_prompt(asked)))
        self.usages.append(usage)
        sent = Answered(
            model=asked["model"],
            blocks=[],
            before=before(asked, len(asked["messages"])),
            is_paused=answer[-1]["stop"] == "pause_turn",
        )
        message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "usage": usage}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
        for index, short in enumerate(block for block in answer if "stop" not in block):
            block = self._signed(short, str(asked["model"]), sent.before)
            events += block_events(index, block)
            sent.blocks.append(_whole(block))
        self._sent.append(sent)
        delta = {"stop_reason": answer[-1]["stop"], "stop_sequence": None}
        events += [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}, {"type": "message_stop"}]
        return Reply(steps=tuple(sse(event) for event in events))

    def _signed(self, block: dict[str, Any], model: str, before: str) -> dict[str, Any]:
        self._numbers += 1
        if "think" in block and "sign" not in block:
            secret = f"{model} {before} {self._numbers} {''.join(block['think'])}"
            return {**block, "sign": "Er" + hashlib.sha256(secret.encode()).hexdigest() + "=="}
        return {"id": f"toolu_{self._numbers}", **block} if "call" in block else block

    def _check(self, request: Recorded) -> None:
        """:raises Refused: the real endpoint would refuse the request."""
        if "anthropic-version" not in request.headers:
            raise Refused("anthropic-version: header is required")
        asked = request.sent
        for fault in shape_faults(asked, may_continue=bool(self._sent) and self._sent[-1].is_paused):
            raise Refused(fault)
        self._check_server_calls(asked["messages"])
        form = asked.get("thinking", {}).get("type")
        if form is not None and form not in self.forms:
            raise Refused(f'"thinking.type.{form}" is not supported for this model. Use "thinking.type.adaptive".')
        check_results(asked["messages"])
        if form == "enabled":
            check_loop(asked["messages"])
        self._check_thoughts(asked)

    def _check_server_calls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """A call of a server's tool has its result in the same answer, or in its continuation at once, or after the
        results of the calls beside it. A result follows its call.

        :raises Refused: it does not.
        """
        for at, message in enumerate(messages):
            kinds = {block["type"] for block in message["content"]}
            followed = messages[at + 1]["role"] == "assistant" if at + 1 < len(messages) else True
            results = {
                block["tool_use_id"]
                for each in messages[at : at + 2]
                for block in each["content"]
                if block["type"] == "web_search_tool_result"
            }
            for block in message["content"]:
                is_open = block["type"] == "server_tool_use" and block["id"] not in results
                if is_open and not followed and "tool_use" not in kinds:
                    raise Refused(f"messages.{at}: `server_tool_use` ids were found without results: {block['id']}")

    def _check_thoughts(self, asked: Mapping[str, Any]) -> None:
        seen: set[str] = set()
        for at, message in enumerate(asked["messages"]):
            if message["role"] != "assistant":
                continue
            thoughts = [block for block in message["content"] if _is_thought(block)]
            for block in thoughts:
                key = json.dumps(block, sort_keys=True)
                sent = next((each for each in self._sent if block in each.blocks), None)
                if sent is None or key in seen:
                    raise Refused(f"messages.{at}.content.0: Invalid `signature` in `thinking` block")
                seen.add(key)
                came = [_plain(each) for each in message["content"]]
                if came != [_plain(each) for each in sent.blocks if not _is_blank(each)]:
                    raise Refused(
                        f"messages.{at}.content.0: `thinking` or `redacted_thinking` blocks in the latest assistant "
                        "message cannot be modified. These blocks must remain as they were in the original response."
                    )
                if self.binds and sent.before != before(asked, at):
                    raise Refused(
                        f"messages.{at}.content.0: Invalid `signature` in `thinking` block. The block is bound to a "
                        "different conversation. Remove the block."
                    )

    def missing(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the thoughts of this model whose calls are in a request, but which did not come back with them."""
        blocks = [block for message in asked["messages"] for block in message["content"]]
        calls = {block["id"] for block in blocks if block["type"] == "tool_use"}
        return [
            block
            for sent in self._sent
            if sent.model == asked["model"] and calls & {each.get("id") for each in sent.blocks}
            for block in sent.blocks
            if _is_thought(block) and block not in blocks
        ]


def _is_asked(request: Recorded) -> bool:
    return request.path.partition("?")[0].endswith("/messages")


def shape_faults(asked: Mapping[str, Any], *, may_continue: bool = False) -> Iterator[str]:
    """Yield what is wrong with the shape of a request, in the words of the real endpoint. `may_continue` means that the
    request may end with an answer, because the model paused in it."""
    yield from _members("request", asked, "")
    if asked.get("max_tokens", 0) < 1:
        yield "max_tokens: Input should be greater than or equal to 1"
    thinking = asked.get("thinking")
    if thinking is not None:
        for key in thinking.keys() - THINKING.get(thinking.get("type"), set()):
            yield f"thinking.{thinking.get('type')}.{key}: Extra inputs are not permitted"
        if thinking["type"] == "enabled" and not 1_024 <= thinking["budget_tokens"] < asked["max_tokens"]:
            yield "`max_tokens` must be greater than `thinking.budget_tokens`"
    for at, tool in enumerate(asked.get("tools", ())):
        yield from _members("tool", tool, f"tools.{at}.custom.")
        yield from _tool_faults(tool, f"tools.{at}.custom.")
    for at, block in enumerate(asked.get("system", ())):
        yield from _block_faults(block, f"system.{at}")
    messages = asked["messages"]
    if not messages or messages[0]["role"] != "user":
        yield "messages: first message must use the user role"
    if messages and messages[-1]["role"] != "user" and not may_continue:
        yield "This model does not support assistant message prefill. The conversation must end with a user message."
    for at, message in enumerate(messages):
        yield from _members("message", message, f"messages.{at}.")
        if not message["content"]:
            yield f"messages.{at}: all messages must have non-empty content"
        for number, block in enumerate(message["content"]):
            yield from _block_faults(block, f"messages.{at}.content.{number}")
        if message["role"] == "assistant" and message["content"] and _is_thought(message["content"][-1]):
            yield f"messages.{at}: The final block in an assistant message cannot be `thinking`."
    if json.dumps(asked).count('"cache_control"') > MARKS:
        yield f"A maximum of {MARKS} blocks with cache_control may be provided."


def _members(what: str, value: Mapping[str, Any], where: str) -> Iterator[str]:
    required, optional = SHAPES[what]
    for key in sorted(required - value.keys()):
        yield f"{where}{key}: Field required"
    for key in sorted(value.keys() - required - optional):
        yield f"{where}{key}: Extra inputs are not permitted"


def _tool_faults(tool: Mapping[str, Any], where: str) -> Iterator[str]:
    schema = tool.get("input_schema", {})
    if not NAME.fullmatch(tool.get("name", "")):
        yield f"{where}name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
    if schema.get("type") != "object":
        yield f"{where}input_schema.type: Input should be 'object'"
    if not schema.keys().isdisjoint({"oneOf", "anyOf", "allOf"}):
        yield f"{where}input_schema: input_schema does not support oneOf, allOf, or anyOf at the top level"
    for key in schema.get("properties", {}):
        if not PROPERTY.fullmatch(key):
            yield f"{where}input_schema.properties: Property keys should match pattern '^[a-zA-Z0-9_.-]{{1,64}}$'"


def _block_faults(block: Mapping[str, Any], where: str) -> Iterator[str]:
    kind = block["type"]
    if kind not in SHAPES:
        yield f"{where}: Input tag '{kind}' does not match any of the expected tags"
        return
    yield from _members(kind, block, f"{where}.{kind}.")
    if kind == "text" and not block["text"].strip():
        yield f"{where}: text content blocks must contain non-whitespace text"
    for key in ("id", "tool_use_id"):
        if key in block and not ID.fullmatch(block[key]):
            yield f"{where}.{kind}.{key}: String should match pattern '^[a-zA-Z0-9_-]+$'"
    if kind == "tool_use" and not isinstance(block["input"], dict):
        yield f"{where}.tool_use.input: Input should be an object"
    if kind == "tool_result":
        if block.get("is_error") and any(inner["type"] != "text" for inner in block.get("content", ())):
            yield f'{where}.tool_result.content: all content must be type "text" if "is_error" is true'
        for number, inner in enumerate(block.get("content", ())):
            yield from _block_faults(inner, f"{where}.tool_result.content.{number}")


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Results must follow their calls at once, each exactly once. Neighbours of one role count as one message.

    :raises Refused: they do not.
    """
    turns: list[tuple[str, list[Mapping[str, Any]]]] = []
    for message in messages:
        if turns and turns[-1][0] == message["role"]:
            turns[-1][1].extend(message["content"])
        else:
            turns.append((message["role"], list(message["content"])))
    used: set[str] = set()
    for at, (_, blocks) in enumerate(turns):
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        before = [block["id"] for block in turns[at - 1][1] if block["type"] == "tool_use"] if at else []
        if sorted(results) != sorted(before):
            raise Refused(
                f"messages.{at}: `tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{', '.join(sorted({*before} ^ {*results}))}"
            )
        if results and any(block["type"] == "tool_result" for block in blocks[len(results) :]):
            raise Refused(f"messages.{at}: `tool_result` blocks must come first")
        if used & set(calls) or len(set(calls)) != len(calls):
            raise Refused(f"messages.{at}: `tool_use` ids must be unique")
        used.update(calls)
    if any(block["type"] == "tool_use" for block in turns[-1][1]):
        raise Refused("messages: `tool_use` ids were found without `tool_result` blocks immediately after")


def check_loop(messages: Sequence[Mapping[str, Any]]) -> None:
    """With a budget for thoughts, a turn that goes on must have begun with a thought.

    :raises Refused: it has not.
    """
    first: Mapping[str, Any] | None = None
    for message in reversed(messages):
        if message["role"] == "assistant":
            first = message
        elif not any(block["type"] == "tool_result" for block in message["content"]):
            break
    if first is not None and not _is_thought(first["content"][0]):
        kind = first["content"][0]["type"]
        raise Refused(f"messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `{kind}`")


def _is_thought(block: Mapping[str, Any]) -> bool:
    return block["type"] in {"thinking", "redacted_thinking"}


def _is_blank(block: Mapping[str, Any]) -> bool:
    return block["type"] == "text" and not block["text"].strip()


def _plain(block: Mapping[str, Any]) -> str:
    """A block for comparison: arguments of calls may be shortened, but must stand in their place."""
    kept = {key: value for key, value in block.items() if key not in {"cache_control", "input", "name"}}
    return json.dumps(kept, sort_keys=True)


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    """The block of a short form as it must come back."""
    if "text" in block:
        return {"type": "text", "text": "".join(block["text"])}
    if "think" in block:
        return {"type": "thinking", "thinking": "".join(block["think"]), "signature": block["sign"]}
    if "redacted" in block:
        return {"type": "redacted_thinking", "data": block["redacted"]}
    if "call" in block:
        arguments = json.loads("".join(block["json"]) or "{}")
        return {"type": "tool_use", "id": block["id"], "name": block["call"], "input": arguments}
    return dict(block["block"])


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items() if key != "cache_control"}
    return [_unmarked(item) for item in value] if isinstance(value, list) else value


def before(asked: Mapping[str, Any], end: int) -> str:
    """A hash of what the model had before message number `end`."""
    prompt = [asked.get("tools"), asked.get("system"), *asked["messages"][:end]]
    return hashlib.sha256(json.dumps(_unmarked(prompt), sort_keys=True).encode()).hexdigest()


def _prompt(asked: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The blocks of a prompt in the order in which the cache sees them, and whether each has a cache mark."""
    for tool in asked.get("tools", ()):
        yield json.dumps(_unmarked(tool)), "cache_control" in tool
    for block in asked.get("system", ()):
        yield json.dumps(_unmarked(block)), "cache_control" in block
    for message in asked["messages"]:
        for block in message["content"]:
            yield json.dumps([message["role"], _unmarked(block)]), "cache_control" in block

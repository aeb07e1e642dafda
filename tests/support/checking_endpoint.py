"""An endpoint that speaks all wires and checks what comes back of its answers, and a driver for random turns.

Each answer has items that only the endpoint can read: encrypted reasoning, signed thoughts, ids, phases. In each later
request, every answer that this model made on this wire must have all its items, once, unchanged and in their order. An
answer of another model or another wire must have none, and neither may an interrupted one. A request that breaks this
is refused as the real endpoints refuse it, and noted in `faults`.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow.agent.compaction.summary import INSTRUCTION, SYSTEM
from crow.domain.rendering import INTERRUPTED
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import CUT, HANG, FakeEndpoint, Recorded, Reply
from tests.support.wires import sent_as

__all__ = ["MODELS", "WIRES", "CheckingEndpoint", "RandomTurns", "write_settings"]

WIRES = ("chat", "responses", "messages")
MODELS = tuple(f"{name}-{wire}" for name in ("claude-alpha-5", "beta") for wire in WIRES)
SUMMARY = "## Goal\nBuild a nest.\n## Done\nTwigs were found.\n## Next\nFind string."
MARK = re.compile(r"\[answer (\d+)\]|\bc(\d+)x\d")
REFUSALS = {
    "chat": "Invalid thought_signature in reasoning_details: it does not match",
    "responses": "The encrypted content sealed could not be verified. Reason: it could not be decrypted.",
    "messages": "messages.1.content.0: Invalid `signature` in `thinking` block",
}


def write_settings(home: Path, base_url: str) -> None:
    """Write settings with each of two models on each wire."""
    home.mkdir(exist_ok=True)
    tables = (
        f'[models."{name}"]\nprovider = "fake"\nname = "{name.rpartition("-")[0]}"\ncontext_window = 24000\n'
        f'wire = "{name.rpartition("-")[2]}"\n'
        for name in MODELS
    )
    provider = f'[providers.fake]\nbase_url = "{base_url}"\napi_key = "sk-test-0123456789"\n'
    start = f'[model]\nname = "{MODELS[1]}"\nthought_level = "high"\n[permissions]\nmode = "auto"\n'
    (home / "config.toml").write_text(start + provider + "".join(tables), "utf-8")
    (home / "config.toml").chmod(0o600)


@dataclass(frozen=True, kw_only=True)
class Issued:
    """An answer. `opaque` are its items as JSON, in order."""

    maker: tuple[str, str]
    opaque: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """An answer as it came back: its text, its mark, and its opaque items."""

    text: str
    marks: frozenset[int]
    opaque: tuple[str, ...]


class CheckingEndpoint(FakeEndpoint):
    """See the module. `returned` counts the answers that came back with their items, by wire, and `plain` those that
    came back without, because another model or wire made them. `kinds` counts the turns by kind. `endings` says how the
    next answers end: `whole`, `cut` or `hang`. `is_forgetful` makes it refuse all its items. On the wires in `down` it
    fails. Its answers are numbered from `first` on, so that those of another endpoint have other numbers."""

    def __init__(self, chance: random.Random, *, first: int = 1) -> None:
        super().__init__(otherwise=self._answered)
        self.wires = WIRES
        self.faults: list[str] = []
        self.returned: Counter[str] = Counter()
        self.plain: Counter[str] = Counter()
        self.endings: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.is_forgetful = False
        self.down: frozenset[str] = frozenset()
        self._first = first
        self._chance = chance
        self._issued: dict[int, Issued] = {}

    def _reply(self, request: Recorded) -> Reply:
        if request.path.endswith("/models"):
            return super()._reply(request)
        if request.wire in self.down:
            return fake.failing(503, "Overloaded", headers={"Retry-After": "0"})
        groups = list(_GROUPS[request.wire](request.sent))
        maker = (request.sent["model"], request.wire)
        if self.is_forgetful and any(group.opaque for group in groups):
            return fake.failing(400, REFUSALS[request.wire], type="invalid_request_error")
        faults = [] if self.is_forgetful else list(self._faults(groups, maker))
        self.faults += faults
        if faults:
            return fake.failing(400, REFUSALS[request.wire], type="invalid_request_error")
        return self._answered(request)

    def _faults(self, groups: Sequence[Group], maker: tuple[str, str]) -> Iterator[str]:
        seen: set[int] = set()
        for group in groups:
            if len(group.marks) > 1 or group.marks & seen:
                yield f"{maker}: the answers {sorted(group.marks)} are mixed or came twice"
            seen |= group.marks
            issued = self._issued.get(min(group.marks)) if group.marks else None
            is_own = issued is not None and issued.maker == maker and INTERRUPTED not in group.text
            expected = issued.opaque if issued is not None and is_own else ()
            if group.opaque != expected:
                yield f"{maker}: answer {sorted(group.marks)} has {group.opaque}; expected {expected}"
            elif issued is not None:
                (self.returned if expected else self.plain)[maker[1]] += 1

    def _answered(self, request: Recorded) -> Reply:
        messages = request.body["messages"]
        last = json.dumps(messages[-1])
        if SYSTEM in str(messages[0]["content"]) or INSTRUCTION[:30] in last:
            plain = fake.text(SUMMARY)
            return plain if request.wire == "chat" else Reply(steps=tuple(sent_as(iter(plain.steps), request.wire)))
        steps = next((at for at, each in enumerate(reversed(messages)) if each["role"] == "user"), 0)
        number = len(self._issued) + self._first
        calls = self._chance.choice([0, 1, 1, 2]) if steps < 6 else 0
        ending = self.endings.pop(0) if self.endings else "whole"
        writer = _WRITERS[request.wire](number, calls if ending == "whole" else 0, self._chance)
        self._issued[number] = Issued(maker=(request.sent["model"], request.wire), opaque=tuple(writer.opaque))
        events = writer.events
        if ending == "whole":
            return Reply(steps=tuple(fake.sse(event, done=False) for event in events))
        at = next(at for at, event in enumerate(events) if f"[answer {number}]" in json.dumps(event)) + 1
        steps_of = [fake.sse(event, done=False) for event in events[:at]]
        return Reply(steps=(*steps_of, CUT if ending == "cut" else HANG))


def _marks(words: str) -> frozenset[int]:
    return frozenset(int(one or other) for one, other in MARK.findall(words))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _responses_groups(body: Mapping[str, Any]) -> Iterator[Group]:
    items: list[Mapping[str, Any]] = []
    for item in [*body["input"], {"type": "end"}]:
        is_end = item["type"] in {"end", "function_call_output", "custom_tool_call_output"}
        if not is_end and not (item["type"] == "message" and item["role"] != "assistant"):
            items.append(item)
            continue
        if items:
            text = "".join(_text(each["content"]) for each in items if each["type"] == "message")
            calls = " ".join(each["call_id"] for each in items if each["type"] == "function_call")
            own = [
                _canonical({key: value for key, value in each.items() if key not in {"call_id", "name", "arguments"}})
                for each in items
                if "id" in each
            ]
            yield Group(text=text, marks=_marks(f"{text} {calls}"), opaque=tuple(own))
        items = []


def _messages_groups(body: Mapping[str, Any]) -> Iterator[Group]:
    for message in body["messages"]:
        if message["role"] != "assistant":
            continue
        blocks = message["content"]
        text = "".join(each["text"] for each in blocks if each["type"] == "text")
        calls = " ".join(each["id"] for each in blocks if each["type"] == "tool_use")
        kept = [_without_mark(each) for each in blocks]
        own = [_canonical(each) for each in kept if each["type"] not in {"text", "tool_use"} or "citations" in each]
        yield Group(text=text, marks=_marks(f"{text} {calls}"), opaque=tuple(own))


def _without_mark(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != "cache_control"}


def _chat_groups(body: Mapping[str, Any]) -> Iterator[Group]:
    for message in body["messages"]:
        if message["role"] == "assistant":
            text, calls = message.get("content") or "", message.get("tool_calls") or ()
            own = [_canonical(each) for each in message.get("reasoning_details") or ()]
            own += [_canonical(each) for each in message.get("thinking_blocks") or ()]
            own += [_canonical(message["extra_content"])] if "extra_content" in message else []
            own += [_canonical(each["extra_content"]) for each in calls if "extra_content" in each]
            ids = " ".join(each["id"] for each in calls)
            yield Group(text=text, marks=_marks(f"{text} {ids}"), opaque=tuple(own))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


_GROUPS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Group]]] = {
    "chat": _chat_groups,
    "responses": _responses_groups,
    "messages": _messages_groups,
}


class _Writer:
    """One answer as events. `opaque` are the items that must come back."""

    def __init__(self, number: int, calls: int, chance: random.Random) -> None:
        self.events: list[Any] = []
        self.opaque: list[str] = []
        self.number, self.calls, self.chance = number, calls, chance
        self.secret = f"sealed-{number}-{chance.getrandbits(64):x}"
        self.text = f"It is [answer {number}] " + "twigs and string " * chance.choice([1, 5, 40])
        self.has_text = not calls or chance.random() < 0.5
        self.thoughts = chance.choice([0, 1, 1, 2])
        self.write()

    def call(self, at: int) -> tuple[str, str]:
        return f"c{self.number}x{at}", json.dumps({"path": self.chance.choice(["README.md", "missing.txt"])})

    def write(self) -> None:
        raise NotImplementedError


class _Chat(_Writer):
    def write(self) -> None:
        for at in range(self.thoughts):
            detail = {"type": "reasoning.encrypted", "index": at, "data": f"{self.secret}-{at}", "id": f"rs_{at}"}
            self.opaque.append(_canonical(detail))
            self.events.append(fake.chunk({"reasoning_details": [detail]}))
        if self.thoughts == 2:  # as LiteLLM sends them, and Gemini signs its text
            block = {"type": "thinking", "thinking": "Twigs.", "signature": f"{self.secret}-block"}
            signed = {"google": {"thought_signature": f"{self.secret}-text"}}
            self.opaque += [_canonical(block), _canonical(signed)]
            self.events.append(fake.chunk({"thinking_blocks": [{**block, "signature": ""}]}))
            self.events.append(fake.chunk({"thinking_blocks": [{**block, "thinking": ""}], "extra_content": signed}))
        if self.has_text:
            self.events.append(fake.chunk({"content": self.text}))
        for at in range(self.calls):
            call_id, arguments = self.call(at)
            extra = {"google": {"thought_signature": f"{self.secret}-call-{at}"}}
            self.opaque.append(_canonical(extra))
            function = {"name": "read_file", "arguments": arguments}
            call = {"index": at, "id": call_id, "type": "function", "function": function, "extra_content": extra}
            self.events.append(fake.chunk({"tool_calls": [call]}))
        self.events += [fake.chunk(finish="tool_calls" if self.calls else "stop"), fake.usage(1000, 50), "[DONE]"]


class _Responses(_Writer):
    def write(self) -> None:
        self.events.append({"type": "response.created", "response": {"id": f"resp_{self.number}"}})
        for at in range(self.thoughts):
            summary = [{"type": "summary_text", "text": f"Thought {at}."}] if self.chance.random() < 0.5 else []
            sealed = {"summary": summary, "encrypted_content": f"{self.secret}-{at}"}
            self.item({"id": f"rs_{self.number}_{at}", "type": "reasoning", **sealed})
        if self.has_text:
            part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}
            message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
            phase = "commentary" if self.calls else "final_answer"
            self.item({"id": f"msg_{self.number}", **message, "phase": phase}, self.text)
        for at in range(self.calls):
            call_id, arguments = self.call(at)
            call = {"call_id": call_id, "name": "read_file", "arguments": arguments, "status": "completed"}
            self.item({"id": f"fc_{self.number}_{at}", "type": "function_call", **call})
        usage = {"input_tokens": 1000, "output_tokens": 50, "total_tokens": 1050}
        end = {"id": f"resp_{self.number}", "status": "completed", "output": [], "usage": usage}
        self.events.append({"type": "response.completed", "response": end})

    def item(self, item: dict[str, Any], text: str = "") -> None:
        at = len(self.opaque)
        kept = {key: value for key, value in item.items() if key not in {"call_id", "name", "arguments"}}
        self.opaque.append(_canonical(kept))
        unset: dict[str, Any] = {"content": [], "arguments": ""}
        empty = {**item, **{key: value for key, value in unset.items() if key in item}}
        self.events.append({"type": "response.output_item.added", "output_index": at, "item": empty})
        if text:
            where = {"item_id": item["id"], "output_index": at, "content_index": 0}
            self.events.append({"type": "response.output_text.delta", **where, "delta": text})
        self.events.append({"type": "response.output_item.done", "output_index": at, "item": item})


class _Messages(_Writer):
    def write(self) -> None:
        start = {"id": f"msg_{self.number}", "role": "assistant", "content": [], "usage": {"input_tokens": 1000}}
        self.events.append({"type": "message_start", "message": start})
        for at in range(self.thoughts):
            if self.chance.random() < 0.3:
                self.block({"type": "redacted_thinking", "data": f"{self.secret}-{at}"}, is_opaque=True)
                continue
            thought, signature = f"Thought {at}.", f"{self.secret}-{at}"
            deltas = [{"type": "thinking_delta", "thinking": thought}] if self.chance.random() < 0.7 else []
            deltas.append({"type": "signature_delta", "signature": signature})
            whole = {"type": "thinking", "thinking": thought if len(deltas) > 1 else "", "signature": signature}
            self.opaque.append(_canonical(whole))
            self.block({"type": "thinking", "thinking": "", "signature": ""}, *deltas)
        if self.has_text:
            self.block({"type": "text", "text": ""}, {"type": "text_delta", "text": self.text})
        for at in range(self.calls):
            call_id, arguments = self.call(at)
            use = {"type": "tool_use", "id": call_id, "name": "read_file", "input": {}}
            self.block(use, {"type": "input_json_delta", "partial_json": arguments})
        stop = {"stop_reason": "tool_use" if self.calls else "end_turn"}
        self.events.append({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 50}})
        self.events.append({"type": "message_stop"})

    def block(self, block: dict[str, Any], *deltas: dict[str, Any], is_opaque: bool = False) -> None:
        at = sum(event["type"] == "content_block_start" for event in self.events)
        if is_opaque:
            self.opaque.append(_canonical(block))
        self.events.append({"type": "content_block_start", "index": at, "content_block": block})
        self.events += [{"type": "content_block_delta", "index": at, "delta": delta} for delta in deltas]
        self.events.append({"type": "content_block_stop", "index": at})


_WRITERS: Mapping[str, type[_Writer]] = {"chat": _Chat, "responses": _Responses, "messages": _Messages}


class RandomTurns:
    """Runs random turns in one session, through kills, compactions, undo, and changes of model and wire.

    `start` starts a process.
    """

    def __init__(
        self, start: Callable[[], CrowProcess], endpoint: CheckingEndpoint, place: Path, chance: random.Random
    ) -> None:
        self._start = start
        self._endpoint = endpoint
        self._place = place
        self._chance = chance
        self._session = ""
        self._number = 0

    async def run(self, turns: int) -> None:
        """Run `turns` turns."""
        while self._number < turns:
            async with self._start() as agent:
                agent.checks_schema = False
                await agent.initialize()
                if self._session:
                    await agent.load_session(self._session, self._place)
                else:
                    self._session = await agent.new_session(self._place)
                while self._number < turns:
                    self._number += 1
                    if await self._turn(agent) == "kill":
                        break
                    agent.log.clear()

    async def _turn(self, agent: CrowProcess) -> str:
        names = ("prompt", "switch", "cut", "cancel", "kill", "compact", "undo", "redo")
        kind = self._chance.choices(names, (8, 6, 2, 2, 2, 1, 1, 1))[0]
        self._endpoint.kinds[kind] += 1
        prompt = f"Go on with number {self._number}."
        match kind:
            case "compact" | "undo" | "redo":
                prompt = f"/{kind}"
            case "switch":
                option = {"sessionId": self._session, "configId": "model", "value": self._chance.choice(MODELS)}
                await agent.request("session/set_config_option", option)
            case "cut":
                self._endpoint.endings.append("cut")
            case "cancel" | "kill":
                self._endpoint.endings += [*(["whole"] * self._chance.choice([0, 0, 1])), "hang"]
        asked = len(self._endpoint.requests)
        call = await agent.start_prompt(self._session, prompt)
        if kind in {"cancel", "kill"}:
            await agent.wait_for(lambda _: call.outcome.done() or self._has_begun(agent, asked))
            if kind == "kill":
                self._endpoint.endings.clear()
                await agent.kill()
                return kind
            await agent.notify("session/cancel", {"sessionId": self._session})
        with suppress(RpcError):
            await call.result()
        self._endpoint.endings.clear()
        return kind

    def _has_begun(self, agent: CrowProcess, asked: int) -> bool:
        return len(self._endpoint.requests) > asked and "[answer " in agent.text(self._session)

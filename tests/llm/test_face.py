"""What `crow.llm` offers to other programs: the parsers and encoders of all wires, imported on first use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import crow.llm
from crow.domain.messages import SystemMessage, Text, UserMessage, WireName
from crow.llm import (
    ChatEncoder,
    ChatParser,
    Dialect,
    MessagesEncoder,
    MessagesParser,
    Request,
    ResponsesEncoder,
    ResponsesParser,
    SseDecoder,
    TextDelta,
    Wire,
    wire_named,
)

WIRES: dict[WireName, tuple[type, type, list[object]]] = {
    "chat": (
        ChatEncoder,
        ChatParser,
        [{"choices": [{"delta": {"content": "twigs"}, "finish_reason": "stop"}]}],
    ),
    "responses": (
        ResponsesEncoder,
        ResponsesParser,
        [
            {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "delta": "twigs"},
            {"type": "response.completed", "response": {"status": "completed", "output": []}},
        ],
    ),
    "messages": (
        MessagesEncoder,
        MessagesParser,
        [
            {"type": "message_start", "message": {"usage": {"input_tokens": 3}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "twigs"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ],
    ),
}


@pytest.mark.parametrize("name", WIRES)
def test_a_program_can_write_requests_and_read_answers_on_every_wire(name: WireName) -> None:
    encoder, parser_class, events = WIRES[name]
    wire = wire_named(name)
    assert isinstance(wire, Wire)
    assert (wire.encoder, wire.parser) == (encoder, parser_class)
    prompt = UserMessage(parts=(Text(text="what is it made of?"),))
    request = Request(messages=(SystemMessage(text="be brief"), prompt))
    dialect = Dialect(wires=(name,))
    sent = json.loads(wire.encoder().body(request, model="m", endpoint="", dialect=dialect, limit=100))
    assert sent["model"] == "m"
    assert "what is it made of?" in json.dumps(sent)
    data = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    for split in range(len(data)):
        decoder, parser = SseDecoder(), wire.parser()
        shown = [*parser.feed(decoder.feed(data[:split])), *parser.feed(decoder.feed(data[split:])), *parser.flush()]
        assert "".join(delta.text for delta in shown if isinstance(delta, TextDelta)) == "twigs"
        assert (parser.finish().text, parser.finish().finish) == ("twigs", "stop")


def test_no_wire_is_imported_before_it_is_used() -> None:
    code = (
        "import sys; import crow.llm; print(sorted(each for each in sys.modules if each.startswith('crow.llm.')));"
        "print(crow.llm.ChatParser.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['crow.llm.facts']", "crow.llm.chat.parser"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'crow\.llm' has no attribute 'Parser'"):
        _ = crow.llm.Parser

"""What a model answers to the loop in `docs/python-api.md`."""

from __future__ import annotations

import json

from tests.support.fake_endpoint import FakeEndpoint, Reply, body


def loop_replies() -> list[Reply]:
    """Return a call of the tool, then an answer."""
    function = {"name": "shell", "arguments": '{"command": "echo twigs"}'}
    call = {"id": "c1", "type": "function", "function": function}
    return [reply({"content": None, "tool_calls": [call]}), reply({"content": "It has room."})]


def reply(message: dict[str, object]) -> Reply:
    """Return a chat completion in one piece."""
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": "gpt-5"}
    return body(json.dumps({**head, "choices": [choice], "usage": usage}).encode())


def keys(endpoint: FakeEndpoint) -> dict[str, str]:
    """Return the environment of a program that uses the endpoint."""
    return {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": "sk-test-0123456789"}

"""Secrets in the arguments of calls are masked, although JSON escapes some of their characters."""

from __future__ import annotations

import json
from pathlib import Path

from crow.domain.entries import Assistant, Entry
from crow.domain.messages import ToolCall
from crow.export.lines import entry_line
from crow.export.page import session_page
from crow.export.redact import committed, redactor
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, new_session

SECRET = 'hunter"2\\tail'
PEM = f"-----BEGIN PRIVATE KEY-----\n{'MIIEvQ+/' * 20}\n-----END PRIVATE KEY-----\n"
ARGUMENTS = {"path": "k.pem", "content": PEM, "headers": [{"X-Key": SECRET}]}


def answer(arguments: str) -> Assistant:
    return Assistant(text="", message_id="a", calls=(ToolCall(id="c", name="write_file", arguments=arguments),))


def test_a_line_masks_secrets_in_arguments_and_keeps_other_arguments_as_they_are() -> None:
    redact = committed([SECRET])
    for given, expected in (
        (
            json.dumps(ARGUMENTS),
            json.dumps(
                {
                    **ARGUMENTS,
                    "content": PEM.replace("MIIEvQ+/" * 20 + "\n", "[hidden]"),
                    "headers": [{"X-Key": "[hidden]"}],
                }
            ),
        ),
        ('{"a" : "x\\u0041"}', '{"a" : "x\\u0041"}'),
        (f"not JSON {'sk-' + 'a' * 20}", "not JSON [hidden]"),
    ):
        entry = Entry(id=2, conversation=1, parent=1, session="s1", turn=1, body=answer(given))
        (call,) = json.loads(entry_line(entry, redact))["body"]["calls"]
        assert call["arguments"] == expected


async def test_a_page_masks_secrets_deep_in_arguments(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        await begin(store, "s1", "go")
        await add(store, "s1", answer(json.dumps(ARGUMENTS)))
        redact = redactor([SECRET])
        page = b"".join([piece async for piece in session_page(store, "s1", redact)]).decode()
    finally:
        await store.close()
    assert "hunter" not in page
    assert "headers: [{&quot;X-Key&quot;: &quot;[hidden]&quot;}]" in page

"""Tests of which part of a request a refusal of the Messages API names."""

from __future__ import annotations

import json

import pytest

from crow.llm.dialect import Dialect
from crow.llm.errors import parse_error_response, refused_part
from crow.llm.facts import Refusal
from crow.llm.form import RequestForm

BOUND = "messages.1.content.0: Invalid `signature` in `thinking` block. The block is bound to a different conversation."
CHANGED = (
    "messages.3.content.1: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
    "modified. These blocks must remain as they were in the original response."
)
USE = 'Use "thinking.type.adaptive" and "output_config.effort" to control thinking behavior.'


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (BOUND, ["earlier_thoughts", "opaque"]),
        (CHANGED, ["earlier_thoughts", "opaque"]),
        ("messages.1.content.0: Invalid `signature` in `thinking` block", ["earlier_thoughts", "opaque"]),
        (f'"thinking.type.enabled" is not supported for this model. {USE}', ["thinking_budget"]),
        (f'"thinking.type.disabled" is not supported for this model. {USE}', ["thinking_off"]),
        ("thinking.type.between_tools: effort xhigh is not allowed with between_tools", ["thinking_off"]),
        ("adaptive thinking is not supported on this model", ["adaptive_thinking"]),
        (
            "thinking: Input tag 'adaptive' found using 'type' does not match any of the expected tags: 'disabled'",
            ["adaptive_thinking"],
        ),
        ("thinking.adaptive.display: Extra inputs are not permitted", ["thinking_display"]),
        ("output_config: Extra inputs are not permitted", ["effort"]),
        ("This model does not support the effort parameter.", ["effort"]),
        ("cache_control: Extra inputs are not permitted", ["cache_marker"]),
        ("messages.0.content.1.image.source.base64: image exceeds 5 MB maximum", ["images"]),
        ("Could not process image", ["images"]),
        ("messages.2.content.0.tool_result.is_error: Extra inputs are not permitted", ["is_error"]),
        ("unknown field is_error in tool_result", ["is_error"]),
        ("messages: at least one message is required", []),
    ],
)
def test_a_refusal_names_the_part_to_leave_out(words: str, parts: list[str]) -> None:
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": words}, "request_id": "req_1"}
    body = parse_error_response(400, json.dumps(error).encode())
    dialect = Dialect(wires=("messages",))
    found: list[str] = []
    for _ in parts:
        part = refused_part(body, dialect)
        assert part is not None
        dialect = dialect.refusing(part)
        found.append(part.removeprefix("messages."))
    assert found == parts
    assert not parts or dialect.left_out == set(parts)
    assert parts or refused_part(body, dialect) is None


def test_a_part_that_was_left_out_and_is_required_now_is_sent_again_without_the_others() -> None:
    names = ("messages.effort", "messages.images")
    known = {part: Refusal(part=part, source="", learned_on="", session="s") for part in names}
    form = RequestForm(session="s", configured=Dialect(wires=("messages",)), known=known)
    assert form.dialect.left_out == {"effort", "images"}
    assert form.revert("output_config.effort: Field required")
    assert form.dialect.left_out == {"images"}


def test_these_refusals_change_nothing_on_chat_completions() -> None:
    body = parse_error_response(400, json.dumps({"error": {"message": BOUND}}).encode())
    part = refused_part(body, Dialect())
    assert part is None or not part.startswith(("earlier", "messages."))

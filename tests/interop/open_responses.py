"""Validates requests against the document of Open Responses: `python -m tests.interop.open_responses OPENAPI_JSON`.

The document is not part of this project. It was last tried with version 2026-04-24, which has no tools with plain text
as input: those are OpenAI's own. The tests validate requests with the types of the `openai` package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from crow.domain.messages import AssistantMessage, File, Text, ToolMessage, UserMessage
from crow.llm import THOUGHT_LEVELS
from crow.llm.items import stored_items
from tests.llm.responses.test_encode import (
    ASKED,
    CACHED,
    CALLS,
    HERE,
    ITEMS,
    OWN,
    PICTURE,
    PLAIN,
    RESULTS,
    SYSTEM,
    TOOLS,
    body,
)

DOCUMENT = "urn:open-responses"
FILE = File(name="a.pdf", data="JVBERi0xLjcK", mime_type="application/pdf")
ANSWER = AssistantMessage(
    text="I look.", calls=CALLS[:1], thought="Hm", opaque=stored_items(ITEMS[:3]), endpoint=HERE, wire="responses"
)


def requests() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield requests of each form that crow sends, with their names."""
    tools, result = TOOLS[:1], ToolMessage(call_id="call_1", text="x", images=(PICTURE,), files=(FILE,))
    yield "a question", body(SYSTEM, ASKED, tools=tools)
    for level in THOUGHT_LEVELS:
        yield f"thought level {level}", body(SYSTEM, ASKED, tools=tools, level=level)
    files = replace(PLAIN, takes_files=True)
    yield "an answer that goes back", body(SYSTEM, ASKED, ANSWER, result, dialect=files, tools=tools)
    yield "another endpoint's answer", body(SYSTEM, ASKED, replace(ANSWER, endpoint="x"), RESULTS[0], tools=tools)
    yield "a paused answer", body(SYSTEM, ASKED, AssistantMessage(text="I", is_paused=True), tools=tools)
    yield "an image", body(SYSTEM, UserMessage(parts=(Text(text="a"), PICTURE)), tools=tools)
    for model in ("gpt-5.4", "gpt-5.6"):
        yield f"caching with {model}", body(SYSTEM, ASKED, dialect=CACHED, model=model, tools=tools)
    yield "a developer message", body(SYSTEM, ASKED, dialect=replace(PLAIN, system_role="developer"), tools=tools)
    plain = replace(PLAIN, left_out=frozenset({"custom_tools"}))
    yield "calls and tools without plain text", body(SYSTEM, ASKED, OWN, *RESULTS, tools=TOOLS, dialect=plain)


def main(file: Path) -> int:
    """Print what is wrong. Return 1 if anything is."""
    document = json.loads(file.read_text("utf-8"))
    registry = Registry().with_resource(DOCUMENT, DRAFT202012.create_resource(document))
    schema = {"$ref": f"{DOCUMENT}#/components/schemas/CreateResponseBody"}
    validator = Draft202012Validator(schema, registry=registry)
    wrong = 0
    for name, request in requests():
        faults = [error.message[:300] for error in validator.iter_errors(request)]
        wrong += bool(faults)
        print(f"{name}: {'; '.join(faults) or 'valid'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

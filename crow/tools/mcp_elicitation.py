"""A question that an MCP server asks the user, on its way to the editor and back.

Strategy: the two forms of the library become the two of ours, with the server named in the words; what nobody can be
asked is declined. Knows neither connections nor the editor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, assert_never

import mcp_types as mcp

from crow.domain.elicitation import Elicitation, FormQuestion, UrlQuestion
from crow.domain.entries import CallRef
from crow.tools import Asker

__all__ = ["elicited", "with_defaults"]

Value: TypeAlias = str | int | float | bool | list[str]


async def elicited(
    asker: Asker | None, server: str, params: mcp.ElicitRequestParams, call_id: str, question_id: str
) -> mcp.ElicitResult:
    """Ask the user what `server` wants to know, during the call of `call_id` ("" if that is not certain).

    `question_id` is for a page to visit whose server gives the question no id.
    """
    message = f"{server}: {params.message}"
    call = call_ref(call_id)
    question: Elicitation
    match params:
        case mcp.ElicitRequestURLParams(url=url, elicitation_id=given):
            question = UrlQuestion(message=message, url=url, id=given or question_id, call=call)
        case mcp.ElicitRequestFormParams(requested_schema=schema):
            question = FormQuestion(message=message, schema=schema, call=call)
        case _ as never:
            assert_never(never)
    if asker is None or ("url" if isinstance(question, UrlQuestion) else "form") not in asker.elicits:
        return mcp.ElicitResult(action="decline")
    answer = await asker.elicit(question)
    if answer.action != "accept" or isinstance(question, UrlQuestion):
        return mcp.ElicitResult(action=answer.action)
    content: Any = with_defaults(question.schema, answer.content)
    return mcp.ElicitResult(action="accept", content=content)


def with_defaults(schema: Mapping[str, Any], content: Mapping[str, Value]) -> dict[str, Value]:
    """The values of an accepted form, with the schema's default for each field that has none.

    A default that does not fit the type of its field is left out.
    """
    fields = schema.get("properties")
    filled = dict(content)
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        if name not in filled and isinstance(field, Mapping) and fits(field, field.get("default")):
            filled[name] = field["default"]
    return filled


def fits(field: Mapping[str, Any], value: object) -> bool:
    """Whether a form can hold `value` in this field: a text, a number, a yes or no, or a choice."""
    match field.get("type", "string" if "enum" in field or "oneOf" in field else None):
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case _:
            return False


def call_ref(call_id: str) -> CallRef | None:
    """The call that an id names, None if it names none."""
    match call_id.split("_"):
        case ["call", assistant, index] if assistant.isdecimal() and index.isdecimal():
            return CallRef(assistant=int(assistant), index=int(index))
        case _:
            return None

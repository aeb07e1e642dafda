"""A question that an MCP server asks the user, on its way to the editor and back.

Strategy: the two forms of the library become the two of ours, with the server named in the words; what nobody can be
asked is declined. Knows neither connections nor the editor.
"""

from __future__ import annotations

from typing import Any, assert_never

import mcp_types as mcp

from crow.domain.elicitation import Elicitation, FormQuestion, UrlQuestion
from crow.domain.entries import CallRef
from crow.tools import Asker

__all__ = ["elicited"]


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
    content: Any = dict(answer.content)
    return mcp.ElicitResult(action="accept", content=content)


def call_ref(call_id: str) -> CallRef | None:
    """The call that an id names, None if it names none."""
    match call_id.split("_"):
        case ["call", assistant, index] if assistant.isdecimal() and index.isdecimal():
            return CallRef(assistant=int(assistant), index=int(index))
        case _:
            return None

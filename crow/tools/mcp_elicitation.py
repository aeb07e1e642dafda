"""A question that an MCP server asks the user, on its way to the editor and back.

Strategy: the two forms of the library become one value of ours; what has nobody to ask, or cannot be shown, is
declined. Knows neither connections nor the editor.
"""

from __future__ import annotations

from typing import Any, assert_never

import mcp_types as mcp

from crow.tools import Asker, Elicitation, ElicitationAnswer

__all__ = ["elicited"]


async def elicited(
    asker: Asker | None, server: str, params: mcp.ElicitRequestParams, call_id: str | None
) -> mcp.ElicitResult:
    """Ask the user what `server` wants to know."""
    if asker is None:
        return mcp.ElicitResult(action="decline")
    match params:
        case mcp.ElicitRequestURLParams():
            question = Elicitation(
                server=server,
                message=params.message,
                url=params.url,
                id=params.elicitation_id or "",
                call_id=call_id,
            )
        case mcp.ElicitRequestFormParams():
            schema: dict[str, Any] = params.requested_schema
            question = Elicitation(server=server, message=params.message, schema=schema, call_id=call_id)
        case _ as never:
            assert_never(never)
    return result_of(await asker.elicit(question))


def result_of(answer: ElicitationAnswer) -> mcp.ElicitResult:
    """The user's answer as the server gets it."""
    if answer.action != "accept" or answer.content is None:
        return mcp.ElicitResult(action=answer.action)
    content: Any = dict(answer.content)
    return mcp.ElicitResult(action="accept", content=content)

"""The calls of one MCP server's tools, and the questions that the server asks the user meanwhile.

Strategy: a failure of a call is an outcome that names the server. A question belongs to the call that ran when it was
asked, if that is certain, and is taken back when nobody waits for that call any more: its answer could change nothing.
Knows a client that is connected; not how the server lives.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, assert_never

import anyio
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import ClientRequestContext
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from crow.domain.entries import Attachment, CallRef
from crow.domain.events import Elicitation, FormQuestion, UrlQuestion
from crow.domain.messages import Image
from crow.tools import ElicitationHandler, OnOutput, Outcome
from crow.tools.builtin.files import sound_picture_type
from crow.tools.mcp.listing import ExternalTool

__all__ = ["ServerCalls", "elicited", "outcome_of", "progress_shown", "sentence", "with_defaults"]


class ServerCalls:
    """What runs on one server. `failed` is told of an error that a call came back with; `ending` says why the server
    ended. `timeout_s`: how long a call may take."""

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        timeout_s: float,
        asker: ElicitationHandler | None,
        failed: Callable[[MCPError], None],
        ending: Callable[[MCPError], str],
    ) -> None:
        self._name = name
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._asker = asker
        self._told_failed = failed
        self._ending = ending
        self._running: list[str] = []
        self._questions: dict[anyio.CancelScope, str] = {}
        self._asked = 0

    async def call(
        self, client: Client, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str
    ) -> Outcome:
        """Call a tool; a failure is an outcome that names the server."""
        self._running.append(call_id)
        try:
            result = await client.call_tool(tool.name, dict(arguments), progress_callback=progress_shown(on_output))
        except MCPError as error:
            self._told_failed(error)
            return self.failure(self._words(tool, error))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's answer provokes in the library
            return self.failure(f"gave {tool.name} an answer that cannot be used: {sentence(error)}")
        finally:
            self._running.remove(call_id)
            self._withdraw(call_id)
        return outcome_of(result)

    async def elicit(
        self,
        context: ClientRequestContext,  # noqa: ARG002 (the library's signature)
        params: mcp.ElicitRequestParams,
    ) -> mcp.ElicitResult | mcp.ErrorData:
        """Answer a question of the server's, as the library wants it."""
        call_id = self._running[0] if len(self._running) == 1 else ""
        self._asked += 1
        with anyio.CancelScope() as scope:
            if self._running:
                self._questions[scope] = call_id
            try:
                return await elicited(self._asker, self._name, params, call_id, f"{self._prefix}-{self._asked}")
            finally:
                self._questions.pop(scope, None)
        return mcp.ElicitResult(action="cancel")

    def failure(self, words: str) -> Outcome:
        """A call that came to nothing."""
        return Outcome(text=f"MCP server {self._name} {words}", is_error=True)

    def _withdraw(self, ended: str) -> None:
        """Take back what was asked in the call that `ended`, and with the last of all calls everything."""
        for scope, call_id in self._questions.items():
            if not self._running or (call_id and call_id == ended):
                scope.cancel()

    def _words(self, tool: ExternalTool, error: MCPError) -> str:
        if error.code == mcp.REQUEST_TIMEOUT:
            return f"did not answer {tool.name} within {self._timeout_s:g} s"
        if error.code == mcp.CONNECTION_CLOSED:
            return f"ended during {tool.name}: {self._ending(error)}"
        return f"refused {tool.name}: {sentence(error)}"


# FROM tools.mcp_elicitation: A question that an MCP server asks the user, on its way to the editor and back.
#
# Strategy: the two forms of the library become the two of ours, with the server named in the words; what nobody can
# be
# asked is declined. Knows neither connections nor the editor.


Value: TypeAlias = str | int | float | bool | list[str]


async def elicited(
    asker: ElicitationHandler | None, server: str, params: mcp.ElicitRequestParams, call_id: str, question_id: str
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


# FROM tools.mcp_results: What an external MCP server gave or did, as an outcome and in words.
#
# Strategy: text stays text, pictures stay pictures, everything else becomes words that say what it is; structured
# content is shown where there is no text. Failures become one sentence that names the server, however deep the
# library
# buried them in exception groups. Knows no connection.


SENTENCE_CHARS = 300
PROGRESS_LINES = 100
PROGRESS_EVERY_S = 0.1


def outcome_of(result: mcp.CallToolResult) -> Outcome:
    """A result as the model and the client get it."""
    pieces = [text for block in result.content if (text := text_of(block)) is not None]
    images = tuple(
        Image(data=block.data, mime_type=media)
        for block in result.content
        if isinstance(block, mcp.ImageContent) and (media := sound_picture_type(block.data)) is not None
    )
    structured = result.structured_content
    if not pieces and structured is not None:
        pieces = [json.dumps(structured, ensure_ascii=False, indent=2)]
    if not pieces:
        pieces = ["(a picture)" if images else "(no output)"]
    return Outcome(
        text="\n".join(pieces).encode("utf-8", "replace").decode("utf-8"),
        is_error=result.is_error,
        images=images,
        attachments=tuple(each for block in result.content if (each := attachment_of(block)) is not None),
        raw_output=structured if isinstance(structured, Mapping) else {},
    )


def text_of(block: mcp.ContentBlock) -> str | None:
    match block:
        case mcp.TextContent(text=text):
            return text
        case mcp.ImageContent():
            if sound_picture_type(block.data) is not None:
                return None
            return f"[a picture, {block.mime_type}, {bytes_in(block.data):,} bytes: of a kind that models cannot see]"
        case mcp.AudioContent():
            return f"[sound, {block.mime_type}, {bytes_in(block.data):,} bytes: not shown]"
        case mcp.ResourceLink():
            about = f": {block.description}" if block.description else ""
            return f"[{block.title or block.name}]({block.uri}){about}"
        case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as resource):
            return f"{resource.uri}:\n{resource.text}"
        case mcp.EmbeddedResource(resource=resource):
            size = bytes_in(resource.blob) if isinstance(resource, mcp.BlobResourceContents) else 0
            return f"[{resource.uri}, {resource.mime_type or 'of unknown type'}, {size:,} bytes: not shown]"


def attachment_of(block: mcp.ContentBlock) -> Attachment | None:
    """What of a block is for the user, beside the words about it; None for text and pictures."""
    match block:
        case mcp.AudioContent():
            return Attachment(name="sound", mime_type=block.mime_type, data=block.data)
        case mcp.ImageContent() if sound_picture_type(block.data) is None:
            return Attachment(name="picture", mime_type=block.mime_type, data=block.data)
        case mcp.ResourceLink():
            return Attachment(name=block.title or block.name, uri=block.uri, mime_type=block.mime_type)
        case mcp.EmbeddedResource(resource=mcp.BlobResourceContents() as resource):
            uri = resource.uri
            return Attachment(name=uri, uri=uri, mime_type=resource.mime_type, data=resource.blob)
        case _:
            return None


def bytes_in(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def sentence(error: BaseException) -> str:
    """What went wrong, without the groups around it."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return sentence(exceptions[0])
        case MCPError():
            return str(error.message) or f"error {error.code}"
        case FileNotFoundError() | PermissionError():
            return f"{error.strerror}: {error.filename}" if error.filename else str(error)
        case _:
            words = " ".join(str(error).split()) or type(error).__name__
            return words if len(words) <= SENTENCE_CHARS else words[:SENTENCE_CHARS] + "…"


def progress_shown(on_output: OnOutput) -> ProgressFnT:
    """Progress of a call as lines of output, the newest ones, at most ten times a second."""
    lines: list[str] = []
    shown_at = -math.inf

    async def report(progress: float, total: float | None, message: str | None) -> None:
        nonlocal shown_at
        share = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        lines.append(f"{share} {message}" if message else share)
        del lines[:-PROGRESS_LINES]
        if time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            await on_output("\n".join(lines))

    return report

"""Converts what MCP servers send: results of calls, filled prompts, and questions to the user."""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import anyio
import mcp_types as mcp
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from crow.domain.entries import Attachment, CallRef
from crow.domain.errors import ArgumentError
from crow.domain.events import Elicitation, FormQuestion, UrlQuestion
from crow.domain.messages import PDF_TYPE, File, Image, Link, Part, Resource, Text
from crow.domain.rendering import file_name, in_title
from crow.domain.text import on_one_line, safe, shorten
from crow.tools import ElicitationHandler, OnOutput, Outcome
from crow.tools.builtin.media import sound_pdf, sound_picture_type
from crow.tools.servers import LoginQuestion
from crow.tools.urls import is_address, normalize_url

logger = logging.getLogger(__name__)

_ERROR_CHARS = 300
_MESSAGE_CHARS = 4_000
_FINISH_S = 0.3
"""The client has this many seconds to learn that the user no longer needs a page."""
_PROGRESS_LINES = 100
_PROGRESS_CHARS = 500
PROGRESS_EVERY_S = 0.1
_FORM_TYPES: Mapping[str, Any] = {"string": str, "boolean": bool, "integer": int, "number": int | float, "array": list}
"""The Python types of the values that a field of a form may have, by the type in its schema."""


def outcome_of(result: mcp.CallToolResult) -> Outcome:
    """Return the result of a call for the model and the client: texts, images, and descriptions of everything else."""
    pieces: list[str] = []
    images: list[Image] = []
    attachments: list[Attachment] = []
    for block in result.content:
        match block:
            case mcp.TextContent(text=text):
                pieces.append(text)
            case mcp.ImageContent(data=data, mime_type=kind):
                if (media := sound_picture_type(data)) is not None:
                    images.append(Image(data=data, mime_type=media))
                else:
                    pieces.append(f"[a picture, {kind}, {count_bytes(data):,} bytes: models cannot see this kind]")
                    attachments.append(Attachment(name="picture", mime_type=kind, data=data))
            case mcp.AudioContent(data=data, mime_type=kind):
                pieces.append(f"[sound, {kind}, {count_bytes(data):,} bytes: not shown]")
                attachments.append(Attachment(name="sound", mime_type=kind, data=data))
            case mcp.ResourceLink(uri=uri, description=about, mime_type=link_kind):
                name = block.title or block.name
                # not as a Markdown link: the server chose the target, and editors open what is clicked
                pieces.append(f"{in_title(on_one_line(name))} ({on_one_line(uri)}){f': {about}' if about else ''}")
                attachments.append(Attachment(name=name, uri=uri, mime_type=link_kind))
            case mcp.EmbeddedResource(resource=mcp.TextResourceContents(uri=uri, text=text)):
                pieces.append(f"{uri}:\n{text}")
            case mcp.EmbeddedResource(resource=mcp.BlobResourceContents(uri=uri, blob=data, mime_type=file_kind)):
                pdf = sound_pdf(data, uri)
                note = "" if pdf is not None else ": not shown"
                pieces.append(f"[{uri}, {file_kind or 'of unknown type'}, {count_bytes(data):,} bytes{note}]")
                attachments.append(pdf or Attachment(name=uri, uri=uri, mime_type=file_kind, data=data))
    structured = result.structured_content
    if not pieces and structured is not None:
        pieces = [json.dumps(structured, ensure_ascii=False, indent=2)]
    text = "\n".join(pieces) if pieces else "(a picture)" if images else "(no output)"
    if result.is_error and not "".join(pieces).strip():
        text = "The tool reported an error without saying what went wrong."
    return Outcome(
        text=encodable(text),
        is_error=result.is_error,
        images=tuple(images),
        attachments=tuple(attachments),
        raw_output=structured if isinstance(structured, Mapping) else {},
    )


def parts_of(result: mcp.GetPromptResult) -> tuple[Part, ...]:
    """Convert a filled prompt to the parts of one user message. Blank texts are left out; if there is nothing else, the
    result is empty. If at least one of the prompt's messages is not from the user, the name of the role is put before
    each message."""
    contents = [_part_of(message.content) for message in result.messages]
    are_blank = [isinstance(part, Text) and not part.text.strip() for part in contents]
    is_dialogue = any(message.role != "user" for message in result.messages)
    parts: list[Part] = []
    for message, part, is_blank in zip(result.messages, contents, are_blank, strict=True):
        if is_dialogue:
            parts.append(Text(text=f"{message.role.capitalize()}:"))
        if not is_blank:
            parts.append(part)
    return () if all(are_blank) else tuple(parts)


def _part_of(block: mcp.ContentBlock) -> Part:
    match block:
        case mcp.TextContent(text=text):
            return Text(text=encodable(text))
        case mcp.ImageContent(data=data, mime_type=kind):
            return picture(data, None) or _describe_content("a picture", kind, data)
        case mcp.AudioContent(data=data, mime_type=kind):
            return _describe_content("a sound", kind, data)
        case mcp.ResourceLink(uri=uri, name=name, mime_type=mime_type):
            return Link(uri=encodable(uri), name=encodable(name), mime_type=mime_type)
        case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as file):
            return Resource(uri=encodable(file.uri), text=encodable(file.text), mime_type=file.mime_type)
        case mcp.EmbeddedResource(resource=file):
            data = file.blob if isinstance(file, mcp.BlobResourceContents) else ""
            kind = file.mime_type or ""
            pdf = sound_pdf(data, file.uri)
            if pdf is not None and pdf.data is not None:
                return File(
                    name=file_name(encodable(file.uri)), data=pdf.data, mime_type=PDF_TYPE, uri=encodable(file.uri)
                )
            return picture(data, file.uri) or _describe_content(f"the file {file.uri}", kind, data)


def picture(data: str, uri: str | None) -> Image | None:
    """Return an image with the type that its data has, whatever the server calls it: endpoints refuse a request with
    the wrong type. Return None if the data is not valid base64, too large, or not an image that models accept."""
    plain = "".join(data.split())
    media = sound_picture_type(plain)
    return None if media is None else Image(data=plain, mime_type=media, uri=uri)


def _describe_content(what: str, mime_type: str, data: str) -> Text:
    kind = mime_type or "type unknown"
    return Text(text=f"({what} ({kind}, {count_bytes(data):,} bytes) came with the prompt; crow cannot read it.)")


def encodable(text: str) -> str:
    """Return `text` with lone surrogates replaced, because UTF-8 cannot encode them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def count_bytes(data: str) -> int:
    """Return the number of bytes that base64 text encodes."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def describe_error(error: BaseException) -> str:
    """Return the reason for a failure: the message of a server as it is, everything else on one short line. For an
    exception group, it is the reason of the first exception in the group."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return describe_error(exceptions[0])
        case MCPError():
            return str(error.message) or f"error {error.code}"
        case ValidationError():
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            return shorten(" ".join(f"{where}: {fault['msg']}".split()), _ERROR_CHARS)
        case FileNotFoundError() | PermissionError():
            return f"{error.strerror}: {error.filename}" if error.filename else str(error)
        case _:
            words = " ".join(str(error).split()) or type(error).__name__
            return shorten(words, _ERROR_CHARS)


def report_progress(on_output: OnOutput) -> ProgressFnT:
    """Make a callback that shows the newest lines of progress as output, at most ten times a second."""
    lines: list[str] = []
    shown_at = -math.inf

    async def report(progress: float, total: float | None, message: str | None) -> None:
        nonlocal shown_at
        share = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        lines.append(f"{share} {message[:_PROGRESS_CHARS]}" if message else share)
        del lines[:-_PROGRESS_LINES]
        if time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            await on_output("\n".join(lines))

    return report


async def ask_user(
    elicitation: ElicitationHandler | None, server: str, params: mcp.ElicitRequestParams, call_id: str, question_id: str
) -> mcp.ElicitResult | mcp.ErrorData:
    """Ask the user a question of `server`. If nobody can be asked, decline the question. If the question could mislead
    the user, refuse it with an error.

    `call_id` is the call that the question belongs to, or "" if that is not certain. If the question asks the user to
    visit a page, the client gets it with the id `question_id`. The server's own id is not used, because another server
    may use the same one.
    """
    message, call = f"{server}: {_safe_beginning(params.message, _MESSAGE_CHARS)}", parse_call_id(call_id)
    question: Elicitation
    try:
        if isinstance(params, mcp.ElicitRequestURLParams):
            kind = "url"
            url, host = page_to_open(params.url)
            message = f"{message}\n\nThis opens a page on {host}."
            question = UrlQuestion(message=message, url=url, id=question_id, call=call)
        else:
            kind = "form"
            schema = readable_form(params.requested_schema)
            question = FormQuestion(message=message, schema=schema, call=call)
    except ArgumentError as error:
        logger.warning("MCP server %s: its question was refused: %s", server, error)
        return mcp.ErrorData(code=mcp.INVALID_PARAMS, message=str(error))
    if elicitation is None or kind not in elicitation.question_kinds:
        return mcp.ElicitResult(action="decline")
    answer = await elicitation.elicit(question)
    if answer.action != "accept" or isinstance(question, UrlQuestion):
        return mcp.ElicitResult(action=answer.action)
    content: Any = {**_defaults(question.schema), **answer.content}
    return mcp.ElicitResult(action="accept", content=content)


async def ask_to_log_in(
    elicitation: ElicitationHandler, server: str, question: LoginQuestion, call_id: str, question_id: str
) -> Literal["accept", "decline"]:
    """Ask the user to log in to `server`. If the user agrees, wait until the browser has come back.

    `call_id` and `question_id` are the same as for `ask_user`.
    """
    message = f"{server}: this MCP server ({question.server_host}) asks you to log in."
    page = UrlQuestion(
        message=f"{message}\n\nThis opens a page on {question.place}.",
        url=question.page,
        id=question_id,
        call=parse_call_id(call_id),
    )
    try:
        answer = await elicitation.elicit(page)
        if answer.action != "accept":
            return "decline"
        await question.wait()
        return "accept"
    finally:
        with anyio.move_on_after(_FINISH_S, shield=True):
            await elicitation.finish_question(page.id)


def _defaults(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of a form's fields. A default is left out if its type differs from the type of its
    field."""
    fields = schema.get("properties")
    found = {}
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        if isinstance(field, Mapping) and "default" in field:
            kind, value = field.get("type", "string" if "enum" in field or "oneOf" in field else None), field["default"]
            is_typed = isinstance(kind, str) and kind in _FORM_TYPES and isinstance(value, _FORM_TYPES[kind])
            items = value if isinstance(value, list) else ()
            # isinstance(True, int) is true in Python, so booleans need their own check.
            if is_typed and isinstance(value, bool) == (kind == "boolean") and all(isinstance(i, str) for i in items):
                found[name] = value
    return found


def page_to_open(text: str) -> tuple[str, str]:
    """Return the URL that the user is asked to open, and its host. A host with characters outside ASCII is returned in
    punycode.

    :raises ~crow.domain.errors.ArgumentError: `text` is not an http or https URL, has credentials, spaces or hidden
        characters, or is an http URL of another machine.
    """
    if safe(text) != text or len(text.split()) != 1:
        raise ArgumentError(
            f"url is {on_one_line(text[:_ERROR_CHARS])}; expected a URL without hidden characters or spaces"
        )
    url = normalize_url(text)
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" and not is_this_machine(host):
        raise ArgumentError(f"url is {text[:_ERROR_CHARS]}; expected https, because the page is on another machine")
    fragment = urlsplit(text.strip()).fragment
    return f"{url}#{fragment}" if fragment else url, host


def is_this_machine(host: str) -> bool:
    """Return whether a host name or address means this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def readable_form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form, with hidden characters in its titles and descriptions escaped.

    :raises ~crow.domain.errors.ArgumentError: a name or value has hidden characters. Names and values cannot be
        escaped, because the answer must repeat them exactly.
    """
    form = {key: _readable(value, key) for key, value in schema.items()}
    return {_readable(key, ""): value for key, value in form.items()}


def _readable(value: Any, key: str) -> Any:
    match value:
        case str() if key in ("title", "description"):
            return _safe_beginning(value, _MESSAGE_CHARS)
        case str() if safe(value) != value:
            raise ArgumentError(f"requestedSchema has hidden characters in {on_one_line(value[:_ERROR_CHARS])}")
        case dict():
            return readable_form(value)
        case list():
            return [_readable(item, key) for item in value]
        case _:
            return value


def _safe_beginning(text: str, limit: int) -> str:
    """Return the beginning of a text for the user, with hidden characters escaped."""
    left_out = len(text) - limit
    return safe(text) if left_out <= 0 else f"{safe(text[:limit])}… ({left_out:,} more characters)"


def parse_call_id(call_id: str) -> CallRef | None:
    """Parse a call's id; None if the text is not the id of a call."""
    match call_id.split("_"):
        case ["call", assistant, index] if assistant.isdecimal() and index.isdecimal():
            return CallRef(assistant=int(assistant), index=int(index))
        case _:
            return None

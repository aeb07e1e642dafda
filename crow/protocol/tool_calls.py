"""Converts tool calls into fields for clients.

Live updates, replays and permission requests use the same functions, so a call looks the same everywhere.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from crow.domain.diff import DiffHunk, changed_regions
from crow.domain.entries import Announcement, Attachment, Diff, ToolResult
from crow.domain.messages import is_too_deep
from crow.domain.rendering import in_title
from crow.domain.text import safe, title_line
from crow.protocol.sizes import PIECE_BYTES, TEXT_BYTES, cut, head_and_tail, json_bytes, limit_json
from crow.tools import PlannedCall

Fields: TypeAlias = dict[str, Any]

OUTPUT_BYTES = 100_000
"""The limit for `rawOutput` in bytes of JSON, and for a session's plan."""

_INPUT_BYTES = 150_000
_DIFF_BYTES = 400_000

_QUESTION_CHARS = 16_000
"""A permission request shows at most this many characters of a command, of a URL, or of a call's arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits for the parts of one call, in bytes of JSON."""

    text: int = TEXT_BYTES
    """The text of the result."""
    arguments: int = _INPUT_BYTES
    """The arguments, in `rawInput`."""
    raw_output: int = OUTPUT_BYTES
    """The structured output, in `rawOutput`."""
    diffs: int = _DIFF_BYTES
    """All diffs together."""
    attachments: int = PIECE_BYTES
    """All attachments together."""
    repeats_output: bool = True
    """Whether `rawOutput` repeats the text that is already in the call's content."""


STANDARD = CallLimits()
FULL = CallLimits(text=300_000, repeats_output=False)
"""The limits of a replay for a client that asked for whole results. They add up to less than the limit for a line."""

_LONG_RESULT_BYTES = 2_000
"""If each result of a replay is shortened to fewer bytes than this, the history is so long that the other parts of
calls are shortened even more."""


def short_limits(result_bytes: int) -> CallLimits:
    """Return the limits for a replay in which each stored result was shortened to about `result_bytes`.

    In the longest histories, the other parts of a call are shortened more than its result. Otherwise, tens of thousands
    of calls with long arguments or diffs would add up to twice the size that a replay may have.
    """
    others = 2 * result_bytes if result_bytes >= _LONG_RESULT_BYTES else result_bytes * result_bytes // 1_000
    return CallLimits(
        arguments=others,
        raw_output=others // 2,
        diffs=others,
        attachments=result_bytes,
        repeats_output=False,
    )


_TITLE_CHARS = 280
_NAME_CHARS = 200
_MAX_LOCATIONS = 40
_MAX_LINE = 2**32 - 1
"""ACP allows no larger line number. A model may ask for any line."""
_MAX_ATTACHMENTS = 40
_URI_CHARS = 2_000
_SUBJECTS = ("path", "pattern", "url", "query", "description")


def call_fields(
    call_id: str,
    announcement: Announcement,
    *,
    name: str = "",
    arguments: str | None = None,
    limits: CallLimits = STANDARD,
) -> Fields:
    """Return the fields with the id, title, kind and locations of a call. If `name` and `arguments` are given, also
    return fields with the call's name and input."""
    fields: Fields = {
        "toolCallId": call_id,
        "title": title_line(announcement.title, _TITLE_CHARS) or title_line(name) or "Tool call",
        "kind": announcement.kind,
        "locations": [
            {"path": location.path} | ({} if location.line is None else {"line": min(max(1, location.line), _MAX_LINE)})
            for location in announcement.locations[:_MAX_LOCATIONS]
            if is_plain(location.path)  # an escaped path would point to another file, or to none
        ],
    }
    if name:
        fields["name"] = title_line(name)
        fields["_meta"] = {"tool_name": fields["name"]}
    if arguments is not None:
        fields["rawInput"] = raw_input(arguments, limits.arguments)
    return fields


def raw_input(arguments: str, limit: int = _INPUT_BYTES) -> object:
    """Return the arguments as an object, with hidden characters escaped and long texts cut."""
    value = parsed_arguments(arguments)
    short = limit_json({"arguments": arguments} if value is None else value, limit)
    escaped = _escaped(short)
    return short if escaped == short else limit_json(escaped, limit)


def parsed_arguments(arguments: str) -> Fields | None:
    """Return the arguments as an object, or None if they are not a JSON object or are nested too deeply."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not is_too_deep(value) else None


def is_plain(text: str) -> bool:
    """Whether a text is one line without hidden characters."""
    return "\n" not in text and "\r" not in text and safe(text) == text


def _escaped(value: object) -> object:
    """Return a copy of a JSON value, with hidden characters escaped in its strings and keys."""
    match value:
        case str():
            return safe(value)
        case dict():
            return {safe(key): _escaped(item) for key, item in value.items()}
        case list():
            return [_escaped(item) for item in value]
        case _:
            return value


def announcement_from(name: str, arguments: str) -> Announcement:
    """Build an announcement for a call that was stored without one. The title is the call's command. If the call has
    no command, the title is the tool's name and main argument."""
    value = raw_input(arguments)
    texts = {key: item for key, item in value.items() if isinstance(item, str)} if isinstance(value, dict) else {}
    if texts.get("command"):
        return Announcement(title=in_title(title_line(texts["command"])), kind="execute")
    subject = next((texts[key] for key in _SUBJECTS if texts.get(key)), None)
    return Announcement(title=name if subject is None else f"{name} {in_title(subject)}")


def result_contents(result: ToolResult, limits: CallLimits = STANDARD) -> list[Fields]:
    """Return the content of a finished call. If the call succeeded and has diffs, the content is these diffs. Otherwise
    it is the text of the result, and then its images and attachments. The content of a command is its output and the
    diffs of the files that it changed."""
    diffs = diff_contents(result.announcement.diffs, limits.diffs) if result.announcement.diffs else []
    if diffs and result.announcement.kind != "execute" and not result.is_error:
        return diffs
    images = [Attachment(name="image", mime_type=image.mime_type, data=image.data) for image in result.images]
    room = limits.attachments
    contents = []
    for attachment in (*images, *result.attachments[:_MAX_ATTACHMENTS]):
        block = _attachment_block(attachment, room)
        room -= len(attachment.data) if "data" in block or "resource" in block else 0
        contents.append({"type": "content", "content": block})
    text = _result_text(result, limits.text)
    changed = diffs if result.announcement.kind == "execute" else []
    return [*([text_content(text)] if text else []), *contents, *changed]


def output_text(result: ToolResult) -> str:
    """Return the output of a command, if the tool returned the output separately. Otherwise return the text of the
    result that the model gets."""
    output = result.raw_output.get("output")
    return output if isinstance(output, str) and output else result.text


def raw_output(result: ToolResult, *, with_text: bool = True, limit: int = OUTPUT_BYTES) -> Fields:
    """Return the field `rawOutput`, or no field if it would be empty. With `with_text=False`, leave out the text,
    which the client already shows elsewhere."""
    value = {key: item for key, item in result.raw_output.items() if with_text or key != "output"}
    if result.announcement.kind == "execute" and with_text:
        value["output"] = output_text(result)
    return {"rawOutput": limit_json(value, limit)} if value else {}


def text_content(text: str) -> Fields:
    """Return a text as content of a tool call."""
    return {"type": "content", "content": {"type": "text", "text": text}}


def shown_text(text: str, limit: int = TEXT_BYTES) -> str:
    """Return a tool's text as it is shown to the client: hidden characters are escaped, and a long text is
    shortened."""
    return cut(text, limit, safe)[0]


def console_block(text: str, limit: int = TEXT_BYTES) -> str:
    """Return the output of a command as a Markdown code block."""
    return _fenced(shown_text(text, limit), "console")


def _fenced(text: str, language: str = "") -> str:
    """Return a text as a Markdown code block. The fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _result_text(result: ToolResult, limit: int) -> str:
    """Return the result's text for clients that render Markdown. If rendering could change the text, return it as a
    code block."""
    kind = result.announcement.kind
    text = output_text(result) if kind == "execute" else result.text
    if not text.strip():
        return ""
    if kind == "execute":
        return console_block(text, limit)
    text = shown_text(text, limit)
    if kind == "search" and not result.is_error:
        return _fenced(text)
    if kind == "read" and not result.is_error:
        # An indented text is a code block too. Some clients put a fence around a file, so a second fence could clash.
        return textwrap.indent(text, "    ")
    return text


_ACCESS_WORDS = {
    "read": "It is confined: it changes no files, and has no network.",
    "write": "It is confined: it may change files in the workspace, and has no network.",
    "write with network": "It is confined: it may change files in the workspace, and use the network.",
    "full": "It is not confined: it can do everything that you can.",
    "full because nothing confines": (
        "It is not confined, because commands cannot be confined here: it can do everything that you can."
    ),
}
"""The sentences in a permission request that tell the user what a command can do."""


def question_contents(
    plan: PlannedCall, name: str, arguments: str, *, has_network: bool, reason: str = "", changes: str = ""
) -> tuple[list[Fields], bool]:
    """Return the content of a permission request. Also return whether this content shows the whole call.

    `has_network` means that commands with the access `write` may use the network. `reason` says why crow asks.
    `changes` is a diff that explains the reason.
    """
    contents, hidden_changes = diff_view(plan.announcement.diffs)
    hidden = 0
    blocks: list[str] = []

    def add(text: str, language: str = "") -> None:
        nonlocal hidden
        part, left_out = head_and_tail(text, _QUESTION_CHARS)
        blocks.append(_fenced(safe(part), language))
        hidden += left_out

    match plan.access:
        case "execute" if plan.coverage.argument is not None:
            add(plan.coverage.argument, "sh")
        case "external" if plan.review_text:
            server = in_title(title_line(plan.coverage.argument or name))
            blocks.append(f"MCP server {server} sends this request to your model and gets the answer:")
            add(plan.review_text)
        case "external":
            inner = parsed_arguments(arguments)
            blocks.append(f"It calls {in_title(title_line(plan.coverage.rule_tool or name))} with:")
            add(arguments if inner is None else json.dumps(inner, ensure_ascii=False, indent=2), "json")
        case _ if plan.review_text:
            add(plan.review_text)
        case _ if title_line(plan.announcement.title, _TITLE_CHARS) != plan.announcement.title:
            add(plan.announcement.title)
    if changes:
        blocks.append(safe(reason))
        add(changes, "diff")
    if hidden:
        blocks.append(f"{hidden:,} characters are not shown.")
    if plan.changed:
        blocks.append("The command has run. It wants to keep these changes:")
        add(plan.review_text)
    elif plan.command_access is not None:
        blocks.append(_ACCESS_WORDS[_access_key(plan, has_network=has_network)])
    if reason and not changes:
        blocks.append(safe(reason))
    if blocks:
        contents.append(text_content("\n\n".join(blocks)))
    return contents, not hidden and not hidden_changes


def _access_key(plan: PlannedCall, *, has_network: bool) -> str:
    match plan.command_access:
        case "write" if has_network:
            return "write with network"
        case "full" if plan.requested_access not in (None, "full"):
            return "full because nothing confines"
        case access:
            return str(access)


def _attachment_block(attachment: Attachment, room: int) -> Fields:
    """Return an attachment as a content block. If the attachment's data takes more than `room` bytes, the block is a
    link or a note."""
    name, mime_type = title_line(attachment.name), title_line(attachment.mime_type or "", _NAME_CHARS)
    mime_field = {"mimeType": mime_type} if mime_type else {}
    uri = attachment.uri if _is_link(attachment.uri) else None
    if attachment.data and len(attachment.data) <= room:
        if mime_type.startswith(("audio/", "image/")):
            return {"type": mime_type[:5], "data": attachment.data, "mimeType": mime_type}
        if uri is not None:
            return {"type": "resource", "resource": {"uri": uri, "blob": attachment.data} | mime_field}
    if uri is not None:
        return {"type": "resource_link", "uri": uri, "name": name} | mime_field
    size = f"{len(attachment.data) * 3 // 4:,} bytes"
    return {"type": "text", "text": f"({name}, {mime_type or 'unknown type'}, {size}: not shown)"}


def _is_link(uri: str | None) -> bool:
    """Whether a client may offer to open the URI. This is the case if the URI is not too long, contains no hidden
    characters, and names a web page or a file on this machine."""
    if uri is None or len(uri) > _URI_CHARS or not is_plain(uri):
        return False
    return uri.lower().startswith(("https://", "http://", "file:///"))


def diff_contents(diffs: Iterable[Diff], limit: int = _DIFF_BYTES) -> list[Fields]:
    """Return the diffs as content of a tool call, with the whole texts of the files. If the texts take more than
    `limit` bytes, return only the changed regions, and a note that says so."""
    return diff_view(diffs, limit)[0]


def diff_view(diffs: Iterable[Diff], limit: int = _DIFF_BYTES) -> tuple[list[Fields], int]:
    """See `diff_contents`. Also return how many characters of the changed regions are not shown."""
    diffs = tuple(diffs)
    if sum(len(diff.old_text or "") + len(diff.new_text) for diff in diffs) <= limit:
        whole: list[Fields] = [DiffFields(diff, DiffHunk(1, 1, diff.old_text or "", diff.new_text)) for diff in diffs]
        if sum(map(json_bytes, whole)) <= limit + 1_000 * len(whole):
            return whole, 0
    contents, room, hidden = [], limit, 0
    for diff in diffs:
        regions = changed_regions(diff.old_text or "", diff.new_text)
        shown, left_out = _fitting_regions(diff, regions, room, limit)
        room -= sum(map(json_bytes, shown.values()))
        hidden += left_out
        contents += [shown[at] for at in sorted(shown)]
        size = len(diff.new_text.encode(errors="replace"))
        path = title_line(diff.path)
        note = f"{path} is large ({size:,} bytes); shown: {len(shown)} of {len(regions)} changed regions"
        lines = [str(regions[at].new_line) for at in sorted(shown)]
        where = f", from lines {', '.join(lines[:20])}" if lines else ""
        rest = f" {left_out:,} characters of the change are not shown." if left_out else ""
        contents.append(text_content(f"{note}{where}.{rest}"))
    return contents, hidden


def _fitting_regions(diff: Diff, regions: Sequence[DiffHunk], room: int, limit: int) -> tuple[dict[int, Fields], int]:
    """Choose which regions of a diff to show, alternately from the beginning and the end. The chosen regions take at
    most `room` bytes in total. `room` is the part of `limit` that is still free.

    Return the diffs of the chosen regions by their index, and the number of characters of `regions` that are not
    shown.
    """
    shown: dict[int, Fields] = {}
    left = room
    hidden = 0
    count = len(regions)
    for at in (index for pair in zip(range(count), reversed(range(count)), strict=True) for index in pair):
        if at in shown:
            continue
        region = regions[at]
        old_text, new_text = region.old_text, region.new_text
        is_large = len(old_text) + len(new_text) > left
        content = DiffFields(diff, replace(region, old_text="", new_text="") if is_large else region)
        if is_large or json_bytes(content) > left:
            if shown or left <= limit // 2:
                break
            # This region alone is too large, so its old text and its new text are cut.
            (old_text, old_hidden), (new_text, new_hidden) = (
                cut(text, left // 3, safe) for text in (old_text, new_text)
            )
            region = replace(region, old_text=old_text, new_text=new_text)
            content, hidden = DiffFields(diff, region, is_cut=True), old_hidden + new_hidden
        left -= json_bytes(content)
        shown[at] = content
    hidden += sum(len(one.old_text) + len(one.new_text) for at, one in enumerate(regions) if at not in shown)
    return shown, hidden


class DiffFields(dict[str, Any]):
    """A diff as content of a tool call, with more attributes for version 2 of the protocol.

    `old_line` and `new_line` are the line numbers in the file at which the old and the new text begin. `is_new` means
    that the file did not exist before. `is_cut` means that the texts are not complete.
    """

    __slots__ = ("is_cut", "is_new", "new_line", "old_line")

    def __init__(self, diff: Diff, region: DiffHunk, *, is_cut: bool = False) -> None:
        # Some clients show no diff without the key oldText, even for a new file.
        texts = {"oldText": safe(region.old_text), "newText": safe(region.new_text)}
        super().__init__({"type": "diff", "path": safe(diff.path)} | texts)
        self.old_line, self.new_line = region.old_line, region.new_line
        self.is_new = diff.old_text is None
        self.is_cut = is_cut

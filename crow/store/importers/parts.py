"""Converts ids, tool calls, images and links of other tools to those of crow."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from crow.domain.entries import Announcement, CallKind, Diff, Location
from crow.domain.messages import Image, Link, Part, Text, ToolCall
from crow.domain.rendering import in_title
from crow.domain.text import first_line as first_line_of
from crow.domain.text import on_one_line, shorten
from crow.store.codec import mend
from crow.store.importers.files import Damaged, as_object, objects, parse
from crow.store.importers.files import text as as_text

_ID_CHARS = 64
_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_TOOL_NAME = re.compile(r"[^A-Za-z0-9_-]")
_IMAGE = re.compile(r"data:(image/[\w.+-]{1,40});base64,", re.ASCII)


def stable_id(tool: str, *parts: str) -> str:
    """Return the id of an imported session. The same session always gets the same id. Crow never gives an id of this
    form to a new session."""
    name = "-".join(parts)
    if not _PLAIN_ID.fullmatch(name):
        name = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{tool}-{name}"


def short_line(text: str, most: int, *, first_line: bool = False) -> str:
    """Return `text` on one line without control characters, cut to `most` characters."""
    if first_line:
        text = first_line_of(text)
    return shorten(on_one_line(mend(text[: 16 * most])), most)


def tool_call(call_id: str, name: str, arguments: Any) -> ToolCall:
    """Return a call that every endpoint accepts. It has a valid id, a valid name, and a JSON object as arguments."""
    if not _PLAIN_ID.fullmatch(call_id):
        call_id = f"call_{hashlib.sha256(call_id.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}" if call_id else ""
    name = _TOOL_NAME.sub("_", name)[:_ID_CHARS] or "unknown"
    value = _arguments_of(arguments)
    return ToolCall(id=call_id, name=name, arguments=mend(json.dumps(value, ensure_ascii=False)))


def _arguments_of(arguments: Any) -> Mapping[str, Any]:
    """Return the arguments of a call as an object. Text that is not a JSON object becomes the member `input` of a new
    object."""
    if isinstance(arguments, str):
        try:
            value = parse(arguments) if arguments.strip() else {}
        except Damaged:
            value = None
        arguments = arguments if not isinstance(value, dict) else value
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {"input": arguments}


_TOOLS: Mapping[CallKind, str] = {
    "execute": (
        "bash shell exec exec_command local_shell shell_command unified_exec container_exec write_stdin "
        "developer__shell execute_command terminal run_command powershell"
    ),
    "read": "read read_file view cat notebookread view_image load_file",
    "edit": (
        "edit write multiedit apply_patch patch notebookedit write_file edit_file str_replace text_editor "
        "developer__text_editor str_replace_editor"
    ),
    "search": "grep glob ls list find search codesearch list_dir grep_files toolsearch analyze",
    "fetch": "webfetch websearch web_search web_fetch fetch",
    "think": "think todowrite todoread todo_write update_plan task agent",
}
"""The names of other agents' tools, in small letters."""
_KIND_OF: Mapping[str, CallKind] = {name: kind for kind, names in _TOOLS.items() for name in names.split()}
_PATHS = ("file_path", "filePath", "path", "notebook_path", "filename")
"""The arguments that name a call's file, best first."""
_SUBJECTS = ("command", "cmd", "pattern", "query", "url", "description", "prompt")
"""The arguments that describe a call without a file, best first."""


def announce(name: str, arguments: Any, cwd: str) -> Announcement:
    """Return the announcement that shows an imported call to the user. The announcement's title has the path or command
    of the call. If the call's arguments contain a change of a file, the announcement has a diff."""
    values = _arguments_of(arguments)
    kind = _KIND_OF.get(name.lower(), "other")
    path = next((found for key in _PATHS if isinstance(found := values.get(key), str) and found), "")
    subject = path
    subjects: Sequence[str] = () if path else _SUBJECTS
    for key in subjects:
        found = values.get(key)
        if isinstance(found, list):
            found = " ".join(word for word in found if isinstance(word, str))
        if isinstance(found, str) and found.strip():
            subject = found
            break
    subject = short_line(subject, 160, first_line=True)
    name = short_line(name, _ID_CHARS) or "unknown"
    title = f"{name} {in_title(subject)}" if subject else name
    if not path:
        return Announcement(title=title, kind=kind)
    full = mend(path if path.startswith("/") else f"{cwd.rstrip('/')}/{path}")
    return Announcement(
        title=title, kind=kind, locations=(Location(path=full),), diffs=_diffs(values, full) if kind == "edit" else ()
    )


def _diffs(values: Mapping[str, Any], path: str) -> tuple[Diff, ...]:
    """Return the changes of a file that the arguments of an edit describe. The tools of different agents use different
    names for these arguments."""
    found = []
    for edit in (values, *objects(values.get("edits"))):
        for old_key, new_key in (("old_string", "new_string"), ("oldString", "newString"), ("oldText", "newText")):
            old, new = edit.get(old_key), edit.get(new_key)
            if isinstance(old, str) and isinstance(new, str):
                found.append(Diff(path=path, old_text=old, new_text=new))
    content = values.get("content", values.get("file_text"))
    if not found and isinstance(content, str):
        found.append(Diff(path=path, old_text=None, new_text=content))
    return tuple(found)


def parts_of(content: Any) -> list[Part]:
    """Return the parts of a message or result. `content`, as any of the tools stores it, is a text or a list of
    objects. Blank texts, and objects of unknown types, are left out."""
    found: list[Part | None] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else objects(content):
        match part.get("type"):
            case "text" | "input_text" | "output_text":
                found.append(Text(text=as_text(part.get("text"))))
            case "refusal":
                found.append(Text(text=as_text(part.get("refusal"))))
            case "resource":
                found.append(Text(text=as_text(as_object(part.get("resource")).get("text"))))
            case "image":
                source = as_object(part.get("source")) or part
                mime_type = source.get("media_type", source.get("mimeType"))
                found.append(linked_part(source.get("url")) or _image_of(source.get("data"), mime_type))
            case "image_url" | "input_image":
                url = part.get("image_url")
                found.append(linked_part(as_object(url).get("url", url)))
            case "tool_reference":
                found.append(Text(text=f"[Tool {as_text(part.get('tool_name'))}]"))
            case "document" | "file" | "input_audio":
                found.append(Text(text="[A file that was attached here was not imported.]"))
    return [part for part in found if part is not None and not (isinstance(part, Text) and not part.text.strip())]


def words_of(parts: Sequence[Part]) -> str:
    """Return the texts of a message, each beginning on a new line."""
    return "\n".join(part.text for part in parts if isinstance(part, Text))


def _image_of(data: Any, mime_type: Any) -> Part | None:
    """Return an image from its base64 text, or None if `data` or `mime_type` is not valid."""
    if not isinstance(data, str) or not isinstance(mime_type, str):
        return None
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return Image(data=data, mime_type=mime_type) if re.fullmatch(r"image/[\w.+-]{1,40}", mime_type, re.ASCII) else None


def linked_part(url: Any, name: Any = None) -> Part | None:
    """Return the part for a URL in a message. A `data:` URL becomes an image if it contains one, and a text otherwise.
    All other URLs become links. Return None if `url` is not a URL or its image is not valid."""
    if not isinstance(url, str) or not url:
        return None
    if match := _IMAGE.match(url):
        return _image_of(url[match.end() :], match[1])
    if url.startswith("data:"):
        return Text(text=f"[A file that was attached here, {short_line(url[5:60], 40)}, was not imported.]")
    label = short_line(name if isinstance(name, str) else "", 200)
    with suppress(ValueError):
        label = label or short_line(unquote(urlsplit(url).path.rpartition("/")[2]), 200)
    return Link(uri=mend(url[:4096]), name=label or "file")

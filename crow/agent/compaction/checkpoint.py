"""Selects what a checkpoint keeps (pinned messages, skills and files), and orders tool outputs for masking.

No model is involved. Each checkpoint takes over what the previous one kept, so it does not matter how often a
conversation is compacted. The files are taken from the arguments of the built-in file tools and from the announcements
of calls, never from a summary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crow.domain.conversation import skill_in
from crow.domain.entries import (
    Assistant,
    CallRef,
    Checkpoint,
    Entry,
    File,
    KeptSkill,
    Pin,
    Restore,
    Skill,
    ToolResult,
    User,
)
from crow.domain.rendering import parts_text, user_parts
from crow.domain.tokens import estimate_text, fit

READ_TOOL = "read_file"
_PART = re.compile(r"\[lines ([0-9]+)-[0-9]+ of ")
"""Matches the beginning of a result of `read_file` that does not contain the whole file."""
_CONTINUE, _CONTINUE_CHARS = "[continue with line=", 200
"""If a file has more lines than one call can return, the last `_CONTINUE_CHARS` characters of the result contain
`_CONTINUE`."""
_WRITE_TOOLS = frozenset({"write_file", "edit_file", "apply_patch"})
_REWRITE_TOOL = "write_file"
"""The tool whose arguments contain the whole new file."""

FRAME_TOKENS = 14
"""The lines that enclose a pinned message or a skill take this many tokens."""

_MIN_EXCERPT = 64
"""An excerpt with fewer tokens than this is useless."""

_PATH_WORD = re.compile(r"[^\s\"'`()<>\[\]{}|,;:=]+")
"""Matches a path in a text, without spaces."""

_MAX_NAME_PARTS = 8
"""The shorter names of a file are made from at most this many parts at the end of its path."""

_SKILL_TOOL = "skill"
_MAX_SKILLS = 12
"""A checkpoint keeps at most this many skills. Only the summary can mention older skills."""


def select_pins(previous: Checkpoint | None, covered: Iterable[Entry], budget: int) -> tuple[Pin, ...]:
    """Return the user messages from `previous` and `covered` that the checkpoint keeps, oldest first. Together, they
    have at most `budget` estimated tokens.

    The first and the last message are always kept, and as many of the newest other messages as fit. One message may
    fill at most half of the budget, and a longer message is cut. A message that does not fit into the rest of the
    budget gets half of that rest, so that a huge message does not displace all earlier ones.
    """
    known = {pin.entry: pin for pin in (previous.pins if previous else ())}
    for entry in covered:
        if isinstance(entry.body, User):
            known[entry.id] = Pin(entry=entry.id, text=parts_text(user_parts(entry.body, entry.id)))
    pins = [known[entry] for entry in sorted(known)]
    if not pins:
        return ()
    half = budget // 2 - FRAME_TOKENS
    chosen = {pin.entry: _shorten_pin(pin, half) for pin in (pins[0], pins[-1])}
    left = budget - sum(map(_size, chosen.values()))
    for pin in reversed(pins[1:-1]):
        kept = _shorten_pin(pin, half)
        if _size(kept) > left:
            kept = _shorten_pin(pin, max(_MIN_EXCERPT, left // 2 - FRAME_TOKENS))
        if _size(kept) > left:
            break
        chosen[pin.entry] = kept
        left -= _size(kept)
    return tuple(chosen[entry] for entry in sorted(chosen))


def _size(pin: Pin) -> int:
    return FRAME_TOKENS + estimate_text(pin.text)


def _shorten_pin(pin: Pin, tokens: int) -> Pin:
    return replace(pin, text=fit(pin.text, tokens, pin.entry))


def select_skills(previous: Checkpoint | None, covered: Iterable[Entry], budget: int) -> tuple[KeptSkill, ...]:
    """Return the skills from `previous` and `covered` that the checkpoint keeps, oldest first and without duplicates.

    The newest skills are kept whole, as far as `budget` estimated tokens allow. The next older skill is cut, and all
    older ones are kept by name only.
    """
    known = {skill.name: skill for skill in (previous.skills if previous else ())}
    for entry in covered:
        match entry.body:
            case Restore(skill=unloaded) if unloaded:
                known = {name: skill for name, skill in known.items() if skill_in(name) != unloaded}
                continue
            case Skill(name=name, text=text):
                skill = KeptSkill(entry=entry.id, name=name, text=text)
            case ToolResult(name=tool, text=text, is_error=False, announcement=announcement) if tool == _SKILL_TOOL:
                skill = KeptSkill(entry=entry.id, name=announcement.title, text=text)
            case _:
                continue
        known.pop(skill.name, None)
        known[skill.name] = skill
    kept: list[KeptSkill] = []
    left = budget
    for skill in reversed(list(known.values())[-_MAX_SKILLS:]):
        room = left - FRAME_TOKENS
        text = fit(skill.text, room, skill.entry) if skill.text and room >= _MIN_EXCERPT else ""
        kept.append(replace(skill, text=text))
        left -= FRAME_TOKENS + estimate_text(text)
    return tuple(reversed(kept))


def files_touched(previous: Checkpoint | None, entries: Sequence[Entry]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two lists for the whole history: files that were only read, and files that were modified. In each list,
    the most recently touched file comes last."""
    read = dict.fromkeys(previous.files_read if previous else ())
    modified = dict.fromkeys(previous.files_modified if previous else ())
    arguments = call_arguments(entries)
    for entry in entries:
        body = entry.body
        if isinstance(body, File):
            if not body.change_set:  # otherwise the path is a directory; the result of the command names the files
                _move_to_end(modified, (body.path,))
        elif isinstance(body, ToolResult):
            _move_to_end(modified, files_changed(body, arguments.get(body.call, "{}")))
            _move_to_end(read, _files_read(body, arguments.get(body.call, "{}")))
    return tuple(path for path in read if path not in modified), tuple(modified)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInUse:
    """A file that the model works with."""

    path: str
    tokens: int
    """The estimated size of the file's text as the model last saw it."""
    entry: int | None
    """The id of the entry of the tool result with this text, or None if a checkpoint shows the text."""


def files_in_use(previous: Checkpoint | None, entries: Sequence[Entry]) -> tuple[FileInUse, ...]:
    """Return the files that the model has read as a whole, most important first. Files that the model has read, changed
    or named since `previous` come first, starting with the most recent one. The other files that `previous` shows come
    after them.

    As long as the model sees the text of a file, it does not read the file again. Then the only sign that it still uses
    the file is that its answers or calls name it.
    """
    touched = dict.fromkeys(file.path for file in reversed(previous.files_shown if previous else ()))
    seen = {
        file.path: FileInUse(path=file.path, tokens=estimate_text(file.text), entry=None)
        for file in (previous.files_shown if previous else ())
    }
    names: dict[str, str] = {}
    _add_names(names, seen)
    arguments_of = call_arguments(entries)
    for entry in entries:
        if isinstance(entry.body, Assistant):
            for text in (entry.body.text, *(call.arguments for call in entry.body.calls)):
                _move_to_end(touched, _files_named(text, names))
        elif isinstance(entry.body, ToolResult):
            arguments = arguments_of.get(entry.body.call, "{}")
            read = _files_read(entry.body, arguments)
            _move_to_end(touched, (*read, *files_changed(entry.body, arguments)))
            if _reads_whole_file(entry.body, arguments):
                tokens = estimate_text(entry.body.text)
                _add_names(names, read)
                seen |= {path: FileInUse(path=path, tokens=tokens, entry=entry.id) for path in read}
    return tuple(seen[path] for path in reversed(touched) if path in seen)


def _add_names(names: dict[str, str], paths: Iterable[str]) -> None:
    """Add to `names` every name by which a text may refer to one of the files at `paths`, with the path of that file.
    The names of a file are its path and each suffix of the path that begins after a slash. A suffix must contain a
    slash or a dot, so that no ordinary word counts as a name. A name that several files share gets an empty path."""
    for path in paths:
        parts = path.replace("\\", "/").split("/")[-_MAX_NAME_PARTS:]
        ends = ("/".join(parts[at:]) for at in range(1, len(parts)))
        for name in (path, *(end for end in ends if "/" in end or "." in end.strip("."))):
            if names.setdefault(name, path) != path:
                names[name] = ""


def _files_named(text: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths of the files that a text names, in order."""
    words = (word.replace("\\", "/").strip(".") for word in _PATH_WORD.findall(text)) if names else ()
    return tuple(path for word in words if (path := names.get(word) or names.get(word.lstrip("/"))))


def reads_in_use(previous: Checkpoint | None, entries: Sequence[Entry], budget: int) -> frozenset[int]:
    """Choose the results that show the files in use, the most important file first, until they total about `budget`
    estimated tokens. Return their ids."""
    kept: set[int] = set()
    for file in files_in_use(previous, entries):
        budget -= file.tokens
        if budget < 0:
            break
        if file.entry is not None:
            kept.add(file.entry)
    return frozenset(kept)


def _move_to_end(files: dict[str, None], paths: Iterable[str]) -> None:
    for path in paths:
        files.pop(path, None)
        files[path] = None


def masking_order(entries: Sequence[Entry]) -> tuple[int, ...]:
    """Return the ids of the tool results among `entries` in the order in which to hide them. `entries` are sorted
    oldest first.

    Superseded results come first. A result is superseded if a later result has the same call or the same output. A
    result that shows a file is also superseded if a later call read or wrote the whole file. Outputs other than file
    contents come next. The remaining file contents come last, sorted by when each file was last touched.
    """
    arguments_of = call_arguments(entries)
    later: set[tuple[str, str, str]] = set()
    whole: set[str] = set()
    touched: dict[str, int] = {}
    ranked: list[tuple[int, int, int]] = []
    for entry in reversed(entries):
        result = entry.body
        if not isinstance(result, ToolResult):
            continue
        arguments = arguments_of.get(result.call, "{}")
        read, changed = _files_read(result, arguments), files_changed(result, arguments)
        for path in (*read, *changed):
            touched.setdefault(path, entry.id)
        same = {(result.name, "call", arguments), (result.name, "output", result.text)}
        if same & later or (read and whole.issuperset(read)):
            ranked.append((0, entry.id, entry.id))
        elif read:
            ranked.append((2, max(touched[path] for path in read), entry.id))
        else:
            ranked.append((1, entry.id, entry.id))
        if result.name != READ_TOOL or read:  # a failed read supersedes nothing
            later |= same
        if read and _reads_whole_file(result, arguments):
            whole.update(read)
        elif result.name == _REWRITE_TOOL:
            whole.update(changed)
    return tuple(entry for _, _, entry in sorted(ranked))


def call_arguments(entries: Iterable[Entry]) -> dict[CallRef, str]:
    """Return the arguments (JSON) of all calls."""
    return {
        CallRef(assistant=entry.id, index=index): call.arguments
        for entry in entries
        if isinstance(entry.body, Assistant)
        for index, call in enumerate(entry.body.calls)
    }


def files_changed(result: ToolResult, arguments: str) -> tuple[str, ...]:
    """Return the files that a call changed. A failed call changed only the files for which it shows a diff."""
    diffs = tuple(diff.path for diff in result.announcement.diffs)
    if diffs or result.is_error:
        return diffs
    if result.name in _WRITE_TOOLS:
        return _locations(result) or _path_argument(arguments)
    return _locations(result) if result.announcement.kind in ("edit", "delete", "move") else ()


def _files_read(result: ToolResult, arguments: str) -> tuple[str, ...]:
    if result.is_error or result.name != READ_TOOL:
        return ()
    return _locations(result) or _path_argument(arguments)


def _reads_whole_file(result: ToolResult, arguments: str) -> bool:
    """Return whether a call of `read_file` read a file without a limit, from its first line. Lines may also be asked
    for in the path, such as `a.py:20-40`. Then only the text of the result says that it is a part of the file."""
    fields = _parsed(arguments)
    part = _PART.match(result.text)
    is_asked = part is not None and (part[1] != "1" or _CONTINUE not in result.text[-_CONTINUE_CHARS:])
    return not is_asked and fields is not None and fields.get("line") in (None, 1) and fields.get("limit") is None


def _locations(result: ToolResult) -> tuple[str, ...]:
    return tuple(location.path for location in result.announcement.locations)


def _path_argument(arguments: str) -> tuple[str, ...]:
    path = (_parsed(arguments) or {}).get("path")
    return (path,) if isinstance(path, str) and path else ()


def _parsed(arguments: str) -> dict[str, object] | None:
    """Return a call's arguments, or None if they are not a JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

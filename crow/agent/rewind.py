"""Files put back as they were before the built-in tools changed them.

What was changed on a piece of a path is in its file entries: what each file held before, and a hash of what the tool
wrote. A file is put back to what it held first, and only if it now holds what crow last left in it and nobody changed
it between two of crow's edits. Entries that an import brought are never put back: a file made by others could have any
content written anywhere. Putting back is announced and stored like any other edit, former content first, so that it
can be taken back in its turn. Version control is never touched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import anyio

from crow.agent import Client, PermissionQuestion, new_message_id
from crow.agent.branch import Branch
from crow.domain.entries import (
    Announcement,
    CallRef,
    Diff,
    Entry,
    File,
    Location,
    NewEntry,
    Remark,
    Started,
    ToolResult,
)
from crow.domain.events import CallAnnounced, CallEnded
from crow.tools import PlannedCall, Workspace

__all__ = ["RestorableFile", "RestoreResult", "look_at", "offer_to_put_back"]

NAME = "put_back_files"
ABSENT = ""
CANCEL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorableFile:
    """A changed file: what it holds now and what it held `then` (None: it did not exist).

    `fault`: why it cannot be put back, as words that go after its name; empty if it can.
    """

    path: Path
    name: str
    now: bytes | None = None
    then: bytes | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """How it went. `left` are the files that still hold what was changed; `dismissed`: the user cancelled the turn."""

    left: tuple[str, ...] = ()
    dismissed: bool = False


async def look_at(workspace: Workspace, changes: Sequence[Entry]) -> tuple[RestorableFile, ...]:
    """The changed files of `changes` (file entries, oldest first, and results of their calls) that are not as they
    were."""
    by_path: dict[str, list[File]] = {}
    results: dict[CallRef, ToolResult] = {}
    for entry in changes:
        match entry.body:
            case File(path=path) as file:
                by_path.setdefault(path, []).append(file)
            case ToolResult(call=call) as result:
                results[call] = result
            case _:
                pass
    found = [await look_at_one(workspace, path, files, results) for path, files in by_path.items()]
    return tuple(former for former in found if former.fault or former.now != former.then)


async def offer_to_put_back(
    branch: Branch, client: Client, workspace: Workspace, files: Sequence[RestorableFile], *, command: Entry, asks: bool
) -> RestoreResult:
    """Announce it, ask if `asks`, do it, store what was done. `command` is the entry that it belongs to.

    :raises ~crow.domain.errors.StoreError: it could not be stored; a file is never changed before that.
    """
    ready = [former for former in files if not former.fault]
    left = [former.name for former in files if former.fault]
    refused = [f"Not put back: {former.name} {former.fault}." for former in files if former.fault]
    if not ready:
        remark = Remark(text="\n".join(refused), message_id=new_message_id())
        await branch.record([NewEntry(body=remark)])
        return RestoreResult(left=tuple(left))
    call = CallRef(assistant=command.id, index=0)
    announcement = announced(ready)
    arguments = json.dumps({"paths": [str(former.path) for former in ready]}, ensure_ascii=False)
    is_open = True
    try:
        await branch.publish(CallAnnounced(call=call, name=NAME, arguments=arguments, announcement=announcement))
        answer = "allow_once"
        if asks:
            offer = PlannedCall(announcement=announcement, access="write")
            question = PermissionQuestion(call=call, name=NAME, arguments=arguments, offer=offer, always="")
            answer = await client.ask(question)
        if answer == "cancelled":
            return RestoreResult(left=tuple(former.name for former in files), dismissed=True)
        if answer == "allow_once":
            why = "the user agreed" if asks else "the user asked for it"
            await branch.record([NewEntry(body=Started(call=call, why=why, announcement=announcement))])
            faults = await put_back(branch, workspace, ready, call)
            left += [former.name for former in ready if faults[former.path]]
            result, untold = result_of(call, announcement, ready, faults, refused)
        else:
            left += [former.name for former in ready]
            shown = replace(announcement, title=f"Left as before: {names_of(ready)}", diffs=())
            text = "\n".join([*(f"Kept as it is: {former.name}." for former in ready), *refused])
            result, untold = ToolResult(call=call, name=NAME, text=text, announcement=shown), ""
        remarks = [NewEntry(body=Remark(text=untold, message_id=new_message_id()))] if untold else []
        await branch.record([NewEntry(body=result), *remarks])
        is_open = False
        return RestoreResult(left=tuple(left))
    finally:
        if is_open:
            with anyio.move_on_after(CANCEL_S, shield=True):
                await branch.publish(CallEnded(call=call, text="Nothing more was put back."))


async def put_back(
    branch: Branch, workspace: Workspace, files: Sequence[RestorableFile], call: CallRef
) -> dict[Path, str]:
    """Each in its turn: what it holds now is stored, then it is written. The fault of each, empty for what went well.

    Looked at again first: the user may have thought for long, and worked meanwhile.
    """
    faults: dict[Path, str] = {}
    for former in files:
        faults[former.path] = ""
        try:
            if workspace.resolve(str(former.path)) != former.path or await held(workspace, former.path) != former.now:
                faults[former.path] = "was changed by others just now"
                continue
            after = ABSENT if former.then is None else digest(former.then)
            file = File(call=call, path=str(former.path), before=former.now, after_hash=after, recorded_here=True)
            await branch.record([NewEntry(body=file)])
            await workspace.put_back(former.path, former.then)
        except OSError as error:
            faults[former.path] = f"cannot be written ({error.strerror or error})"
    return faults


def result_of(
    call: CallRef,
    announcement: Announcement,
    files: Sequence[RestorableFile],
    faults: Mapping[Path, str],
    refused: Sequence[str],
) -> tuple[ToolResult, str]:
    """What was done and what was not, with the diffs of what was done alone; and what those do not tell, as a client
    shows them in the place of the text."""
    done = [former for former in files if not faults[former.path]]
    lines = {
        former.path: f"{'Removed again' if former.then is None else 'Put back'}: {former.name}." for former in done
    }
    failed = [f"Not put back: {former.name} {faults[former.path]}." for former in files if faults[former.path]]
    shown = tuple(diffs(done))
    result = ToolResult(
        call=call,
        name=NAME,
        text="\n".join([*lines.values(), *failed, *refused]),
        is_error=not done,
        announcement=replace(announcement, diffs=shown),
    )
    if not shown:
        return result, ""
    without_diff = set(lines) - {Path(diff.path) for diff in shown}
    return result, "\n".join([*(line for path, line in lines.items() if path in without_diff), *failed, *refused])


async def look_at_one(
    workspace: Workspace, path: str, files: Sequence[File], results: Mapping[CallRef, ToolResult]
) -> RestorableFile:
    former = RestorableFile(path=Path(path), name=name_of(workspace, path))
    files = [file for file in files if file.recorded_here]
    if not files:
        return faulty(former, "was changed before this session was imported")
    former = replace(former, then=files[0].before)
    if workspace.resolve(path) != former.path:
        return faulty(former, "is a link to somewhere else now")
    for earlier, later in pairwise(files):
        # what was put back here was another branch's before that, and found to be crow's own then
        came_from_elsewhere = later.call in results and results[later.call].name == NAME
        if not came_from_elsewhere and digest(later.before) not in states(earlier, results):
            return faulty(former, "was changed by others between two of the edits")
    try:
        now = await held(workspace, former.path)
    except OSError as error:
        return faulty(former, f"cannot be read ({error.strerror or error})")
    if now != former.then and digest(now) not in states(files[-1], results):
        return faulty(former, "was removed since" if now is None else "was changed since by others")
    return RestorableFile(path=former.path, name=former.name, now=now, then=former.then)


async def held(workspace: Workspace, path: Path) -> bytes | None:
    """What the file holds as its user sees it. :raises OSError: it cannot be read, or is no file."""
    kind = (await workspace.stat(path)).kind
    if kind == "missing":
        return None
    if kind != "file":
        raise OSError(f"it is {'a directory' if kind == 'directory' else 'no file'} now")
    saved = await workspace.read_bytes(path)
    try:
        saved.decode()
    except UnicodeDecodeError:
        return saved
    return (await workspace.read_text(path)).encode(errors="replace")


def states(file: File, results: Mapping[CallRef, ToolResult]) -> set[str]:
    """Digests of what the file may hold after this change: what was written or, had that failed, what was before; and
    what the result says was there afterwards, as an editor may format on saving."""
    diffs = results[file.call].announcement.diffs if file.call in results else ()
    return {file.after_hash, digest(file.before), *(digest(diff.new_text) for diff in diffs)}


def digest(content: bytes | str | None) -> str:
    """The sha256 (hex); `ABSENT` for what does not exist."""
    if content is None:
        return ABSENT
    return hashlib.sha256(content.encode(errors="replace") if isinstance(content, str) else content).hexdigest()


def faulty(former: RestorableFile, fault: str) -> RestorableFile:
    return RestorableFile(path=former.path, name=former.name, fault=fault)


def name_of(workspace: Workspace, path: str) -> str:
    """As the user would call it: below the working directory if it is there."""
    root = workspace.resolve(str(workspace.cwd))
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def announced(files: Sequence[RestorableFile]) -> Announcement:
    """How it is shown before it is done: a diff of each file that is text."""
    return Announcement(
        title=f"Put back as before: {names_of(files)}",
        kind="edit",
        locations=tuple(Location(path=str(former.path)) for former in files),
        diffs=tuple(diffs(files)),
    )


def names_of(files: Sequence[RestorableFile]) -> str:
    return ", ".join(former.name for former in files[:3]) + (", …" if len(files) > 3 else "")


def diffs(files: Iterable[RestorableFile]) -> Iterable[Diff]:
    for former in files:
        try:
            now = None if former.now is None else former.now.decode()
            then = "" if former.then is None else former.then.decode()
        except UnicodeDecodeError:
            continue
        yield Diff(path=str(former.path), old_text=now, new_text=then)

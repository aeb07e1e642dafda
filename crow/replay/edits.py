"""Makes the edits of a session again with today's file tools, in a scratch directory with the files as they were
before."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import anyio.to_thread

from crow.domain.entries import Assistant, CallRef, File, Prompt, ToolResult
from crow.domain.messages import ToolCall
from crow.domain.text import shorten
from crow.replay.requests import Outcome, Replayed
from crow.store import Store
from crow.store.branches import own_entries
from crow.tools import Ports, Toolbox
from crow.tools.no_session import NoSession, ignore_output

_TOOLS = ("apply_patch", "edit_file", "write_file")

OpenTools = Callable[[Path, Ports], AbstractAsyncContextManager[Toolbox]]
"""Opens the built-in tools for a directory, which they cannot leave."""


async def replayed_edits(store: Store, session_id: str, open_tools: OpenTools) -> AsyncIterator[Replayed]:
    """Make each successful edit on all branches of a session again, and compare the files that the edit writes with the
    log."""
    cwd, calls, files = "", dict[CallRef, ToolCall](), dict[CallRef, dict[str, File]]()
    async for entry in own_entries(store, session_id):
        match entry.body:
            case Prompt(cwd=place):
                cwd = place
            case Assistant(calls=made):
                calls = {CallRef(assistant=entry.id, index=index): call for index, call in enumerate(made)}
                files = {}
            case File(change_set="", recorded_here=True) as file:
                # Keep the first record, which is the tool's own: a hook may change the file again.
                files.setdefault(file.call, {}).setdefault(file.path, file)
            case ToolResult(call=ref, name=name, is_error=False) if name in _TOOLS and ref in calls and ref in files:
                outcome, words = await _compare(calls[ref], ref, files[ref], cwd, open_tools)
                yield Replayed(
                    session=entry.session, entry=entry.id, turn=entry.turn, outcome=outcome, tool=name, words=words
                )
            case _:
                pass


async def _compare(
    call: ToolCall, ref: CallRef, files: dict[str, File], cwd: str, open_tools: OpenTools
) -> tuple[Outcome, str]:
    """Make an edit again. Return the outcome, and why it is not identical."""
    inside = {_below(cwd, path): file for path, file in files.items()}
    if "" in inside:
        return "unproven", "it changed a file outside of the working directory"
    with tempfile.TemporaryDirectory(prefix="crow-replay-") as name:
        root = await anyio.to_thread.run_sync(_write_files, name, inside, cwd)
        moved = replace(call, arguments=call.arguments.replace(_quoted(f"{cwd}/"), _quoted(f"{root}/")))
        async with open_tools(Path(root), Ports(log=NoSession(), plan=NoSession(), in_context=None)) as tools:
            moved = tools.understood(moved)
            planned = await tools.plan(moved)
            if not planned.fault and {_below(root, path) for path in planned.paths} != inside.keys():
                return "unproven", "its path led to another file"
            result = None if planned.fault else await tools.run(moved, ref.call_id, ignore_output, planned=planned)
        if result is None or result.is_error:
            said = planned.fault or (result.text if result else "")
            return "different", f"today it fails: {shorten(said.replace(root, cwd), 200)}"
        for path, file in inside.items():
            if await anyio.to_thread.run_sync(_digest, root, path, cwd) != file.after_hash:
                return "different", f"today it writes something else to {path}"
    return "identical", ""


def _write_files(folder: str, files: dict[str, File], cwd: str) -> str:
    """Write the files as they were before the edit, and return the real path of the folder."""
    root = Path(folder).resolve()
    for path, file in files.items():
        if file.before is not None:
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.before.replace(os.fsencode(cwd), os.fsencode(root)))
    return str(root)


def _digest(root: str, path: str, cwd: str) -> str:
    """Return the digest of the file that was written, as in `File.after_hash`, or an empty string if there is no such
    file."""
    written = Path(root, path)
    if not written.is_file():
        return ""
    return hashlib.sha256(written.read_bytes().replace(os.fsencode(root), os.fsencode(cwd))).hexdigest()


def _below(folder: str, path: str) -> str:
    """Return `path` relative to `folder`, or an empty string if it is not below that folder."""
    return path[len(folder) + 1 :] if path.startswith(f"{folder}/") and ".." not in Path(path).parts else ""


def _quoted(path: str) -> str:
    """Return a path as it is written inside a JSON string."""
    return json.dumps(path, ensure_ascii=False)[1:-1]

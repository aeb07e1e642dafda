"""Tests how undo takes back what commands changed in layers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel

from crow.agent.history.restore import Restore
from crow.agent.history.rewind import RestoreResult
from crow.domain.entries import CallRef, Command, Entry, File, NewEntry, ToolResult
from crow.domain.events import CallEnded, Event
from crow.tools.layers import Layer, LookRules, Place, apply, look, prepare
from crow.tools.layers.session import Layers
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker, Opened, opened
from tests.support.scripted_model import ScriptedModel


class BusyEditor(NoteTaker):
    """Lets other tasks run before it takes an event, as a connection does."""

    async def publish(self, event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        await super().publish(event)


async def no_layer() -> Layer | None:
    return None


@asynccontextmanager
async def changed(directory: Path, name: str) -> AsyncIterator[tuple[Opened, Restore, list[Entry], Path]]:
    """A session in which a command has changed the file `name`, and what undoes the change."""
    root, place = directory / "tree", Place(directory / "data")
    file = root / name
    file.parent.mkdir(parents=True)
    file.write_text("old\n")
    layer = place.open([root])
    copy = layer.overlays[0].upper / name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text("new\n")
    change_set = prepare(place, layer, look(layer))
    apply(change_set)
    layer.drop()
    async with opened(directory, ScriptedModel(), client=BusyEditor()) as run:
        branch, workspace = run.session.branch, DiskWorkspace(root)
        workspace.layers = Layers(place, no_layer, lambda _: LookRules())
        call = CallRef(assistant=1, index=0)
        body = File(call=call, path=str(root), before=None, after_hash="", recorded_here=True, change_set=change_set.id)
        await branch.claim(None)
        changes = await branch.record([NewEntry(body=body)])
        command = Command(text="/undo", answer="", message_id="m")
        (entry,) = await branch.record([NewEntry(body=command)])
        yield run, Restore(branch, run.client, workspace, entry), [*changes], file


async def test_a_file_with_spaces_in_its_path_that_stays_is_named_whole(tmp_path: Path) -> None:
    async with changed(tmp_path, "with space/a b") as (run, restore, changes, file):
        file.write_text("mine\n")
        assert await restore.run(changes, asks=False) == RestoreResult(left=(str(file),))
        told = f"Not restored: {file} was changed by someone else since."
        assert run.client.stored(ToolResult)[-1].text == told


async def test_a_change_whose_workspace_is_gone_is_named_and_left(tmp_path: Path) -> None:
    async with changed(tmp_path, "d/a") as (run, restore, changes, file):
        file.unlink()
        file.parent.rmdir()
        file.parent.parent.rmdir()
        assert await restore.run(changes, asks=False) == RestoreResult(left=(str(tmp_path / "tree"),))
        told = f"Not restored: {tmp_path}/tree: No such file or directory."
        assert run.client.stored(ToolResult)[-1].text == told


async def test_a_cancelled_restore_is_ended_at_the_client(tmp_path: Path) -> None:
    async with changed(tmp_path, "d/a") as (run, restore, changes, file):
        run.client.never_answers = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: restore.run(changes, asks=True))
            await run.client.asked.wait()
            tasks.cancel_scope.cancel()
        assert isinstance(run.client.events[-1], CallEnded)
        assert file.read_text() == "new\n"

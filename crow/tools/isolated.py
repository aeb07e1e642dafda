"""The workspace of a subagent that works in a layer of its own.

The subagent's commands run in the layer, one at a time. The layer is mounted again for each of them, because a mounted
overlay does not show what others change in the workspace meanwhile. The built-in tools read and write the same files
without a mount.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread

from crow.domain.errors import ArgumentError
from crow.tools import (
    NOTHING_EXCLUDED,
    BackgroundCommand,
    CommandAccess,
    ExcludedPaths,
    FileStat,
    OnOutput,
    PlannedCall,
    Ports,
    Protection,
    Workspace,
)
from crow.tools.builtin.seen_files import SeenFiles
from crow.tools.builtin.tool import ToolContext
from crow.tools.disk import file_stat, read_file, replace_file
from crow.tools.jobs import Jobs
from crow.tools.layers import Changes, ChildLayer, Layer
from crow.tools.layers.session import Layers
from crow.tools.layers.view import View
from crow.tools.network import CommandNetwork
from crow.tools.no_session import NoSession

_ONLY_CONFINED = (
    "this task works on a copy of the workspace, where commands have no full access and do not run in the background"
)


class _ChildLayers(Layers):
    """Gives all commands and edits of a subagent the same layer, one at a time. Their changes stay in the layer.

    `open` gives the layer to one command, and `drop` takes it back. After each command, the child layer notes its
    state. A cancelled command may still be writing, so the state after it is noted only at the next `open`.
    """

    def __init__(self, child: ChildLayer, workspace: Workspace) -> None:
        self.child = child
        self._workspace = workspace
        self._lock = anyio.Lock()  # held while a command or an edit has the layer
        self._is_unsettled = False  # whether the child layer has yet to note its state

    async def works(self) -> bool:
        """See :class:`Layers`."""
        return True

    async def open(self) -> Layer:
        """See :class:`Layers`. Wait until the previous command has ended."""
        await self._lock.acquire()
        try:
            if self._workspace.has_leftovers:  # a second mount of the layer would damage it
                await self._workspace.reap()
            if self._is_unsettled:
                await anyio.to_thread.run_sync(self.child.note)
                self._is_unsettled = False
            await anyio.to_thread.run_sync(self.child.begin)
        except BaseException:
            self._lock.release()
            raise
        return self.child.layer

    async def look(self, layer: Layer, *, is_live: bool = False) -> Changes:  # noqa: ARG002
        """See :class:`Layers`. The session looks at the layer when the subagent has ended."""
        return Changes(layer=layer.id)

    async def drop(self, layer: Layer) -> None:  # noqa: ARG002
        """See :class:`Layers`. The layer stays."""
        try:
            self._is_unsettled = True
            if not self._workspace.has_leftovers:  # a cancelled command may still write
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self.child.note)
                self._is_unsettled = False
        finally:
            self._lock.release()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[Layer]:
        """Hold the layer in this context to change it. Wait until the previous command has ended."""
        layer = await self.open()
        try:
            yield layer
        finally:
            await self.drop(layer)


class _IsolatedWorkspace:
    """A :class:`crow.tools.Workspace` whose files are those of a layer. `workspace` is the workspace below the
    layer."""

    def __init__(self, workspace: Workspace, child: ChildLayer) -> None:
        self._workspace = workspace
        self._view = View(child.layer)
        self.layers: _ChildLayers = _ChildLayers(child, workspace)
        """See :meth:`crow.tools.Workspace.layers`."""
        self.is_bounded = True
        """See :meth:`crow.tools.Workspace.is_bounded`. A file outside the workspace is outside the layer, too."""
        self.cwd = workspace.cwd
        self.directories = workspace.directories
        self.contains = workspace.contains
        self.read_protection = workspace.read_protection
        self.find_names = workspace.find_names
        self.sandbox_status = workspace.sandbox_status
        self.explain_failure = workspace.explain_failure
        self.run_program = workspace.run_program
        self.find_program = workspace.find_program
        self.start_confined = workspace.start_confined
        self.end_confined = workspace.end_confined
        self.reap = workspace.reap

    @property
    def confines(self) -> bool:
        """See :class:`crow.tools.Workspace`."""
        return self._workspace.confines

    @property
    def credential_hosts(self) -> tuple[str, ...]:
        """See :class:`crow.tools.Workspace`."""
        return self._workspace.credential_hosts

    @property
    def has_leftovers(self) -> bool:
        """See :class:`crow.tools.Workspace`."""
        return self._workspace.has_leftovers

    def resolve(self, path: str) -> Path:
        """See :class:`crow.tools.Workspace`."""
        outside = self._workspace.resolve(path)  # raises an error for an invalid path
        try:
            found = self._view.resolve(self.cwd / path)
            if str(found).isascii() or self._view.locate(found) is not None:
                return found
            # The name of a file of the workspace may be written in another Unicode normalization form.
            own = self._view.resolve(outside)
            return own if self._view.locate(own) is not None else found
        except OSError as error:
            raise ArgumentError(f"{path} cannot be resolved: {error.strerror}") from error

    def protection(self, path: Path) -> Protection:
        """See :class:`crow.tools.Workspace`. Protected files in the layer may be written: the user is asked when the
        session keeps the changes."""
        own = self._workspace.protection(path)
        return "never" if own == "never" or not self.contains(path) else "none"

    async def stat(self, path: Path, *, head: int = 0) -> FileStat:
        """See :class:`crow.tools.Workspace`."""

        def look() -> FileStat:
            self._view.note_read(path)
            place = self._view.locate(path)
            return FileStat(path=path, kind="missing") if place is None else replace(file_stat(place, head), path=path)

        return await anyio.to_thread.run_sync(look)

    async def read_bytes(self, path: Path, limit: int | None = None, start: int = 0) -> bytes:
        """See :class:`crow.tools.Workspace`."""

        def read() -> bytes:
            self._view.note_read(path)
            return read_file(self._view.located(path), start, limit)

        return await anyio.to_thread.run_sync(read)

    async def read_text(self, path: Path) -> str:
        """See :class:`crow.tools.Workspace`. Unsaved changes in the editor are not seen."""
        return (await self.read_bytes(path)).decode("utf-8", "replace")

    async def write_text(self, path: Path, text: str) -> str:
        """See :class:`crow.tools.Workspace`."""
        await self.restore(path, text.encode("utf-8"))
        return text

    async def restore(self, path: Path, content: bytes | None, *, mode: int | None = None) -> None:
        """See :class:`crow.tools.Workspace`."""
        if self.protection(path) == "never":
            raise PermissionError(errno.EACCES, "tools may not change anything outside the workspace", str(path))

        def change() -> None:
            self.layers.child.note_before(path)
            if content is None:
                self._view.remove(path)
                return
            place, own_mode = self._view.prepare_write(path)
            replace_file(place, content, mode if own_mode is None else own_mode)

        async with self.layers.changing():
            await anyio.to_thread.run_sync(change)

    async def run(
        self,
        command: str,
        *,
        access: CommandAccess,  # noqa: ARG002
        timeout_s: float,
        on_output: OnOutput,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> tuple[int | None, str]:
        """See :class:`crow.tools.Workspace`. The command runs in the layer, whatever access it asks for."""
        if layer is None:
            async with self.layers.changing() as own:
                return await self.run(
                    command,
                    access="write",
                    timeout_s=timeout_s,
                    on_output=on_output,
                    excluded=excluded,
                    layer=own,
                    network=network,
                )
        return await self._workspace.run(
            command,
            access="write",
            timeout_s=timeout_s,
            on_output=on_output,
            excluded=excluded,
            layer=layer,
            network=network,
        )

    async def spawn(
        self,
        command: str,
        on_output: Callable[[str], None],  # noqa: ARG002
        *,
        access: CommandAccess,  # noqa: ARG002
        excluded: ExcludedPaths = NOTHING_EXCLUDED,  # noqa: ARG002
        layer: Layer | None = None,  # noqa: ARG002
        network: CommandNetwork | None = None,  # noqa: ARG002
    ) -> BackgroundCommand:
        """See :class:`crow.tools.Workspace`. Nothing runs in the background in a subagent's layer."""
        raise PermissionError(errno.EPERM, _ONLY_CONFINED, command[:80])

    async def close(self) -> None:
        """See :class:`crow.tools.Workspace`."""


def isolated_context(context: ToolContext, ports: Ports, child: ChildLayer) -> tuple[ToolContext, Ports]:
    """Return the context and the ports with which the built-in tools of a subagent work in the layer `child`.
    `context` and `ports` are those of the session."""
    workspace = _IsolatedWorkspace(context.workspace, child)
    own = ToolContext(
        workspace=workspace,
        jobs=Jobs(workspace, context.keys),
        seen_files=SeenFiles(ports.in_context),
        outputs=context.outputs,
        skills=context.skills,
        fetches_private=context.fetches_private,
        keys=context.keys,
        is_isolated=True,
    )
    # Edits in the layer do not change the workspace, so there is nothing to undo.
    return own, Ports(log=NoSession(), plan=ports.plan)


def isolated_plan(plan: PlannedCall) -> PlannedCall:
    """Return a plan for a subagent that works in a layer. Commands with full access get a fault."""
    fault = plan.fault
    if fault is None and plan.requested_access == "full":
        fault = f"shell: {_ONLY_CONFINED}"
    return replace(plan, is_isolated=True, parts=tuple(map(isolated_plan, plan.parts)), fault=fault)

"""What a host does for all of its sessions."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.app import Wiring
from crow.domain.errors import CrowError, StoreError
from crow.frontend import agent
from crow.frontend.host import ServerDependencies
from crow.settings import load_settings
from crow.store import Store
from crow.terminal.connection import TerminalConnection
from tests.support.scripted_model import Say
from tests.support.shared_host import shared

pytestmark = pytest.mark.anyio


async def test_models_of_the_old_endpoint_are_not_offered_if_the_settings_change_while_they_are_listed(
    tmp_path: Path,
) -> None:
    asked, answered = anyio.Event(), anyio.Event()
    reloads: list[ServerDependencies] = []

    async def old() -> tuple[str, ...]:
        asked.set()
        await answered.wait()
        return ("old",)

    async def new() -> tuple[str, ...]:
        return ("new",)

    def change(dependencies: ServerDependencies) -> ServerDependencies:
        return replace(dependencies, more_models=old, reload=lambda: reloads.pop() if reloads else None)

    async with shared(tmp_path, change=change) as host:
        ann = await host.client()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.host.list_models)
            await asked.wait()
            reloads.append(replace(host.dependencies, more_models=new))
            await ann.call("session/list")
            answered.set()
        await host.host.list_models()
        assert host.host.models == ("offline", "new")


class WithoutEntries:
    """A store that finds no single entries, because its database is locked."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def entry(self, _entry_id: int, *, session_id: str | None = None) -> Any:
        raise StoreError("The database is locked.")


async def test_a_connection_stays_if_old_changes_of_commands_cannot_be_removed(tmp_path: Path) -> None:
    old = tmp_path / "home" / "layers" / "changes" / "old"
    old.mkdir(parents=True)
    manifest = {"operations": [], "bases": {}, "about": {"call": "call_1_0"}, "skipped": []}
    (old / "manifest").write_text(json.dumps(manifest))
    (old / "kept").touch()
    os.utime(old / "kept", (0, 0))

    def change(dependencies: ServerDependencies) -> ServerDependencies:
        async def open_store() -> Any:
            return WithoutEntries(await dependencies.open_store())

        return replace(dependencies, open_store=open_store)

    async with shared(tmp_path, Say(text=("Hi.",)), change=change) as host:
        await host.host.warm()
        ann = await host.client()
        session = await ann.new()
        await ann.until_kind("usage_update")
        assert (await ann.prompt(session, "hello"))["stopReason"] == "end_turn"
        assert old.exists()


class Nobody:
    """A client that is sent nothing."""

    async def update(self, params: Any) -> None: ...

    async def ask_permission(self, params: Any) -> dict[str, Any]:
        raise NotImplementedError

    async def elicit(self, params: Any) -> dict[str, Any]:
        raise NotImplementedError


async def test_a_process_whose_imports_fail_while_it_is_idle_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_WARM_AFTER_S", 0.01)
    tried = anyio.Event()

    async def fail() -> None:
        tried.set()
        raise CrowError("There is not enough memory.")

    wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path)}))
    connection = TerminalConnection(Nobody(), lambda: wiring.store)
    serving = asyncio.create_task(agent.serve(connection, replace(wiring.dependencies(), import_rest=fail)))
    serving.add_done_callback(connection.close)
    await connection.started.wait()
    await tried.wait()
    assert await connection.call("session/list", {}) == {"sessions": []}
    connection.stop()
    await serving
    await wiring.close()

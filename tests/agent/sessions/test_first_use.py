"""A new directory in which another tool has sessions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from crow.agent.sessions.first_use import offer_import
from crow.store.importers import importable_at
from tests.support import foreign_sessions as foreign
from tests.support.scripted_model import Say
from tests.support.shared_host import Watcher, shared

NOTICES: dict[str, Any] = {"session": {"notices": {}}}


@pytest.mark.parametrize(
    ("write", "tool"),
    [
        (foreign.claude_code, "claude-code"),
        (foreign.codex, "codex"),
        (foreign.pi, "pi"),
        (foreign.opencode_database, "opencode"),
        (foreign.opencode_files, "opencode"),
        (foreign.goose_database, "goose"),
        (foreign.goose_file, "goose"),
    ],
)
def test_only_sessions_of_the_directory_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], tool: str
) -> None:
    set_home(monkeypatch, tmp_path)
    assert importable_at([foreign.CWD]) == []
    write(tmp_path)
    assert [(one.tool, one.sessions) for one in importable_at(["/elsewhere", foreign.CWD])] == [(tool, 1)]
    assert importable_at(["/srv/bird", "/srv/birds/nest"]) == []
    assert importable_at([foreign.CWD], [f"{tool.split('-')[0]}-123"]) == []


def test_files_that_opencode_has_moved_into_its_database_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_home(monkeypatch, tmp_path)
    foreign.opencode_files(tmp_path)
    with closing(sqlite3.connect(tmp_path / ".local/share/opencode/opencode.db")) as database:
        database.executescript(foreign.OPENCODE_TABLES)
    assert importable_at([foreign.CWD]) == []


def set_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HOME", str(home))
    for variable in ("XDG_DATA_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "PI_CODING_AGENT_DIR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("capabilities", [NOTICES, {}])
async def test_the_first_prompt_offers_the_import_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any]
) -> None:
    set_home(monkeypatch, tmp_path)
    monkeypatch.setattr("crow.agent.sessions.first_use._OFFER_AFTER_S", 3_600.0)  # the test looks itself
    async with shared(tmp_path, *(Say(text=["hi"]) for _ in range(4))) as on:
        monkeypatch.setattr(foreign, "CWD", str(on.cwd))
        foreign.pi(tmp_path)
        client = await on.client(capabilities=capabilities)
        session = await client.new()
        await offer_import(on.host.open[session].session, await on.host.store())
        assert "sessions import" not in told(client)
        await client.prompt(session, "hello")
        words = "1 session of pi in this directory can be imported"
        command = "To import all its sessions, run: crow sessions import --from pi"
        assert told(client).count(words) == told(client).count(command) == 1
        await client.prompt(session, "again")
        other = await client.new()
        assert on.host.open[other].request.cwd == str(on.cwd)
        await client.prompt(other, "hello")
        assert told(client).count(words) == 1


def told(client: Watcher) -> str:
    return repr(client.kinds_and_texts())

"""Sessions of the real process are built again from their log, byte for byte."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from crow.cli import main
from crow.domain import rendering
from crow.domain.entries import ToolResult
from crow.domain.messages import ToolMessage
from crow.llm.sent import digest_of
from tests.stdio.conftest import StartCrow
from tests.support.prefix_cache import CachingEndpoint, run_session, write_config

SEEDS = [(wire, seed) for wire in ("chat", "responses", "messages") for seed in range(10)]
SECRET = "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56"


async def random_session(
    crow: StartCrow, home: Path, tmp_path: Path, *, wire: str = "chat", seed: int = 2
) -> tuple[str, set[str]]:
    """Run a random session on a wire. Return its id, and the digests of the requests that the endpoint got."""
    model = CachingEndpoint(home / "crow.db")
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url, wire)
        async with crow(env={"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}) as agent:
            await agent.initialize()
            await run_session(agent, model, tmp_path / "places" / str(seed), seed, prompts=6)
        got = {digest_of(request.raw) for request in endpoint.asked}
    (session,) = model.sessions.values()
    return session, got


class Commands:
    """Runs commands of crow in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and what was printed."""
        code = await anyio.to_thread.run_sync(main, list(arguments))
        said = self._capsys.readouterr()
        return code, said.out + said.err

    async def replay(self, name: str) -> list[dict[str, Any]]:
        """Return the requests of a session or a file, built again."""
        return [json.loads(line) for line in (await self("replay", name, "--json"))[1].splitlines()]


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    monkeypatch.setenv("CROW_HOME", str(home))
    for name in ("CROW_MODEL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return Commands(capsys)


def stored(home: Path, query: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(home / "crow.db")) as connection, connection:
        return [row[0] for row in connection.execute(query, values)]


@pytest.mark.parametrize(("wire", "seed"), SEEDS)
async def test_a_random_session_and_its_case_are_built_again_byte_for_byte(
    crow: StartCrow, home: Path, tmp_path: Path, run: Commands, seed: int, wire: str
) -> None:
    session, got = await random_session(crow, home, tmp_path, wire=wire, seed=seed)
    found = await run.replay(session)
    assert {each["words"] for each in found} == {""}
    digests = stored(home, "SELECT body ->> '$.sent.digest' FROM entries WHERE kind = 'assistant' AND body IS NOT NULL")
    assert set(digests) <= got
    assert len(found) >= len(set(digests)) > 3
    code, said = await run("sessions", "export", session, "--format", "case", "-o", str(tmp_path / "case.jsonl"))
    assert code == 0, said
    again = await run.replay(str(tmp_path / "case.jsonl"))
    assert [(each["outcome"], each["turn"]) for each in again] == [("identical", each["turn"]) for each in found]


async def test_a_difference_is_named_with_its_message_and_rule(
    crow: StartCrow, home: Path, tmp_path: Path, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Today's code writes results in another form than the code that sent the requests."""
    session, _ = await random_session(crow, home, tmp_path, seed=3)
    code, said = await run("replay", session)
    assert (code, "different" in said) == (0, False), said
    before = rendering.tool_message

    def changed(body: ToolResult, entry: int, call_id: str) -> ToolMessage:
        message = before(body, entry, call_id)
        return replace(message, text=f"{message.text}!")

    monkeypatch.setattr(rendering, "tool_message", changed)
    code, said = await run("replay", session)
    assert code == 1
    assert re.search(r"The first is the request of turn \d+, entry \d+:\n  ", said)
    assert re.search(
        r"differs?[:;] .*result of \w+ \(entry \d+\) \(.* bytes today, .* then; sent by this version", said
    ), said

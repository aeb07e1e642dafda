"""What may be imported and built before `initialize` is answered, and before the first request of `crow run`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ABSENT = {
    "crow.agent.sessions.runner",
    "crow.demo",
    "crow.doctor",
    "crow.frontend.v2",
    "crow.llm.client",
    "crow.llm.chat.parser",
    "crow.llm.messages.parser",
    "crow.llm.responses.parser",
    "crow.store.admin",
    "crow.telemetry",
    "crow.tools.builtin",
    "crow.tools.mcp.client",
    "httpx2",
    "jsonschema",
    "mcp",
    "mcp_types",
    "openai",
    "opentelemetry.exporter",
    "opentelemetry.sdk",
    "requests",
    "rich",
    "tomlkit",
    "yaml",
}
"""None is needed for `initialize`; most take at least 10 ms to import."""

AT_THE_ANSWER = """
import json, os, sys
from pydantic import BaseModel
from crow.cli import main
from crow.protocol.transport import StdioTransport

class Watched(StdioTransport):
    async def send(self, message):
        values = vars(sys.modules["acp.schema"]).values()
        models = [value for value in values if isinstance(value, type) and issubclass(value, BaseModel)]
        built = [model.__name__ for model in models if model.__pydantic_complete__]
        print(json.dumps([list(sys.modules), len(models), built]), file=sys.stderr)
        await super().send(message)

sys.modules["crow.protocol.transport"].StdioTransport = Watched
sys.exit(main(["acp"]))
"""

AT_THE_REQUEST = """
import json, os, sys
import httpx2, openai  # every wire needs them

def send(self, request, **_):
    print(json.dumps(list(sys.modules)), file=sys.stderr, flush=True)
    os._exit(0)

httpx2.AsyncClient.send = send
from crow.agent.turns import requests
requests._THINKS_S = 600  # a slow machine has not sent the request yet when the import of mcp would begin
from crow.cli import main
for home in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        os.environ["CROW_HOME"] = home
        sys.exit(main(["run", "hi"]))
    os.waitpid(pid, 0)
"""
"""Sends the first request of `crow run` with each of these homes, each in a process of its own."""

WIRES = ("chat", "responses", "messages")
PARSERS = tuple(f"crow.llm.{wire}." for wire in WIRES)
INITIALIZE = '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n'


@dataclass(frozen=True)
class AtTheAnswer:
    """A real process when it writes its first answer: its modules, and the models of the protocol's SDK."""

    modules: set[str]
    models: int
    built: list[str]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> AtTheAnswer:
    home = tmp_path_factory.mktemp("home")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_ANSWER],
        input=INITIALIZE,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=root,
        env={"CROW_HOME": str(home), "CROW_MODEL": "fake-model", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
        check=True,
    )
    assert json.loads(done.stdout)["result"]["protocolVersion"] == 1
    modules, models, built = json.loads(done.stderr)
    return AtTheAnswer(set(modules), models, built)


@pytest.mark.long
def test_initialize_is_answered_before_anything_heavy_is_imported(started: AtTheAnswer) -> None:
    assert "acp" in started.modules
    assert ABSENT & started.modules == set()


def test_initialize_is_answered_before_the_models_of_other_requests_are_built(started: AtTheAnswer) -> None:
    assert started.models > 200
    assert "InitializeRequest" in started.built
    assert "NewSessionRequest" not in started.built
    assert len(started.built) < 20


@pytest.mark.long
def test_crow_run_asks_the_model_before_it_imports_other_sdks_and_wires(tmp_path: Path) -> None:
    wires = ("auto", *WIRES)
    for wire in wires:
        (tmp_path / wire).mkdir()
        (tmp_path / wire / "config.toml").write_text(f'[model]\nwire = "{wire}"\n')
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_REQUEST, *(str(tmp_path / wire) for wire in wires)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={"CROW_MODEL": "fake-model", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
    )
    loaded = [set(json.loads(line)) for line in done.stderr.splitlines() if line.startswith("[")]
    used = [{name.split(".")[2] for name in each if name.startswith(PARSERS)} for each in loaded]
    assert used == [{"chat"}, {"chat"}, {"responses"}, {"messages"}], "a wire that is not used is not imported"
    for each in loaded:
        assert "crow.llm.client" in each
        assert {"acp", "mcp", "mcp_types", "jsonschema", "rich", "tomlkit", "prompt_toolkit"} & each == set()

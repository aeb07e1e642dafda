"""Fixtures that run published servers on loopback: the LiteLLM proxy, and the server of llama.cpp.

Plain answers and errors of the proxy come from its own mocks; tool calls come from the project's fake endpoint behind
it. The server of llama.cpp runs a tiny model (llama_server.py). `CROW_GATEWAY` is the proxy's executable, and
`CROW_LLAMA` the Python that has the server; the Makefile sets them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.stdio.conftest import StartCrow, crow, home, place
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.messages_endpoint import MessagesEndpoint

__all__ = [
    "KEY",
    "WINDOW",
    "RunLlama",
    "StartCrow",
    "claude",
    "crow",
    "gateway",
    "home",
    "llama",
    "place",
    "run_llama",
    "upstream",
]

KEY = "sk-interop-0123456789"
START_S = 180.0
WINDOW = 16_384
"""The context window of the server of llama.cpp, in tokens."""
MOCKS = {
    "plain": "A plain answer through the gateway.",
    "limited": "litellm.RateLimitError",
    "overflowing": "litellm.ContextWindowExceededError",
    "broken": "litellm.InternalServerError",
    "filtered": "Exception: content_filter_policy",
}


@pytest.fixture(scope="session")
def upstream() -> Iterator[FakeEndpoint]:
    with FakeEndpoint.in_thread() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def claude() -> Iterator[MessagesEndpoint]:
    """An endpoint behind the gateway that speaks Anthropic's Messages API, and checks what it gets back."""
    with MessagesEndpoint.in_thread() as endpoint:
        assert isinstance(endpoint, MessagesEndpoint)
        yield endpoint


@pytest.fixture(scope="session")
def gateway(
    upstream: FakeEndpoint, claude: MessagesEndpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The base URL of a running gateway."""
    folder = tmp_path_factory.mktemp("gateway")
    models: list[object] = [
        {"model_name": name, "litellm_params": {"model": "openai/mock", "api_key": "none", "mock_response": said}}
        for name, said in MOCKS.items()
    ]
    behind = {"model": "openai/fake-model", "api_key": "none", "api_base": upstream.base_url}
    models.append({"model_name": "tools", "litellm_params": behind, "model_info": {"max_input_tokens": 48000}})
    behind = {"model": "anthropic/claude-opus-4-6", "api_key": "none", "api_base": claude.base_url.removesuffix("/v1")}
    models.append({"model_name": "claude", "litellm_params": behind})
    config = {
        "model_list": models,
        "litellm_settings": {"num_retries": 0, "telemetry": False},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "general_settings": {"master_key": KEY},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [os.environ["CROW_GATEWAY"], "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    env = {"HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with running(command, folder, ready="Uvicorn running", env=env):
        yield f"http://127.0.0.1:{port}/v1"


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def running(command: Sequence[str], folder: Path, *, ready: str, env: Mapping[str, str]) -> Iterator[None]:
    """Run a server in `folder`. The block begins when the server has written `ready`."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if ready in line:
                is_ready.set()
        is_ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert is_ready.wait(START_S), "the server did not start:\n" + "".join(lines)
        assert process.poll() is None, "the server ended:\n" + "".join(lines)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is written once."""
    return tmp_path_factory.mktemp("llama")


@contextmanager
def llama_running(folder: Path, *, port: int = 0, **settings: object) -> Iterator[str]:
    """Run the server of llama.cpp with these settings of its own. Gives the base URL."""
    port = port or free_port()
    settings = {"port": port, "n_ctx": WINDOW, "api_keys": [KEY]} | settings
    script = Path(__file__).with_name("llama_server.py")
    words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    with running([os.environ["CROW_LLAMA"], str(script), str(folder), *words], folder, ready="Listening on", env={}):
        yield f"http://127.0.0.1:{port}/v1"


RunLlama: TypeAlias = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def run_llama(model_folder: Path) -> RunLlama:
    """Runs servers with settings of the test."""
    return partial(llama_running, model_folder)


@pytest.fixture(scope="session")
def llama(model_folder: Path) -> Iterator[str]:
    """The base URL of a server of llama.cpp."""
    with llama_running(model_folder) as url:
        yield url


@pytest.fixture
def environment(gateway: str) -> dict[str, str]:
    """The environment that crow starts with, without a model."""
    return {"OPENAI_BASE_URL": gateway, "OPENAI_API_KEY": KEY}


@pytest.fixture
def config(home: Path) -> Path:
    """A configuration file that offers a second model."""
    home.mkdir(parents=True, exist_ok=True)
    file = home / "config.toml"
    file.write_text('models = ["plain"]\n')
    file.chmod(0o600)
    return file

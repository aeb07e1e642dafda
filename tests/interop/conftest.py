"""Fixtures that run the published LiteLLM proxy on loopback.

Plain answers and errors come from the proxy's own mocks; tool calls come from the project's fake endpoint behind
it. `CROW_GATEWAY` is the proxy's executable; `make interop-gateway` sets it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stdio.conftest import StartCrow, crow, home, place
from tests.support.fake_endpoint import FakeEndpoint

__all__ = ["KEY", "StartCrow", "crow", "gateway", "home", "place", "upstream"]

KEY = "sk-interop-0123456789"
START_S = 180.0
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
def gateway(upstream: FakeEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a running gateway."""
    folder = tmp_path_factory.mktemp("gateway")
    models: list[object] = [
        {"model_name": name, "litellm_params": {"model": "openai/mock", "api_key": "none", "mock_response": said}}
        for name, said in MOCKS.items()
    ]
    behind = {"model": "openai/fake-model", "api_key": "none", "api_base": upstream.base_url}
    models.append({"model_name": "tools", "litellm_params": behind, "model_info": {"max_input_tokens": 48000}})
    config = {
        "model_list": models,
        "litellm_settings": {"num_retries": 0, "telemetry": False},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "general_settings": {"master_key": KEY},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [os.environ["CROW_GATEWAY"], "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "Uvicorn running" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_S), "the gateway did not start:\n" + "".join(lines)
        assert process.poll() is None, "the gateway ended:\n" + "".join(lines)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        assert process.stdout is not None
        process.stdout.close()


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

"""Fixtures for tests of the real process: home, workspace, endpoint and process."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).parents[2]


FRESH = (sys.executable, "-m", "crow", "acp")
"""Starts a new interpreter, as an editor does."""


class StartCrow(Protocol):
    """Creates a process without starting it. `env` adds to the isolated environment; None removes a variable.

    Without `argv` it is forked from a process that has imported everything; `FRESH` starts a new interpreter. The
    code `before` is run in a forked process before it starts.
    """

    def __call__(
        self,
        *,
        endpoint: FakeEndpoint | None = None,
        answers: Mapping[str, Callable[[dict[str, Any]], Any]] | None = None,
        env: Mapping[str, str | None] | None = None,
        argv: Sequence[str] | None = None,
        before: str = "",
        client: type[CrowProcess] = CrowProcess,
    ) -> CrowProcess: ...


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """`CROW_HOME`: this test's configuration, database and log."""
    return tmp_path / "home"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace with a file."""
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "README.md").write_text("# Nest\nTwigs and string.\n")
    return directory


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    """A fake model endpoint on loopback; pass it to `crow` to use it."""
    async with FakeEndpoint() as server:
        yield server


@pytest.fixture
def crow(home: Path, place: Path) -> StartCrow:
    """Creates `crow acp` processes that use the offline model, or `endpoint` if one is given."""

    def start(
        *,
        endpoint: FakeEndpoint | None = None,
        answers: Mapping[str, Callable[[dict[str, Any]], Any]] | None = None,
        env: Mapping[str, str | None] | None = None,
        argv: Sequence[str] | None = None,
        before: str = "",
        client: type[CrowProcess] = CrowProcess,
    ) -> CrowProcess:
        variables: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_MODEL": "offline",
            "CROW_SANDBOX": "off",  # tests of confinement choose another value
        }
        if endpoint is not None:
            variables |= {
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": "sk-test-0123456789",
                "CROW_MODEL": "fake-model",
            }
        variables |= env or {}
        process = client(
            FRESH if argv is None and (env or {}).get("PYTHONPATH") else argv,
            env={name: value for name, value in variables.items() if value is not None},
            cwd=place,
            answers=answers,
        )
        process.before = before
        return process

    return start

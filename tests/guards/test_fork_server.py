"""The processes that tests fork have already imported what they need: importing it again costs each of them 0.4 s."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from crow import cli
from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint, calls, text

SMALL = {"encodings"}
"""What may be missing: it takes no time."""


def main(arguments: Sequence[str]) -> int:
    """In the forked process: run crow, then write which modules it imported."""
    before = set(sys.modules)
    try:
        return cli.main(arguments)
    finally:
        Path(os.environ["IMPORTED"]).write_text(" ".join(sorted(set(sys.modules) - before)))


class ForkedCrow(CrowProcess):
    """Runs `main` above."""

    program = __name__


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked only on Linux")
async def test_a_forked_process_imports_nothing_for_a_turn(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "README.md").write_text("# Nest\n")
    async with FakeEndpoint() as endpoint:
        endpoint.script(calls(("read_file", {"path": "README.md"})), text("A nest."))
        env = {
            "PATH": os.environ["PATH"],
            "CROW_HOME": str(tmp_path / "home"),
            "CROW_MODEL": "fake-model",
            "CROW_SANDBOX": "off",
            "IMPORTED": str(imported),
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": endpoint.base_url,
        }
        async with ForkedCrow(None, env=env, cwd=tmp_path) as crow:
            await crow.initialize()
            session = await crow.new_session(tmp_path)
            await crow.prompt(session, "What is in README.md?")
            assert crow.text(session) == "A nest."
    assert {name.partition(".")[0] for name in imported.read_text().split()} <= SMALL

"""Between declared breaks, each request of the real process begins with the request before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stdio.conftest import StartCrow
from tests.support.prefix_cache import CachingEndpoint, run_session, write_config


@pytest.mark.parametrize("seed", [2, 3])
async def test_scripted_sessions_break_the_prefix_only_where_a_break_is_declared(
    crow: StartCrow, home: Path, tmp_path: Path, seed: int
) -> None:
    model = CachingEndpoint(home / "crow.db")
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url)
        async with crow(env={"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}) as agent:
            await agent.initialize()
            said = await run_session(agent, model, tmp_path / "places" / str(seed), seed, prompts=8)
    assert model.found.undeclared == []
    assert model.found.requests > 8
    assert "Last cache break: " in said

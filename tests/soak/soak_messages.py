"""Random turns of one session on Anthropic's Messages API, against an endpoint that checks every block that it gets.

Run by `make soak-messages`. SOAK_TURNS (1000) and SOAK_SEED change it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow, crow, home, place
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.messages_endpoint import MessagesEndpoint, says

__all__ = ["crow", "home", "place"]

TURNS = int(os.environ.get("SOAK_TURNS", "1000"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
MODELS = ("claude-opus-5-5", "claude-sonnet-4-5")
WORDS = "The nest is built of twigs, string and moss. "
SUMMARY = "## Goal\nBuild a nest.\n## Done\nTwigs were found.\n## Next\nFind string."


class Turns:
    """Answers at random, and counts what was asked."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.names: Iterator[int] = iter(range(10**9))

    def answer(self) -> list[list[dict[str, Any]]]:
        """The answers of one turn: steps with calls, then one without."""
        steps = [self._step() for _ in range(self.chance.choice((0, 0, 1, 2, 4)))]
        return [*steps, says(*self._thoughts(), {"text": [WORDS * self.chance.randrange(1, 40)]})]

    def _thoughts(self) -> list[dict[str, Any]]:
        kinds = self.chance.choices(("none", "thought", "hidden", "empty"), k=self.chance.randrange(3))
        made = {
            "thought": lambda: {"think": [f"Thought {next(self.names)}. ", WORDS]},
            "hidden": lambda: {"redacted": f"Em{next(self.names)}=="},
            "empty": lambda: {"think": []},
        }
        return [made[kind]() for kind in kinds if kind != "none"]

    def _step(self) -> list[dict[str, Any]]:
        blocks = self._thoughts()
        if self.chance.random() < 0.5:
            blocks.append({"text": [WORDS]})
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            blocks += self._thoughts() if self.chance.random() < 0.3 else []
            blocks.append({"call": "read_file", "json": ['{"path": ', '"README.md"}']})
        return says(*blocks)


@pytest.mark.parametrize("binds", [False, True])
async def test_every_block_comes_back_unchanged_and_in_place(
    crow: StartCrow, home: Path, place: Path, *, binds: bool
) -> None:
    chance = random.Random(SEED)
    home.mkdir()  # noqa: ASYNC240
    (home / "config.toml").write_text(
        f'models = ["{MODELS[1]}"]\n[model]\nname = "{MODELS[0]}"\nwire = "messages"\ncontext_window = 24_000\n'
        'thought_level = "medium"\n'
    )
    turns, done = Turns(chance), Counter[str]()
    async with MessagesEndpoint(binds=binds) as claude:
        claude.models = list(MODELS)
        agent: CrowProcess | None = None
        session = ""
        try:
            for number in range(TURNS):
                if agent is None:
                    agent = crow(endpoint=claude, env={"CROW_MODEL": None})
                    await agent.__aenter__()
                    await agent.initialize()
                    if session:
                        await agent.load_session(session, place)
                    else:
                        session = await agent.new_session(place)
                step = chance.choices(("prompt", "kill", "undo", "compact", "model", "cancel"), (60, 6, 6, 6, 6, 6))[0]
                done[step] += 1
                claude.answers.clear()
                claude.otherwise = says({"text": [SUMMARY]})
                if step != "compact":
                    claude.answer(*turns.answer())
                match step:
                    case "prompt":
                        await agent.prompt(session, f"Prompt {number}. {WORDS}")
                    case "undo" | "compact":
                        with suppress(RpcError):  # there may be nothing to undo
                            await agent.prompt(session, f"/{step}")
                    case "model":
                        value = chance.choice(MODELS)
                        option = {"sessionId": session, "configId": "model", "value": value}
                        await agent.request("session/set_config_option", option)
                    case "cancel" | "kill":
                        asked = len(claude.asked)
                        call = await agent.start_prompt(session, f"Prompt {number}. {WORDS}")
                        await agent.wait_for_update("usage_update", since=call.index) if asked % 2 else None
                        if step == "cancel":
                            await agent.notify("session/cancel", {"sessionId": session})
                            await call.result()
                        else:
                            await agent.kill()
                            await agent.__aexit__(None, None, None)
                            agent = None
                refused = [words for words in claude.refused if not binds or "bound to a different" not in words]
                assert refused == [], f"turn {number} ({step}) of seed {SEED}"
                if claude.asked and not binds:
                    assert claude.missing(claude.asked[-1].sent) == [], f"turn {number} ({step}) of seed {SEED}"
        finally:
            if agent is not None:
                await agent.kill()
                await agent.__aexit__(None, None, None)
        requests, refusals = len(claude.asked), len(claude.refused)
        cached = sum(each["cache_read_input_tokens"] for each in claude.usages)
        sent = sum(sum(value for key, value in each.items() if key != "output_tokens") for each in claude.usages)
    print(f"{requests} requests, {refusals} refused, {cached / max(1, sent):.1%} from the cache; {dict(done)}")

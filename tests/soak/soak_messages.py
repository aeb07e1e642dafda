"""Random turns of one session on Anthropic's Messages API, against an endpoint that checks every block that it gets.

Run by `make soak-messages`. SOAK_TURNS (1000) and SOAK_SEED change it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
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
    """Answers at random."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.count = 0

    def answer(self) -> list[list[dict[str, Any]]]:
        """The answers of one turn: steps with calls, then one without."""
        steps = [self._step() for _ in range(self.chance.choice((0, 0, 1, 2, 4)))]
        return [*steps, says(*self._thoughts(), {"text": [WORDS * self.chance.randrange(1, 40)]})]

    def _thoughts(self) -> list[dict[str, Any]]:
        return [self._thought() for _ in range(self.chance.randrange(3)) if self.chance.random() < 0.75]

    def _thought(self) -> dict[str, Any]:
        self.count += 1
        kinds: list[dict[str, Any]] = [
            {"think": [f"Thought {self.count}. ", WORDS]},
            {"redacted": f"Em{self.count}=="},
            {"think": []},
        ]
        return self.chance.choice(kinds)

    def _step(self) -> list[dict[str, Any]]:
        blocks = self._thoughts()
        if self.chance.random() < 0.5:
            blocks.append({"text": [WORDS]})
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            blocks += self._thoughts() if self.chance.random() < 0.3 else []
            blocks.append({"call": "read_file", "json": ['{"path": ', '"README.md"}']})
        return says(*blocks)


class Editor:
    """An editor with one session, which survives the kills of its agent."""

    def __init__(self, crow: StartCrow, place: Path, claude: MessagesEndpoint) -> None:
        self.crow, self.place, self.claude = crow, place, claude
        self.agent: CrowProcess | None = None
        self.session = ""

    async def opened(self) -> CrowProcess:
        """The running agent, with the session open."""
        if self.agent is None:
            self.agent = self.crow(endpoint=self.claude, env={"CROW_MODEL": None})
            await self.agent.__aenter__()
            await self.agent.initialize()
            if self.session:
                await self.agent.load_session(self.session, self.place)
            else:
                self.session = await self.agent.new_session(self.place)
        return self.agent

    async def kill(self) -> None:
        if self.agent is not None:
            await self.agent.kill()
            await self.agent.__aexit__(None, None, None)
            self.agent = None

    async def act(self, step: str, prompt: str, chance: random.Random) -> None:
        agent, session = await self.opened(), self.session
        match step:
            case "prompt":
                await agent.prompt(session, prompt)
            case "undo" | "compact":
                with suppress(RpcError):  # there may be nothing to undo
                    await agent.prompt(session, f"/{step}")
            case "model":
                option = {"sessionId": session, "configId": "model", "value": chance.choice(MODELS)}
                await agent.request("session/set_config_option", option)
            case _:
                call = await agent.start_prompt(session, prompt)
                if chance.random() < 0.5:
                    await agent.wait_for_update("usage_update", since=call.index)
                if step == "kill":
                    await self.kill()
                else:
                    await agent.notify("session/cancel", {"sessionId": session})
                    await call.result()


@pytest.mark.parametrize("binds", [False, True])
async def test_every_block_comes_back_unchanged_and_in_place(
    crow: StartCrow, home: Path, place: Path, *, binds: bool
) -> None:
    chance, done = random.Random(SEED), Counter[str]()
    configure(home)
    turns = Turns(chance)
    async with MessagesEndpoint(binds=binds) as claude:
        claude.models, claude.otherwise = list(MODELS), says({"text": [SUMMARY]})
        editor = Editor(crow, place, claude)
        try:
            for number in range(TURNS):
                step = chance.choices(("prompt", "kill", "undo", "compact", "model", "cancel"), (60, 6, 6, 6, 6, 6))[0]
                done[step] += 1
                claude.answers[:] = [] if step == "compact" else turns.answer()
                await editor.act(step, f"Prompt {number}. {WORDS}", chance)
                refused = [words for words in claude.refused if not binds or "bound to a different" not in words]
                assert refused == [], f"turn {number} ({step}) of seed {SEED}"
                if claude.asked and not binds:
                    assert claude.missing(claude.asked[-1].sent) == [], f"turn {number} ({step}) of seed {SEED}"
        finally:
            await editor.kill()
        cached = sum(each["cache_read_input_tokens"] for each in claude.usages)
        sent = sum(value for each in claude.usages for key, value in each.items() if key != "output_tokens")
        print(f"{len(claude.asked)} requests, {len(claude.refused)} refused, {cached / sent:.1%} cached; {dict(done)}")


def configure(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text(
        f'models = ["{MODELS[1]}"]\n[model]\nname = "{MODELS[0]}"\nwire = "messages"\ncontext_window = 24_000\n'
        'thought_level = "medium"\n'
    )

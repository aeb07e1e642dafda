"""What only an endpoint can read comes back to it after each thing that may happen to a session, on each wire."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.stdio.conftest import StartCrow
from tests.support.acp_client import CrowProcess
from tests.support.checking_endpoint import WIRES, CheckingEndpoint, write_settings

ENV = {"OPENAI_BASE_URL": None, "OPENAI_API_KEY": None}
EACH_WIRE = pytest.mark.parametrize("wire", WIRES)


def model_on(wire: str) -> str:
    return f"beta-{wire}"


class Kept:
    """A session on one wire, and the endpoint that checks what comes back."""

    def __init__(self, crow: StartCrow, home: Path, place: Path, wire: str) -> None:
        self.endpoint = CheckingEndpoint(random.Random(f"{wire} 1"))
        self.session = ""
        self.wire = wire
        self._crow = crow
        self._home = home
        self._place = place
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Kept:
        await self._stack.enter_async_context(self.endpoint)
        write_settings(self._home, self.endpoint.base_url)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self) -> CrowProcess:
        """Start a process and open the session there."""
        start = self._crow(env={**ENV, "CROW_MODEL": model_on(self.wire)})
        agent = await self._stack.enter_async_context(start)
        await agent.initialize()
        if self.session:
            await agent.load_session(self.session, self._place)
        else:
            await self.open(agent)
        return agent

    async def open(self, agent: CrowProcess) -> None:
        """Open a new session."""
        self.session = await agent.new_session(self._place)
        await agent.request("session/set_mode", {"sessionId": self.session, "modeId": "auto"})

    async def ask(self, agent: CrowProcess, *prompts: str, session: str = "") -> None:
        for prompt in prompts:
            assert await agent.prompt(session or self.session, prompt) == {"stopReason": "end_turn"}

    async def check(self, agent: CrowProcess, session: str = "", what: str = "") -> None:
        """Prompt again. Every answer that may come back must come back, and some must. `what` was done before."""
        before = self.endpoint.returned[self.wire]
        await self.ask(agent, "And now?", "And then?", session=session)
        assert self.endpoint.faults == [], what
        assert self.endpoint.returned[self.wire] > before, what


@pytest.mark.long
@EACH_WIRE
async def test_items_come_back_after_a_command(crow: StartCrow, home: Path, place: Path, wire: str) -> None:
    async with Kept(crow, home, place, wire) as kept:
        agent = await kept.start()
        for command in ("/compact", "/undo", "/retry", "/rewind 1"):
            await kept.open(agent)
            await kept.ask(agent, "One.", "Two.", "Three.", command)
            await kept.check(agent, what=command)


@pytest.mark.long
@EACH_WIRE
async def test_items_come_back_after_a_kill(crow: StartCrow, home: Path, place: Path, wire: str) -> None:
    async with Kept(crow, home, place, wire) as kept:
        agent = await kept.start()
        await kept.ask(agent, "One.", "Two.")
        kept.endpoint.endings = ["hang"]
        since = len(agent.log)
        await agent.start_prompt(kept.session, "Three.")
        await agent.wait_for_text(kept.session, "[answer", since=since)
        await agent.kill()
        await kept.check(await kept.start())


@pytest.mark.long
@EACH_WIRE
async def test_items_come_back_in_a_fork_and_in_its_origin(crow: StartCrow, home: Path, place: Path, wire: str) -> None:
    async with Kept(crow, home, place, wire) as kept:
        agent = await kept.start()
        await kept.ask(agent, "One.", "Two.")
        params = {"sessionId": kept.session, "cwd": str(place), "mcpServers": []}
        fork = (await agent.request("session/fork", params))["sessionId"]
        await kept.check(agent, fork)
        await kept.check(agent)


@pytest.mark.long
@EACH_WIRE
async def test_items_come_back_when_another_process_takes_over(
    crow: StartCrow, home: Path, place: Path, wire: str
) -> None:
    async with Kept(crow, home, place, wire) as kept:
        first = await kept.start()
        await kept.ask(first, "One.", "Two.")
        second = await kept.start()
        await kept.check(second)
        await kept.check(first)


@pytest.mark.long
@EACH_WIRE
async def test_items_come_back_after_an_answer_of_the_fallback_on_another_wire(
    crow: StartCrow, home: Path, place: Path, wire: str
) -> None:
    async with Kept(crow, home, place, wire) as kept:
        other = WIRES[(WIRES.index(wire) + 1) % 3]
        settings = home / "config.toml"
        table = f'[models."{model_on(wire)}"]\n'
        settings.write_text(settings.read_text().replace(table, f'{table}fallback = "{model_on(other)}"\n'))
        agent = await kept.start()
        await kept.ask(agent, "One.", "Two.")
        kept.endpoint.down = frozenset({wire})
        await kept.ask(agent, "Three.")
        assert kept.endpoint.asked[-1].wire == other
        kept.endpoint.down = frozenset()
        await kept.check(agent)


@pytest.mark.long
@EACH_WIRE
async def test_no_item_goes_to_another_endpoint_with_the_same_model(
    crow: StartCrow, home: Path, place: Path, wire: str
) -> None:
    async with Kept(crow, home, place, wire) as kept, CheckingEndpoint(random.Random(2), first=1001) as other:
        provider = f'[providers.other]\nbase_url = "{other.base_url}"\napi_key = "sk-test-9876543210"\n'
        model = f'[models.elsewhere]\nprovider = "other"\nname = "beta"\nwire = "{wire}"\ncontext_window = 24000\n'
        with (home / "config.toml").open("a") as settings:
            settings.write(provider + model)
        agent = await kept.start()
        await kept.ask(agent, "One.", "Two.")
        option = {"sessionId": kept.session, "configId": "model", "value": "elsewhere"}
        await agent.request("session/set_config_option", option)
        await kept.ask(agent, "Three.", "Four.")
        assert other.faults == []
        assert other.returned[wire] > 0
        await agent.request("session/set_config_option", {**option, "value": model_on(wire)})
        await kept.check(agent)

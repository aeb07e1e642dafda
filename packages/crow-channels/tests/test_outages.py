"""Random outages: every prompt runs once, and each answer is delivered once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.crow import SECRETS, Crow, Process, bridge, configure, serving
from tests.fake_discord import CHANNEL, DIRECT, THREAD, FakeDiscord
from tests.hook import Hook
from tests.ports import free_port
from tests.proxy import Proxy

PLACES = (CHANNEL, THREAD, DIRECT)


def settings(discord: FakeDiscord, name: str) -> str:
    return (
        f'[chats.{name}]\n{discord.settings}[chats.{name}.users]\n1 = "ann"\n'
        f'[chats.{name}.direct]\n[chats.{name}.channels."{CHANNEL}"]\n'
    )


def expected(place: str, number: int) -> tuple[str, str]:
    """A prompt and its whole answer."""
    if number % 3 == 2:
        return f"count to {6 + number}", "\n".join(map(str, range(1, 7 + number)))
    return f"say {place} {number}", f"{place} {number}"


@pytest.mark.parametrize("seed", range(3))
async def test_broken_connections(seed: int, discord: FakeDiscord, crow: Crow, tmp_path: Path) -> None:
    """The server, the gateway and the HTTP interface break again and again."""
    chance, name = random.Random(seed), f"broken{seed}"
    count = 6
    async with Proxy(crow.url) as proxy:
        path = configure(tmp_path, crow, settings(discord, name), server=f'url = "{proxy.url}"')
        async with bridge(path):
            await discord.wait(lambda: discord.sessions)

            async def write(place: str) -> None:
                for number in range(count):
                    discord.write(expected(place, number)[0], place=place)
                    await asyncio.sleep(chance.uniform(0, 0.1))

            async def break_things() -> None:
                while True:
                    await asyncio.sleep(chance.uniform(0.02, 0.25))
                    match chance.randrange(3):
                        case 0:
                            proxy.cut()
                        case 1:
                            await discord.drop()
                        case 2:
                            discord.failures.extend(chance.choices(["503", "lost", "ok"], k=3))
                        case _:
                            proxy.stall_then_cut()

            breaking = asyncio.create_task(break_things())
            await asyncio.gather(*map(write, PLACES))
            await discord.wait(lambda: sum(len(discord.answers(place)) for place in PLACES) >= count)
            breaking.cancel()
            wanted = {place: [expected(place, number)[1] for number in range(count)] for place in PLACES}
            await discord.wait(lambda: {place: discord.answers(place) for place in PLACES} == wanted)
    for place in PLACES:
        assert crow.prompts(f"{name}:{place}") == [expected(place, number)[0] for number in range(count)]


CHANNELS = "import sys\nfrom crow_channels.__main__ import main\nsys.exit(main())"


def started(path: Path) -> Process:
    process = Process(str(path), env=os.environ | SECRETS, cwd=path.parent, script=CHANNELS)
    process.read()
    return process


async def test_killed_processes(discord: FakeDiscord, tmp_path: Path) -> None:
    """Kill crow-channels and the server at any moment. A turn whose server was killed is interrupted and says so."""
    chance = random.Random(5)
    with serving(tmp_path) as crow:
        path = configure(tmp_path, crow, settings(discord, "killed"))
        process = started(path)
        try:
            await discord.wait(lambda: discord.sessions)
            for number in range(8):
                discord.write(f"say {number}" if number % 2 else f"count to {20 + number}")
            for round_number in range(3):
                answered = len(discord.answers())
                await discord.wait(lambda at=answered: len(discord.answers()) > at)
                discord.failures.extend(chance.choices(["lost", "ok"], k=2))
                await asyncio.sleep(chance.uniform(0, 0.3))
                if round_number == 1:
                    crow.end()
                await asyncio.to_thread(process.end)
                discord.forget_nonces()
                discord.write(f"say round {round_number}")
                if round_number == 1:
                    await asyncio.to_thread(crow.start)
                process = started(path)
            await discord.wait(lambda: "round 2" in discord.answers())
            assert await asyncio.to_thread(process.end, signal.SIGTERM) == 0
        finally:
            await asyncio.to_thread(process.end)
        prompts = [f"say {number}" if number % 2 else f"count to {20 + number}" for number in range(8)]
        prompts += [f"say round {number}" for number in range(3)]
        assert sorted(crow.prompts()) == sorted(prompts)
        answers = discord.answers()
        assert len(answers) == len(prompts), answers
        interrupted = 0
        for prompt in prompts:
            words = prompt.removeprefix("say ")
            whole = (
                "\n".join(map(str, range(1, 1 + int(prompt.removeprefix("count to "))))) if "count" in prompt else words
            )
            if whole in answers:
                answers.remove(whole)
            else:
                cut = next(each for each in answers if "interrupted" in each)
                answers.remove(cut)
                interrupted += 1
        assert answers == []
        assert interrupted <= 1, "only one server was killed"


@pytest.mark.parametrize("seed", range(2))
async def test_a_webhook_whose_receiver_fails(seed: int, crow: Crow, tmp_path: Path) -> None:
    """The sender repeats its messages, the receiver fails, and crow-channels is restarted."""
    chance, name = random.Random(seed), f"hook{seed}"
    port = free_port()
    async with Hook() as hook:
        path = configure(tmp_path, crow, hook.settings(name, port))
        for stage in range(3):
            async with bridge(path):
                hook.failures.extend(chance.choices([503, 0, 200, 429], k=6))
                for number in range(stage * 3, stage * 3 + 3):
                    statuses = [
                        await hook.write(port, str(number), f"say {number}") for _ in range(chance.randint(1, 3))
                    ]
                    assert statuses[0] == 202
                    assert set(statuses[1:]) <= {200}
                wanted = stage * 3 + chance.randint(1, 3)
                await hook.wait(lambda least=wanted: len(hook.texts()) >= least)  # type: ignore[misc]
        async with bridge(path):
            await hook.wait(lambda: sorted(hook.texts()) == [str(number) for number in range(9)])
    assert crow.prompts(f"{name}:p") == [f"say {number}" for number in range(9)]

"""The page of `crow serve` in a real browser: `make interop-page`. Needs Chromium.

PAGE_FAULTS is the number of times that the connection breaks (1000); PAGE_PICTURES is a directory for pictures.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.chromium import PROGRAM, Chromium
from tests.support.server import ServerProcess, server_environment

FAULTS = int(os.environ.get("PAGE_FAULTS", "1000"))
PICTURES = os.environ.get("PAGE_PICTURES")

pytestmark = pytest.mark.timeout(3600)

SENT_BY_PAGE = """
  sessions.get(current.id) && [...document.querySelectorAll("#log .user")].map((each) => each.textContent)
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    assert PROGRAM, "Chromium is not installed"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("Twigs <b>and</b> string.\n")
    environment = server_environment(tmp_path / "home", CROW_SANDBOX="off")
    async with ServerProcess(env=environment, cwd=tmp_path) as started:
        yield started


async def start_session(browser: Chromium, server: ServerProcess, place: Path) -> None:
    await browser.open(server.base_url + "/")
    await browser.wait_for("document.getElementById('connection')?.textContent === 'Connected'")
    await browser.run(f"byId('directory').value = {json.dumps(str(place))}; byId('start').requestSubmit()")
    await browser.wait_for("current && current.isOpen")


async def send(browser: Chromium, text: str) -> None:
    await browser.run(f"byId('prompt').value = {json.dumps(text)}; byId('compose').requestSubmit()")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
async def test_a_person_prompts_and_answers_in_the_page(
    server: ServerProcess, tmp_path: Path, width: int, height: int
) -> None:
    async with Chromium(width, height) as browser:
        await start_session(browser, server, tmp_path / "work")
        await send(browser, "read notes.txt then edit notes.txt: string -> <img src=x onerror=alert(1)>")
        await browser.wait_for("document.querySelector('.question button')")
        if PICTURES:
            await browser.picture(Path(PICTURES) / f"question-{width}.png")
        assert "Twigs <b>and</b> string." in await browser.run("byId('log').innerText + byId('log').textContent")
        assert await browser.run("document.querySelectorAll('#log b, #log img, .question img').length") == 0
        await browser.run("document.querySelector('.question button').click()")
        await browser.wait_for("current.unanswered.size === 0 && !current.isRunning")
        assert "onerror" in (tmp_path / "work" / "notes.txt").read_text()
        if PICTURES:
            await browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            await browser.picture(Path(PICTURES) / f"answer-{width}.png")
        wide = await browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert wide, "the page scrolls sideways"
        unnamed = await browser.run(
            "[...document.querySelectorAll('button, input, select, textarea')].filter((each) => "
            "!each.textContent.trim() && !(each.labels && each.labels.length)).length"
        )
        assert unnamed == 0
        assert browser.errors == []


async def test_the_whole_output_of_a_command_is_shown(server: ServerProcess, tmp_path: Path) -> None:
    async with Chromium() as browser:
        await start_session(browser, server, tmp_path / "work")
        await send(browser, "run echo first; while [ ! -e go ]; do sleep 0.1; done; echo second")
        await browser.wait_for("document.querySelector('.question button')")
        await browser.run("document.querySelector('.question button').click()")
        await browser.wait_for("document.querySelector('#log details pre')?.textContent.includes('first')")
        (tmp_path / "work" / "go").touch()
        await browser.wait_for("current.unanswered.size === 0 && !current.isRunning")
        assert await browser.run("document.querySelector('#log details pre').textContent") == "first\nsecond"


async def test_each_question_about_a_running_call_is_shown_until_it_is_answered(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with Chromium() as browser:
        await start_session(browser, server, tmp_path / "work")
        await browser.run(
            "window.about = (id, title) => ask({ id, params: { sessionId: current.id, toolCall: { title, toolCallId: "
            "'c' }, options: [{ optionId: 'allow_once', kind: 'allow_once', name: 'Allow' }] } });"
            "window.shown = () => [...document.querySelectorAll('.question h2')].map((each) => each.textContent);"
        )
        await browser.run("about('q1', 'host A'); document.querySelector('.question button').click()")
        await browser.run("about('q2', 'host B')")
        assert await browser.run("shown()") == ["host B"]
        await browser.run(
            "onNotification({ method: 'session/update', params: { sessionId: current.id, update: "
            "{ sessionUpdate: 'tool_call_update', toolCallId: 'c', status: 'in_progress' } } })"
        )
        assert await browser.run("shown()") == ["host B"]
        await browser.run("document.querySelector('.question button').click(); connection.socket.close()")
        await browser.wait_for("connection.isOpen && current.isOpen")
        await browser.run("about('q3', 'host B')")
        assert await browser.run("shown()") == []
        await browser.run("about('q4', 'host B')")
        assert await browser.run("shown()") == ["host B"]


async def test_a_prompt_that_a_server_refuses_while_it_shuts_down_runs_on_the_next_connection(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with Chromium() as browser:
        await start_session(browser, server, tmp_path / "work")
        await browser.run(
            "window.request = connection.request; connection.request = async () => { throw new Refused("
            "{ message: 'This server is shutting down.', data: { reason: 'draining' } }); }"
        )
        await send(browser, "say hello")
        await browser.run("new Promise((resolve) => setTimeout(resolve, 50))")
        await browser.run("connection.request = request; connection.socket.close()")
        await browser.wait_for("document.querySelector('#log .agent')?.textContent.includes('hello')")
        await browser.wait_for("current.unanswered.size === 0")


async def test_a_question_is_shown_within_200_ms(server: ServerProcess, tmp_path: Path) -> None:
    async with Chromium() as browser:
        await start_session(browser, server, tmp_path / "work")
        await browser.run(
            "window.times = []; const before = ask; ask = (request) => { const since = performance.now();"
            " before(request); requestAnimationFrame(() => times.push(performance.now() - since)); }"
        )
        await send(browser, "edit notes.txt: string -> moss")
        await browser.wait_for("times.length === 1")
        print("question to screen:", await browser.run("times[0]"), "ms")


async def test_no_prompt_and_no_answer_is_lost_or_given_twice(server: ServerProcess, tmp_path: Path) -> None:
    source = random.Random(1)
    place = tmp_path / "work"
    counted = place / "count.txt"
    counted.write_text("")
    async with Chromium() as browser:
        await start_session(browser, server, place)
        sent = faults = 0
        while faults < FAULTS:
            sent += 1
            await send(browser, f"run echo {sent} >> count.txt")
            for _ in range(source.randint(0, 6)):
                faults += 1
                pause_ms = source.randint(0, 60)
                await browser.run(
                    "new Promise((resolve) => setTimeout(() => { connection.socket?.close(); resolve(); }, "
                    f"{pause_ms}))"
                )
                if source.random() < 0.5:  # an answer just before or while the connection breaks
                    await browser.run("document.querySelector('.question button')?.click()")
            while await browser.run("current.unanswered.size > 0 || current.isRunning"):
                await browser.run("document.querySelector('.question button')?.click()")
                await browser.run("new Promise((resolve) => setTimeout(resolve, 30))")
            assert counted.read_text().split() == [str(number) for number in range(1, sent + 1)]
        shown = await browser.run(SENT_BY_PAGE)
        assert shown == [f"run echo {number} >> count.txt" for number in range(1, sent + 1)]
        calls = await browser.run("current.calls.size")
        live = await browser.run("byId('log').textContent")
        await browser.run("current.clear(); current.isOpen = false; show(current)")
        await browser.wait_for("current.isOpen && current.opening === null")
        assert await browser.run("current.calls.size") == calls == sent
        print(f"{faults} faults, {sent} prompts, each run once; {len(live)} characters shown")

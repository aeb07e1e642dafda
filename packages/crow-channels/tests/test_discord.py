"""A bot on a Discord that speaks the real gateway's wire form, with a real crow behind it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from crow_channels import hub
from crow_channels.text import units
from tests.crow import Crow, bridge, configure
from tests.fake_discord import CHANNEL, DIRECT, THREAD, FakeDiscord, buttons

LISTED, SECOND, UNLISTED = "1", "2", "66"

Start = Callable[..., Any]


def settings(discord: FakeDiscord, name: str, rule: str = "") -> str:
    return (
        f'[chats.{name}]\n{discord.settings}[chats.{name}.users]\n{LISTED} = "ann"\n{SECOND} = "ann"\n'
        f'[chats.{name}.direct]\n[chats.{name}.channels."{CHANNEL}"]\n{rule}\n'
    )


@pytest.fixture
def start(discord: FakeDiscord, crow: Crow, tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """Starts the bot, with an optional rule for the channel. The chat has the name of the test."""
    name = request.function.__name__

    @asynccontextmanager
    async def started(rule: str = "") -> AsyncIterator[str]:
        before = discord.sessions
        async with bridge(configure(tmp_path, crow, settings(discord, name, rule))):
            await discord.wait(lambda: discord.sessions > before)
            yield name

    return started


def asked(discord: FakeDiscord) -> list[dict[str, Any]]:
    return [message for message in discord.messages[CHANNEL] if buttons(message)]


async def test_channels_threads_and_direct_messages_are_sessions_of_their_own(
    discord: FakeDiscord, start: Start, crow: Crow
) -> None:
    async with start() as name:
        for number, place in enumerate((CHANNEL, THREAD, DIRECT)):
            discord.write(f"say answer {number}", place=place)
            discord.write("summarise", place=place)
        for number, place in enumerate((CHANNEL, THREAD, DIRECT)):
            await discord.wait(lambda p=place, n=number: f"say answer {n}" in "".join(discord.answers(p)))
            first, second = discord.answers(place)
            assert first == f"answer {number}"
            assert [f"say answer {other}" in second for other in range(3)] == [other == number for other in range(3)]
            replies = [str(each["message_reference"]["message_id"]) for each in discord.messages[place][2:]]
            assert replies == [each["id"] for each in discord.messages[place][:2]]
    assert crow.prompts(f"{name}:{THREAD}") == ["say answer 1", "summarise"]


async def test_only_the_one_whose_turn_it_is_answers_a_question(discord: FakeDiscord, start: Start, crow: Crow) -> None:
    async with start():
        discord.write("write asked.txt: hi")
        question = (await discord.wait(lambda: asked(discord)))[0]
        assert "asked.txt" in question["content"]
        assert {"Allow", "Reject"} <= {each["label"] for each in buttons(question)}
        discord.press(question, "Allow", author=SECOND)
        discord.press(question, "Allow", author=UNLISTED)
        discord.write("1", author=SECOND)  # a number is no answer where there are buttons
        await discord.wait(lambda: len(discord.responses) == 2)
        assert {each["content"] for each in discord.responses} == {"Only the person who asked can answer this."}
        assert not (crow.workspace / "asked.txt").exists()
        discord.press(question, "Allow")
        await discord.wait(lambda: len(discord.responses) == 3 and len(discord.answers()) == 3)
        assert discord.responses[-1]["content"] == "You chose: Allow"
        assert question["content"].endswith("→ Allow")
        assert not buttons(question)
        discord.messages[CHANNEL].append(
            stale := question
            | {"components": [{"components": [{"label": "Allow", "custom_id": "crow:" + "0" * 24 + ":0"}]}]}
        )
        discord.press(stale, "Allow")
        await discord.wait(lambda: len(discord.responses) == 4)
        assert discord.responses[-1]["content"] == "This question is no longer open."
    assert (crow.workspace / "asked.txt").read_text() == "hi\n"


async def test_anyone_may_answer_if_the_channel_says_so_and_reject(
    discord: FakeDiscord, start: Start, crow: Crow
) -> None:
    async with start('answers = "anyone"'):
        discord.write("write refused.txt: hi")
        question = (await discord.wait(lambda: asked(discord)))[0]
        discord.press(question, "Reject", author=UNLISTED)
        discord.press(question, "Reject", author=SECOND)
        await discord.wait(lambda: len(discord.responses) == 2 and question["content"].endswith("→ Reject"))
    assert not (crow.workspace / "refused.txt").exists()


async def test_nobody_unlisted_gets_in(discord: FakeDiscord, start: Start, crow: Crow, tmp_path: Path) -> None:
    async with start() as name:
        discord.write("say unlisted", author=UNLISTED)
        discord.write("say unlisted", author=UNLISTED, place=DIRECT)
        discord.write("say bot", about={"bot": True})
        discord.write("say webhook", webhook_id="5")
        discord.write("say joined", type=7)
        discord.command("new", author=UNLISTED)
        quoted = discord.messages[CHANNEL][0]
        discord.write(
            "say hello",
            type=19,
            message_reference={"channel_id": CHANNEL, "message_id": quoted["id"]},
            referenced_message=quoted,
        )
        await discord.wait(lambda: discord.answers() == ["hello"] and discord.responses)
        assert discord.answers(DIRECT) == []
        assert [(each["content"], each["flags"]) for each in discord.responses] == [("You are not listed here.", 64)]
    assert crow.prompts(f"{name}:%") == ["say hello"]
    with closing(sqlite3.connect(tmp_path / "state.db")) as database:
        dump = "\n".join(database.iterdump())
    assert "say unlisted" not in dump
    assert f"'{UNLISTED}'" not in dump


async def test_a_channel_that_is_not_listed_is_ignored(discord: FakeDiscord, start: Start, crow: Crow) -> None:
    discord.messages["799"] = []
    async with start('users = ["2"]'):
        discord.write("say elsewhere", place="799")
        discord.write("say not here")
        discord.write("say allowed", author=SECOND)
        await discord.wait(lambda: discord.answers() == ["allowed"])
        assert discord.answers("799") == []


async def test_mentions_are_needed_if_the_channel_says_so(discord: FakeDiscord, start: Start) -> None:
    async with start('trigger = "mention"'):
        discord.write("say not meant")
        discord.write("/shrug")
        discord.write("<@900> say meant")
        await discord.wait(lambda: discord.answers() == ["meant"])


async def test_mentions_in_an_answer_notify_nobody(discord: FakeDiscord, start: Start) -> None:
    async with start():
        discord.write("say @everyone and @here, <@1> and <@&5>")
        await discord.wait(lambda: "5>" in "".join(discord.answers()))
        assert discord.answers() == ["@\u200beveryone and @\u200bhere, <\u200b@1> and <\u200b@&5>"]


async def test_commands_work_and_those_that_are_not_listed_do_not(
    discord: FakeDiscord, start: Start, crow: Crow
) -> None:
    async with start() as name:
        said = discord.answers
        discord.write("say before")
        await discord.wait(lambda: said() == ["before"])
        discord.write("/history")
        discord.write("/mode auto")
        discord.write("/permissions allow shell")
        discord.write("/mode plan")
        await discord.wait(lambda: "plan" in "".join(said()[4:]))
        assert said()[0] == "before"
        assert "say before" in said()[1]
        assert said()[2].startswith('The mode "auto" cannot be chosen here.')
        assert said()[3].startswith("/permissions cannot be used here.")
        assert "plan" in said()[4]
        discord.command("new")
        await discord.wait(lambda: len(said()) == 6)
        discord.write("summarise")
        await discord.wait(lambda: said()[-1] == "Nothing has happened in this session yet.")
        assert len(said()) == 7
        assert discord.commands.count("new") == 1
    assert crow.prompts(f"{name}:{CHANNEL}") == ["summarise"]
    assert crow.rows("SELECT count(*) FROM sessions WHERE alias = ?", f"{name}:{CHANNEL}") == [(1,)]


async def test_cancel_ends_the_turn_and_what_waits_goes_on(discord: FakeDiscord, start: Start) -> None:
    async with start():
        discord.write("count to 1000")
        discord.write("say next")
        await discord.wait(lambda: discord.answers())
        discord.write("/cancel", author=SECOND)
        await discord.wait(lambda: discord.answers()[1:] == ["next"])
        assert discord.answers()[0].endswith("(Cancelled.)")


async def test_an_answer_grows_and_a_long_one_ends_in_a_file(discord: FakeDiscord, start: Start) -> None:
    lines = "\n".join(f"line-{number}-{'x' * 90}" for number in range(180))
    async with start():
        discord.write("count to 20")
        await discord.wait(lambda: discord.answers() and discord.answers()[0].endswith("20"))
        assert discord.edits > 1
        discord.failures.extend(["429", "503", "lost"])
        discord.write("say ```\n" + "print(1)--------------------\n" * 120 + "```")
        await discord.wait(lambda: "".join(discord.answers()).count("print(1)") == 120)
        pieces = discord.answers()[1:]
        assert all(piece.count("```") == 2 and units(piece) <= 2000 for piece in pieces)
        discord.write(f"say {lines}")
        await discord.wait(lambda: discord.uploads)
        assert discord.uploads == [("answer.md", lines.encode())]
        assert len(discord.answers()) == 3 + 8
        assert discord.answers()[-1] == "The answer is long. All of it is in the file."


async def test_text_files_and_images_reach_the_model(discord: FakeDiscord, start: Start, crow: Crow) -> None:
    async with start() as name:
        discord.write("say got it", files=2)
        await discord.wait(lambda: discord.answers() == ["got it"])
    bodies = [
        row[0]
        for row in crow.rows(
            "SELECT body FROM entry_bodies WHERE kind = 'user'"
            " AND session IN (SELECT id FROM sessions WHERE alias = ?)",
            f"{name}:{CHANNEL}",
        )
    ]
    assert len(bodies) == 1
    assert bodies[0].count("hello from a file") == 2
    assert "note1.txt" in bodies[0]


async def test_what_was_written_while_the_bot_was_away_is_answered_once(
    discord: FakeDiscord, start: Start, crow: Crow
) -> None:
    async with start() as name:
        discord.write("say one")
        await discord.wait(lambda: discord.answers() == ["one"])
        await discord.drop()
        discord.write("say two")  # the gateway sends it when the bot resumes
        await discord.wait(lambda: discord.answers() == ["one", "two"])
        assert discord.sessions == 1
    discord.write("say three")
    discord.write("say secret", author=UNLISTED)
    discord.write("say four")
    async with start():
        await discord.wait(lambda: discord.answers() == ["one", "two", "three", "four"])
    assert crow.prompts(f"{name}:{CHANNEL}") == [f"say {word}" for word in ("one", "two", "three", "four")]


async def test_a_message_whose_sending_was_cut_off_is_found_after_a_restart(
    discord: FakeDiscord, start: Start, tmp_path: Path
) -> None:
    async with start():
        discord.failures.extend(["lost", *["503"] * 1000])  # it arrives, and nobody learns of it
        discord.write("say once")
        await discord.wait(lambda: discord.answers() == ["once"])
    discord.failures.clear()
    discord.forget_nonces()
    async with start():
        discord.write("say twice")
        await discord.wait(lambda: discord.answers() == ["once", "twice"])


async def test_a_question_survives_a_restart(discord: FakeDiscord, start: Start, crow: Crow) -> None:
    async with start():
        discord.write("write restarted.txt: hi")
        question = (await discord.wait(lambda: asked(discord)))[0]
    async with start():
        discord.press(question, "Allow")
        await discord.wait(lambda: question["content"].endswith("→ Allow"))
        await discord.wait(lambda: "The tool returned" in "".join(discord.answers()))
        assert len(discord.answers()) == 2
    assert (crow.workspace / "restarted.txt").read_text() == "hi\n"


async def test_too_many_waiting_messages_are_refused(
    discord: FakeDiscord, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_MAX_WAITING", 2)
    async with start():
        discord.write("count to 1000")
        await discord.wait(discord.answers)
        for number in range(4):
            discord.write(f"say {number}")
        discord.write("/cancel")
        await discord.wait(lambda: len(discord.answers()) == 3)
        assert [text.split("\n")[-1].split(".")[0] for text in discord.answers()] == [
            "(Cancelled",
            "0",
            "Too many messages wait here",
        ]

"""Tests how slash commands are parsed, listed and answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.agent.commands import COMMANDS, parse
from crow.agent.commands.handlers import HANDLERS
from crow.agent.templates import ParsedCommand
from crow.domain.entries import Command
from tests.agent.harness import opened, text
from tests.support.scripted_model import Say, ScriptedModel


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("/help", ParsedCommand(name="help", argument="")),
        ("/compact  the parser ", ParsedCommand(name="compact", argument="the parser")),
        ("/compact\nthe parser", ParsedCommand(name="compact", argument="the parser")),
        ("/etc/hosts is what?", None),
        ("/helpless", None),
        ("/", None),
        ("/ help", None),
        (" /help", None),
        ("help", None),
    ],
)
def test_known_name_at_the_start_is_a_command_and_anything_else_a_prompt(
    typed: str, command: ParsedCommand | None
) -> None:
    assert parse(typed) == command


def test_every_command_has_a_handler_and_a_description() -> None:
    assert {spec.name for spec in COMMANDS} == set(HANDLERS)
    assert all(spec.name.islower() and spec.description for spec in COMMANDS)


async def test_command_is_stored_with_its_answer_and_the_model_never_sees_it(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["hi"]))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("/help")) == "end_turn"
        assert await run.kinds() == ["Command", "TurnEnd"]
        (told,) = run.client.stored(Command)
        assert [told.answer.count(f"`/{spec.name}{' ' if spec.hint else '`'}") for spec in COMMANDS] == [1] * len(
            COMMANDS
        )
        await run.session.prompt(text("Hello"))
        assert "/help" not in str(model.requests[0].messages)


async def test_bad_argument_is_answered_with_what_would_work(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel()) as run:
        assert await run.session.prompt(text("/help flying")) == "end_turn"
        (told,) = run.client.stored(Command)
        assert told.answer.startswith("There is no command /flying. The commands are:\n- `/undo")

"""Questions: forms, answers that outlive a connection, and long ones. The chat is a list of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from crow_channels.chat import Inbox, Limits, Outgoing
from crow_channels.delivery import Delivery
from crow_channels.errors import ChatRefused
from crow_channels.questions import Questions
from crow_channels.state import Prompt, Question, State
from crow_channels.text import units


class Paper:
    """A chat that keeps its messages."""

    def __init__(self, *, chars: int = 2000, has_buttons: bool = True, file_bytes: int = 1_000_000) -> None:
        self.limits = Limits(chars=chars, can_edit=True, has_buttons=has_buttons, file_bytes=file_bytes)
        self.messages: list[Outgoing] = []
        self.changed = asyncio.Event()

    async def run(self, inbox: Inbox) -> None:
        raise ChatRefused("nobody writes here")

    async def send(self, place: str, message: Outgoing) -> str:
        assert units(message.text) <= self.limits.chars
        self.messages.append(message)
        self.changed.set()
        return str(len(self.messages) - 1)

    async def edit(self, place: str, message_id: str, message: Outgoing) -> None:
        assert units(message.text) <= self.limits.chars
        self.messages[int(message_id)] = message

    async def find(self, place: str, message: Outgoing, known: Collection[str]) -> str | None:
        return None


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[State]:
    one = State(tmp_path / "state.db")
    one.add("c", "p", "m", user="u", principal="ann")
    yield one
    one.close()


def questions(state: State, chat: Paper) -> tuple[Questions, Prompt]:
    prompt = state.next_prompt("c", "p")
    assert prompt is not None
    return Questions(chat, state, prompt, Delivery(chat, state, prompt)), prompt


async def answered(
    state: State, asked: Questions, prompt: Prompt, chat: Paper, choose: Callable[[Question], str]
) -> None:
    """Answer the newest question as soon as it is in the chat."""
    count = len(chat.messages)
    async with asyncio.timeout(60):
        while len(chat.messages) == count:
            chat.changed.clear()
            await chat.changed.wait()
    newest = state.questions(prompt.number)[-1]
    assert state.answer(newest.id, choose(newest))
    asked.wake()


PERMISSION: dict[str, Any] = {
    "toolCall": {"toolCallId": "call_1_0", "title": "Run `make @everyone`"},
    "options": [{"optionId": "allow_once", "name": "Allow"}, {"optionId": "reject_once", "name": "Reject"}],
}


async def test_an_answer_outlives_the_connection_that_asked(state: State) -> None:
    chat = Paper()
    asked, prompt = questions(state, chat)
    first = asyncio.create_task(asked.ask("session/request_permission", PERMISSION))
    async with asyncio.timeout(60):
        await chat.changed.wait()
    assert chat.messages[0].text == "**May I?** Run `make @\u200beveryone`"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    question = state.questions(prompt.number)[0]
    assert state.answer(question.id, "allow_once")
    again, _ = questions(state, chat)  # after a restart
    allowed = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
    assert await again.ask("session/request_permission", PERMISSION) == allowed
    assert [message.text.split("\n")[-1] for message in chat.messages] == ["→ Allow"]
    assert chat.messages[0].buttons == ()
    again.note_progress("call_1_0")  # the call runs; if it asks again, it means something new
    task = asyncio.create_task(again.ask("session/request_permission", PERMISSION))
    await answered(state, again, prompt, chat, lambda question: question.choices[1][0])
    assert (await task)["outcome"]["optionId"] == "reject_once"
    assert len(chat.messages) == 2


async def test_a_question_that_nobody_needs_any_more_loses_its_buttons(state: State) -> None:
    chat = Paper()
    asked, prompt = questions(state, chat)
    task = asyncio.create_task(asked.ask("session/request_permission", PERMISSION))
    async with asyncio.timeout(60):
        await chat.changed.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asked.finish()
    assert chat.messages[0].text.endswith("No answer is needed any more.")
    assert chat.messages[0].buttons == ()
    assert not state.answer(state.questions(prompt.number)[0].id, "allow_once")


@pytest.mark.parametrize("has_buttons", [True, False])
@pytest.mark.parametrize("file_bytes", [0, 1_000_000])
async def test_a_long_question_says_that_it_was_cut(state: State, has_buttons: bool, file_bytes: int) -> None:
    chat = Paper(chars=400, has_buttons=has_buttons, file_bytes=file_bytes)
    asked, prompt = questions(state, chat)
    content = [{"type": "content", "content": {"type": "text", "text": "echo safe; " * 200 + "rm -rf ~ ```"}}]
    params = PERMISSION | {"toolCall": PERMISSION["toolCall"] | {"content": content}}
    task = asyncio.create_task(asked.ask("session/request_permission", params))
    await answered(state, asked, prompt, chat, lambda question: question.choices[1][0])
    assert (await task)["outcome"]["optionId"] == "reject_once"
    files = chat.messages[0].files
    assert bool(files) == bool(file_bytes) or chat.messages[0].text.endswith("→ Reject")


async def test_a_form_is_asked_field_by_field(state: State) -> None:
    chat = Paper()
    asked, prompt = questions(state, chat)
    fields = {
        "size": {"type": "integer", "title": "Size", "description": "In GB"},
        "color": {"type": "string", "enum": ["red", "green"]},
        "fast": {"type": "boolean"},
        "share": {"type": "number"},
    }
    form = {"mode": "form", "message": "Which one?", "requestedSchema": {"type": "object", "properties": fields}}
    task = asyncio.create_task(asked.ask("elicitation/create", form))
    for answer in ("many", "3", "green", "true", "nan", "0.5"):
        await answered(state, asked, prompt, chat, lambda _, given=answer: given)  # type: ignore[misc]
    assert await task == {"action": "accept", "content": {"size": 3, "color": "green", "fast": True, "share": 0.5}}
    assert [message.text for message in chat.messages] == [
        "Which one?\n**Size**\nIn GB\n→ many",
        '"many" is not a valid integer.\n**Size**\n→ 3',
        "Which one?\n**color**\n→ green",
        "Which one?\n**fast**\n→ Yes",
        "Which one?\n**share**\n→ nan",
        '"nan" is not a valid number.\n**share**\n→ 0.5',
    ]
    task = asyncio.create_task(asked.ask("elicitation/create", form | {"requestedSchema": {"properties": {}}}))
    await answered(state, asked, prompt, chat, lambda question: question.choices[1][0])
    assert await task == {"action": "decline"}
    assert await asked.ask("elicitation/create", {"mode": "url", "url": "http://localhost"}) == {"action": "cancel"}

"""Asks people what the server asks, and gives it their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from crow_channels.chat import Button, Chat, File
from crow_channels.delivery import QUESTIONS, Delivery, cut
from crow_channels.state import Prompt, Question, State
from crow_channels.text import MIN_CHARS, harmless, line

_MAX_CHOICES, _MAX_FIELDS = 20, 8
_LABEL_CHARS, _TITLE_CHARS, _MAX_TEXT = 76, 300, 200_000
_ROOM = 70
"""Room for the words that a question was cut."""

DECLINE = "\x00decline"
"""The answer of somebody who declines to fill in a form."""

_FORM = "form"

CANCELLED: Mapping[str, Any] = {"outcome": {"outcome": "cancelled"}}


class Questions:
    """The questions of one turn."""

    def __init__(self, chat: Chat, state: State, prompt: Prompt, delivery: Delivery) -> None:
        self._chat, self._state, self._prompt, self._delivery = chat, state, prompt, delivery
        self._answered = asyncio.Event()
        self._closing = set[asyncio.Future[None]]()

    def wake(self) -> None:
        """Look again whether a question was answered."""
        self._answered.set()

    async def ask(self, method: str, params: Mapping[str, Any]) -> Any:
        """Ask one question, and return the result of the server's request."""
        if method == "session/request_permission":
            return await self._permission(params)
        answer = await self._form(params)
        self._state.close_answered(self._prompt.number, _FORM)
        return answer

    def note_progress(self, call_id: str) -> None:
        """Forget the answers about a call that goes on. If the server asks about it again, it means a new question."""
        self._state.close_answered(self._prompt.number, call_id)

    def drop(self) -> None:
        """Close the questions that nobody has answered, because the server no longer waits for an answer."""
        for question in self._state.questions(self._prompt.number):
            if question.is_open and question.answer is None:
                self._state.close_question(question.id)
                task = asyncio.ensure_future(self._show_end(question, "No answer is needed any more."))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def finish(self) -> None:
        """Close all questions, because the turn has ended."""
        self.drop()
        await asyncio.gather(*self._closing)

    async def _permission(self, params: Mapping[str, Any]) -> Any:
        call, offered = params.get("toolCall") or {}, params.get("options") or ()
        choices = tuple((str(each["optionId"]), str(each["name"])) for each in offered[:_MAX_CHOICES])
        if not choices:
            return CANCELLED
        about = {key: value for key, value in params.items() if key != "_meta"}
        answer = await self._answer(str(call.get("toolCallId")), about, _permission_text(call), choices)
        return CANCELLED if answer is None else {"outcome": {"outcome": "selected", "optionId": answer}}

    async def _form(self, params: Mapping[str, Any]) -> Any:
        """Ask for the fields of a form, one after the other."""
        schema = params.get("requestedSchema") or {}
        fields = schema.get("properties") or {}
        if params.get("mode") != "form" or len(fields) > _MAX_FIELDS:
            return {"action": "cancel"}
        message, content = harmless(str(params.get("message", ""))), {}
        for name, field in fields.items():
            title = harmless(line(str(field.get("title") or name), _TITLE_CHARS))
            about = {"form": params, "field": name}
            text = f"{message}\n**{title}**" + (f"\n{harmless(str(d))}" if (d := field.get("description")) else "")
            while True:
                answer = await self._answer(_FORM, about, text, _choices_of(field))
                if answer in (None, DECLINE):
                    return {"action": "decline"}
                with suppress(ValueError):
                    content[name] = _value_of(field, answer or "")
                    break
                about = about | {"again": about.get("again", 0) + 1}
                text = f'"{harmless(line(answer or "", 80))}" is not a valid {field.get("type", "value")}.\n**{title}**'
        confirmation = (("ok", "OK"), (DECLINE, "Decline"))
        if fields or await self._answer(_FORM, {"form": params}, message, confirmation) == "ok":
            return {"action": "accept", "content": content}
        return {"action": "decline"}

    async def _answer(self, call_id: str, about: object, text: str, choices: tuple[tuple[str, str], ...]) -> str | None:
        """Ask, and wait for the answer. If the server asks again because the connection broke, the question keeps its
        message and its answer."""
        name = f"{call_id}:{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}"
        question = self._state.question_named(self._prompt.number, name)
        if question is None:
            question = Question(
                id=secrets.token_hex(12),
                prompt=self._prompt.number,
                number=QUESTIONS + len(self._state.questions(self._prompt.number)),
                name=name,
                text=text,
                choices=choices,
                answer=None,
                is_open=True,
            )
            self._state.add_question(question)
        posting = asyncio.ensure_future(self._post(question))
        try:
            while (found := self._state.question(question.id)) is not None and found.answer is None and found.is_open:
                self._answered.clear()
                await self._answered.wait()
        finally:
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        answer = None if found is None else found.answer
        label = next((label for value, label in choices if value == answer), answer or "")
        await self._show_end(question, f"→ {harmless(line(label, _TITLE_CHARS))}")
        return answer

    async def _post(self, question: Question) -> None:
        shown, buttons, end = self._shown(question), list[Button](), ""
        if not question.choices:
            end = "\nAnswer with a message."
        elif self._chat.limits.has_buttons:
            buttons = [
                Button(
                    id=f"crow:{question.id}:{place}",
                    label=harmless(line(label, _LABEL_CHARS)),
                    is_refusal=value.startswith("reject") or value == DECLINE,
                )
                for place, (value, label) in enumerate(question.choices)
            ]
        else:
            numbered = (f"{place}. {line(label, _LABEL_CHARS)}" for place, (_, label) in enumerate(question.choices, 1))
            end = cut("\n" + harmless("\n".join(numbered)) + "\nAnswer with the number.", self._end_chars)
        files: Sequence[File] = ()
        if shown != question.text:
            if self._chat.limits.file_bytes:
                data = question.text.encode(errors="replace")[: self._chat.limits.file_bytes]
                files = (File(name="question.md", mime="text/markdown", data=data),)
            end = f"\n(This is only the beginning.{' All of it is in the file.' if files else ''}){end}"
        await self._delivery.put(question.number, shown + end, buttons=buttons, files=files)

    async def _show_end(self, question: Question, outcome: str) -> None:
        """Show how a question ended, without its buttons. The state keeps an answer for now: if the connection breaks,
        the server asks again."""
        if self._chat.limits.can_edit and self._state.post(self._prompt.number, question.number) is not None:
            await self._delivery.put(question.number, f"{self._shown(question)}\n{cut(outcome, 340)}", tries=2)

    @property
    def _end_chars(self) -> int:
        """The longest list of numbered answers."""
        return self._chat.limits.chars // 2

    def _shown(self, question: Question) -> str:
        """Return as much of a question as fits, beside its answers or its outcome."""
        has_list = bool(question.choices) and not self._chat.limits.has_buttons
        room = self._chat.limits.chars - _ROOM - (self._end_chars if has_list else 300)
        return cut(question.text, max(room, MIN_CHARS + 2))


def _permission_text(call: Mapping[str, Any]) -> str:
    """Describe a tool call that needs a permission."""
    parts = [f"**May I?** {harmless(line(str(call.get('title') or 'a tool call'), _TITLE_CHARS))}"]
    for content in call.get("content") or ():
        match content:
            case {"type": "content", "content": {"type": "text", "text": str(text)}}:
                parts.append(_fenced(text))
            case {"type": "diff", "path": str(path), "newText": str(text)}:
                parts.append(f"{harmless(line(path, _TITLE_CHARS))}\n{_fenced(text)}")
    return "\n".join(parts)


def _fenced(text: str) -> str:
    text = harmless(text)
    fence = "`" * min(20, max(3, 1 + max(map(len, _runs(text)), default=0)))
    short = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "\n…"
    return f"{fence}\n{short.rstrip()}\n{fence}"


def _runs(text: str) -> list[str]:
    return "".join(character if character == "`" else " " for character in text).split()


def _choices_of(field: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the answers that a form field offers. None of them means that the answer is a text."""
    if field.get("type") == "boolean":
        return (("true", "Yes"), ("false", "No"), (DECLINE, "Decline"))
    titled = field.get("oneOf") or [{"const": value} for value in field.get("enum") or ()]
    if not titled or len(titled) >= _MAX_CHOICES:
        return ()
    choices = ((str(each.get("const")), str(each.get("title") or each.get("const"))) for each in titled)
    return (*choices, (DECLINE, "Decline"))


def _value_of(field: Mapping[str, Any], answer: str) -> Any:
    """Return the answer as the field wants it. :raises ValueError: it is not valid."""
    match field.get("type"):
        case "boolean":
            return answer == "true"
        case "integer":
            return int(answer)
        case "number":
            number = float(answer)
            if not math.isfinite(number):  # JSON has no such numbers
                raise ValueError(answer)
            return number
        case "string" if len(answer) < field.get("minLength", 0) or len(answer) > field.get("maxLength", 4_000):
            raise ValueError(answer)
        case "array":
            return [answer]
        case _:
            return answer

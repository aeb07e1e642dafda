"""Takes what people write in chats: checks who they are, stores it, and starts a worker for each channel."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import Mapping
from typing import Any

from crow_channels.chat import Chat, Incoming, Verdict
from crow_channels.config import ChatConfig, Rule
from crow_channels.errors import StateError
from crow_channels.state import Question, State
from crow_channels.text import harmless, line
from crow_channels.worker import Shared, Worker

logger = logging.getLogger(__name__)

MAX_TEXT = 100_000
"""The longest message that is passed on, in characters."""

_FAILED = "⚠ Something went wrong in crow-channels. Its log has the details."
_MAX_WAITING = 50
"""At most this many messages of a channel wait."""
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MAX_IMAGE_BYTES, _MAX_TEXT_FILE_BYTES, _MAX_ALL_BYTES, _MAX_FILES = 5_000_000, 256_000, 12_000_000, 10
_COMMAND = re.compile(r"/([A-Za-z][^\s/]*)(?:\s+(.*))?", re.DOTALL)
_BUTTON = re.compile(r"crow:([0-9a-f]{24}):(\d{1,2})")


class Hub:
    """The inbox of one chat, and the workers of its channels."""

    def __init__(self, shared: Shared, config: ChatConfig, chat: Chat, tasks: asyncio.TaskGroup) -> None:
        self._shared, self._config, self._chat, self._tasks = shared, config, chat, tasks
        self._state: State = shared.state
        self._workers: dict[str, Worker] = {}

    def start(self) -> None:
        """Go on with the prompts that a restart has interrupted."""
        for chat, place in self._state.open_places():
            if chat == self._config.name:
                parent, is_direct = self._state.about(chat, place)
                self._wake(place, self._rule(place, parent, is_direct) or Rule())

    # Who may.

    def _rule(self, place: str, parent: str | None, is_direct: bool) -> Rule | None:
        if is_direct:
            return self._config.direct
        channels = self._config.channels
        found = channels.get(place) or (channels.get(parent) if parent is not None else None)
        return found or channels.get("*")

    def _permitted(self, place: str, parent: str | None, is_direct: bool, user: str) -> tuple[Rule, str] | None:
        """Return the rule of a place and the principal of a user. None if the user may not write there."""
        rule, principal = self._rule(place, parent, is_direct), self._config.users.get(user)
        if rule is None or principal is None or (rule.users is not None and user not in rule.users):
            return None
        return rule, principal

    def is_listed(self, message: Incoming) -> bool:
        """See `Inbox`."""
        return self._permitted(message.place, message.parent, message.is_direct, message.user) is not None

    def places(self) -> Mapping[str, str]:
        """See `Inbox`."""
        return dict.fromkeys(self._config.channels.keys() - {"*"}, "") | self._state.places(self._config.name)

    def begin(self, place: str, message_id: str) -> None:
        """See `Inbox`."""
        self._state.see(self._config.name, place, message_id, None, False)

    # What people write.

    async def message(self, message: Incoming) -> Verdict:
        """See `Inbox`."""
        permitted = self._permitted(message.place, message.parent, message.is_direct, message.user)
        if permitted is None:
            logger.info("Ignored a message from %s in %s, who is not listed", line(message.user, 80), message.place)
            return "denied"
        rule, principal = permitted
        name = self._config.name
        if self._state.knows(name, message.place, message.id):
            return "duplicate"
        # The newest message is remembered last. If this process dies before that, the message is fetched again.
        self._take(message, rule, principal)
        self._state.see(name, message.place, message.id, message.parent, message.is_direct)
        return "accepted"

    def _take(self, message: Incoming, rule: Rule, principal: str) -> None:
        text = message.text.strip()
        command = _COMMAND.fullmatch(text)
        is_known = command is not None and command[1] in (*rule.commands, "cancel")
        if rule.trigger == "mention" and not (message.is_addressed or is_known):
            if self._answers_question(message, text):
                self._keep(message, principal)
        elif command is not None and command[1] == "cancel":
            self._cancel(message, rule, principal)
        elif command is not None and (problem := _problem(command[1], (command[2] or "").strip(), rule)):
            self._reply(message, rule, principal, problem)
        elif command is None and self._answers_question(message, text):
            self._keep(message, principal)
        elif (waiting := self._state.waiting(self._config.name, message.place)) >= _MAX_WAITING:
            if waiting == _MAX_WAITING:
                self._reply(message, rule, principal, "Too many messages wait here. This one is ignored.")
            else:
                self._keep(message, principal)
        elif blocks := _blocks(message, text):
            self._state.add(
                *(self._config.name, message.place, message.id),
                user=message.user,
                principal=principal,
                blocks=blocks,
            )
            self._wake(message.place, rule)

    def _keep(self, message: Incoming, principal: str) -> None:
        """Remember a message that needs no answer."""
        self._state.add(
            *(self._config.name, message.place, message.id), user=message.user, principal=principal, stage="done"
        )

    def _reply(self, message: Incoming, rule: Rule, principal: str, text: str) -> None:
        """Answer a message without the server."""
        self._state.add(
            *(self._config.name, message.place, message.id),
            user=message.user,
            principal=principal,
            stage="answered",
            text=text,
        )
        self._wake(message.place, rule)

    def _cancel(self, message: Incoming, rule: Rule, principal: str) -> None:
        number = self._state.cancel(self._config.name, message.place)
        if number is None:
            self._reply(message, rule, principal, "Nothing is running.")
            return
        self._keep(message, principal)
        if (worker := self._workers.get(message.place)) is not None:
            worker.cancel(number)

    def _answers_question(self, message: Incoming, text: str) -> bool:
        """Take a message as the answer to an open question, if it is one."""
        worker = self._workers.get(message.place)
        if worker is None or (prompt := worker.current) is None or not self._may_answer(message.place, message.user):
            return False
        for question in self._state.questions(prompt.number):
            value = _chosen(question, text, has_buttons=self._chat.limits.has_buttons)
            if question.is_open and question.answer is None and value is not None:
                self._state.answer(question.id, value)
                worker.wake()
                return True
        return False

    async def press(self, button_id: str, *, place: str, user: str) -> str:
        """See `Inbox`."""
        found = _BUTTON.fullmatch(button_id)
        question = self._state.question(found[1]) if found is not None else None
        worker = self._workers.get(place)
        prompt = worker.current if worker is not None else None
        # A question is only answered in its place, so that the rule of that place holds.
        if found is None or question is None or prompt is None or prompt.number != question.prompt:
            return "This question is no longer open."
        if not self._may_answer(place, user):
            return "Only the person who asked can answer this."
        if int(found[2]) >= len(question.choices) or not self._state.answer(
            question.id, question.choices[int(found[2])][0]
        ):
            return "This question is no longer open."
        assert worker is not None
        worker.wake()
        return f"You chose: {question.choices[int(found[2])][1]}"

    def _may_answer(self, place: str, user: str) -> bool:
        prompt = self._workers[place].current
        permitted = self._permitted(place, *self._state.about(self._config.name, place), user)
        if prompt is None or permitted is None:
            return False
        return prompt.user == user or permitted[0].answers == "anyone"

    # Workers.

    def _wake(self, place: str, rule: Rule) -> None:
        worker = self._workers.get(place)
        if worker is None:
            worker = self._workers[place] = Worker(self._shared, self._chat, self._config.name, place, rule)
            self._tasks.create_task(self._run(place, worker))
        worker.wake()

    async def _run(self, place: str, worker: Worker) -> None:
        try:
            while True:
                try:
                    return await worker.run()
                except* Exception as group:
                    if group.subgroup(StateError) is not None:
                        raise
                    logger.exception("The prompt in %s failed", place, exc_info=group)
                    self._state.give_up(self._config.name, place, _FAILED)
        finally:
            del self._workers[place]


def _problem(name: str, argument: str, rule: Rule) -> str:
    """Return why a slash command cannot be used here, or an empty string."""
    if name not in rule.commands:
        known = ", ".join(f"/{each}" for each in sorted({*rule.commands, "cancel"}))
        return f"/{name} cannot be used here. These commands can: {known}."
    if name == "mode" and argument and argument not in rule.modes:
        return f'The mode "{line(argument, 40)}" cannot be chosen here. These can: {", ".join(rule.modes)}.'
    return ""


def _chosen(question: Question, text: str, *, has_buttons: bool) -> str | None:
    """Return the answer that a message gives to a question, or None if it is no answer."""
    if not question.choices:
        return text or None
    if has_buttons:
        return None
    if text.isascii() and text.isdigit() and len(text) < 3 and 0 < int(text) <= len(question.choices):
        return question.choices[int(text) - 1][0]
    return next((value for value, label in question.choices if label.casefold() == text.casefold()), None)


def _blocks(message: Incoming, text: str) -> list[dict[str, Any]]:
    """Return a message as content blocks. It names what could not be passed on."""
    blocks: list[dict[str, Any]] = []
    notes = [] if len(text) <= MAX_TEXT else [f"The message was cut after {MAX_TEXT} characters."]
    total = 0
    for number, file in enumerate(message.files):
        name, data = harmless(line(file.name, 100)) or "file", file.data
        mime = file.mime.partition(";")[0].strip().lower()
        problem = file.problem
        total += len(data or b"")
        if number >= _MAX_FILES or total > _MAX_ALL_BYTES:
            problem = "too many or too large files"
        elif data is None:
            problem = problem or "its content could not be fetched"
        elif mime in _IMAGES and len(data) <= _MAX_IMAGE_BYTES:
            blocks.append({"type": "image", "mimeType": mime, "data": base64.b64encode(data).decode()})
        elif len(data) <= _MAX_TEXT_FILE_BYTES and (content := _decoded(data)) is not None:
            resource = {
                "uri": f"attachment:///{number + 1}/{_url_name(name)}",
                "mimeType": mime or "text/plain",
                "text": content,
            }
            blocks.append({"type": "resource", "resource": resource})
        else:
            problem = "only images and small text files can be"
        if problem:
            notes.append(f"The attachment {name} was not passed on: {problem}.")
    body = "\n".join(filter(None, [text[:MAX_TEXT], *(f"({note})" for note in notes)]))
    if not body and not blocks:
        return []
    return [{"type": "text", "text": body or "See the attachment."}, *blocks]


def _decoded(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\x00" in text else text


def _url_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)

"""The editor as one session sees it: updates out, questions out and answers back.

Strategy: updates are plain dicts sent through the connection, never before the response that made the session known.
A question is raced against cancellation by whoever asks; when it is dropped, the editor is told to close its dialog.
Knows the protocol; not why anything is shown or asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, assert_never

import anyio
from acp import RequestError
from acp.connection import Connection

from crow.agent import PermissionQuestion
from crow.domain.entries import Assistant, CallRef, Entry, Started, ToolResult
from crow.domain.events import (
    CommandsChanged,
    Elicitation,
    ElicitationAnswer,
    EntryStored,
    Event,
    FormQuestion,
    ModeChanged,
    OptionsChanged,
    UrlQuestion,
)
from crow.domain.replay import Replay
from crow.frontend.params import ClientCapabilities
from crow.frontend.server import ClientConnection, EditorTimeouts
from crow.frontend.tool_calls import PART_BYTES, call_fields, diff_contents, fenced, head_and_tail, text_content, weight
from crow.frontend.updates import LiveUpdates, ReplayUpdates

if TYPE_CHECKING:
    from crow.agent import PermissionQuestion
    from crow.domain.events import Elicitation, ElicitationKind

__all__ = [
    "PermissionAnswer",
    "SessionClient",
    "elicitation_answer",
    "elicitation_params",
    "permission_answer",
    "permission_params",
]

logger = logging.getLogger(__name__)


class SessionClient:
    """See :class:`crow.agent.Client`. `options` and `commands` give the complete lists of what there is."""

    def __init__(
        self,
        session_id: str,
        connection: Connection,
        wire: ClientConnection,
        caps: ClientCapabilities,
        cwd: str,
        options: Callable[[], list[dict[str, Any]]],
        commands: Callable[[], list[dict[str, Any]]],
        timeouts: EditorTimeouts,
    ) -> None:
        self._session_id = session_id
        self._connection = connection
        self._wire = wire
        self._caps = caps
        self._live = LiveUpdates(caps, cwd=cwd)
        self._options = options
        self._commands = commands
        self._user_s = timeouts.user_s
        self._known = asyncio.Event()
        self._gate = asyncio.Lock()
        self._told = 0
        self._over = False

    def open(self) -> None:
        """The editor knows the session's id from here on."""
        self._known.set()

    def end(self) -> None:
        """The session is closed here: the editor may have let go of it, and hears no more."""
        self._over = True
        self._known.set()

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`. Waits while a history is replayed, and says nothing that it has told."""
        await self._known.wait()
        async with self._gate:
            if isinstance(event, EntryStored) and event.entry.id <= self._told and not is_passing(event.entry):
                return
            for update in self._live.updates(event):
                await self.send(update)
            if isinstance(event, ModeChanged | OptionsChanged):
                await self.send({"sessionUpdate": "config_option_update", "configOptions": self._options()})
            if isinstance(event, CommandsChanged):
                await self.send({"sessionUpdate": "available_commands_update", "availableCommands": self._commands()})

    async def replay(self, history: AsyncIterator[Sequence[Entry]], *, goes_on: bool) -> None:
        """Tell a stored history. Where a turn `goes_on` its events wait meanwhile; then what it has shown so far of its
        answer and its open calls is told again, and the rest comes live."""
        async with self._gate:
            replay, replayed = Replay(), ReplayUpdates(self._caps)
            ended: set[CallRef] = set()
            message_id = ""

            async def tell(events: Sequence[Event]) -> None:
                for event in events:
                    for update in replayed.updates(event):
                        await self.send(update)

            async for batch in history:
                for entry in batch:
                    match entry.body:
                        case Assistant(message_id=message_id):
                            ended.clear()
                        case ToolResult(call=call):
                            ended.add(call)
                        case _:
                            pass
                    await tell(replay.feed(entry))
                    self._told = max(self._told, entry.id)
            await tell(replay.pause() if goes_on else replay.end())
            if goes_on:
                for update in self._live.again(ended=ended, message_id=message_id):
                    await self.send(update)

    async def send(self, update: dict[str, Any]) -> None:
        """One update; into the void once the editor is gone, or the session closed."""
        if not self._over:
            await self._notify("session/update", {"sessionId": self._session_id, "update": update})

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`."""
        await self._known.wait()
        try:
            with anyio.fail_after(self._user_s):
                answer = await self.request("session/request_permission", permission_params(self._session_id, question))
        except TimeoutError:
            return "unanswered"
        except ConnectionError:  # nobody is there to answer: the turn ends with the process
            return "cancelled"
        except RequestError as error:
            logger.warning("The editor could not ask for permission: %s", error)
            return "cannot_ask"
        return permission_answer(answer)

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return self._caps.notices

    @property
    def elicits(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        kinds: dict[ElicitationKind, bool] = {"form": self._caps.elicits_by_form, "url": self._caps.elicits_by_url}
        return frozenset(kind for kind, offered in kinds.items() if offered)

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """See :class:`crow.agent.Client`."""
        from crow.domain.events import ElicitationAnswer

        params = elicitation_params(self._session_id, question)
        if params["mode"] not in self.elicits or weight(params) > PART_BYTES:
            return ElicitationAnswer(action="cancel")
        await self._known.wait()
        try:
            with anyio.fail_after(self._user_s):
                return elicitation_answer(await self.request("elicitation/create", params))
        except (RequestError, ConnectionError, TimeoutError) as error:
            logger.warning("The editor could not put a question to the user: %s", error)
            return ElicitationAnswer(action="cancel")

    async def elicited(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        if self._caps.elicits_by_url:
            await self._notify("elicitation/complete", {"elicitationId": question_id})

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """A request to the editor. Cancelled, it is withdrawn with `$/cancel_request`."""
        try:
            answer = await self._connection.send_request(method, params)
        except asyncio.CancelledError:
            request_id = self._wire.asked()
            if request_id is not None:
                with anyio.move_on_after(1, shield=True):
                    await self._notify("$/cancel_request", {"requestId": request_id})
            raise
        self._wire.asked()
        return answer

    async def _notify(self, method: str, params: dict[str, Any]) -> None:
        """Not through the connection, which says nothing more once stdin has ended: what runs then is still to be told
        how it ended, before its prompt is answered."""
        await self._wire.send({"jsonrpc": "2.0", "method": method, "params": params})


def is_passing(entry: Entry) -> bool:
    """Whether a history does not tell of the entry, though it changes what is shown live."""
    return isinstance(entry.body, Started)


# FROM frontend.permissions: The question that a permission request asks, and its answer.
#
# Strategy: the request repeats all that was announced of the call, as many clients draw their dialog from it alone.
# The ids of the options are their kinds. Whatever is no clear yes is a no. Knows nothing of rules.


PermissionAnswer: TypeAlias = Literal[
    "allow_once", "allow_always", "reject_once", "reject_always", "cancelled", "cannot_ask", "unanswered"
]
KINDS: tuple[PermissionAnswer, ...] = ("allow_once", "allow_always", "reject_once", "reject_always")


def permission_params(session_id: str, question: PermissionQuestion) -> dict[str, Any]:
    """The parameters of `session/request_permission`."""
    announcement = question.offer.announcement
    call = call_fields(question.call.call_id, announcement, name=question.name, arguments=question.arguments)
    content = diff_contents(announcement.diffs)
    if question.offer.shown:
        content.append(text_content(fenced(head_and_tail(question.offer.shown))))
    if content:
        call["content"] = content
    options = [
        {"optionId": "allow_once", "kind": "allow_once", "name": "Allow"},
        {"optionId": "allow_always", "kind": "allow_always", "name": f"Always allow {question.always}"},
        {"optionId": "reject_once", "kind": "reject_once", "name": "Reject"},
        {"optionId": "reject_always", "kind": "reject_always", "name": f"Always reject {question.always}"},
    ]
    if not question.always:
        options = options[::2]
    return {"sessionId": session_id, "toolCall": {"status": "pending"} | call, "options": options}


def permission_answer(result: object) -> PermissionAnswer:
    """What the client's answer means."""
    match result:
        case {"outcome": {"outcome": "cancelled"}}:
            return "cancelled"
        case {"outcome": {"outcome": "selected", "optionId": chosen}}:
            return next((kind for kind in KINDS if kind == chosen), "reject_once")
        case _:
            return "reject_once"


# FROM frontend.elicitation: The request that puts a question to the user, and its answer.
#
# Strategy: as for permissions, both directions are pure functions. Whatever is no clear answer counts as dismissed;
# of
# an accepted form only values that a form can hold are taken. Knows no capability.


def elicitation_params(session_id: str, question: Elicitation) -> dict[str, Any]:
    """The parameters of `elicitation/create`."""
    params: dict[str, Any] = {"sessionId": session_id, "message": question.message}
    if question.call is not None:
        params["toolCallId"] = question.call.call_id
    match question:
        case FormQuestion(schema=schema):
            return params | {"mode": "form", "requestedSchema": {"type": "object", **schema}}
        case UrlQuestion(url=url, id=question_id):
            return params | {"mode": "url", "url": url, "elicitationId": question_id}
        case _:
            assert_never(question)


def elicitation_answer(result: object) -> ElicitationAnswer:
    """What the client's answer means."""
    match result:
        case {"action": "accept", "content": dict(content)}:
            return ElicitationAnswer(action="accept", content={k: v for k, v in content.items() if _is_value(v)})
        case {"action": "accept"}:
            return ElicitationAnswer(action="accept")
        case {"action": "decline"}:
            return ElicitationAnswer(action="decline")
        case _:
            return ElicitationAnswer(action="cancel")


def _is_value(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str | int | float)

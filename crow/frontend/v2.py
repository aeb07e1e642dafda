"""Serves the draft of protocol version 2 to clients that ask for version 2, and version 1 to all other clients."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from crow import __version__
from crow.agent.sessions.pending import PendingPrompt
from crow.agent.sessions.session import Session
from crow.domain.entries import Command, Entry, TurnEnd, User
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession, StoreError
from crow.domain.events import ElicitationKind, EntryStored
from crow.frontend.agent import REQUEST_CANCELLED, AcpAgent, Method, auth_methods, error_response
from crow.frontend.client import NO_PLACE, ClientConnection, RequestParams, SessionClient, request_error
from crow.frontend.content import parts_from, without_repeated_prompts
from crow.frontend.cursors import CURSOR_KEY, PIECEMEAL, cursor_in
from crow.frontend.feed import Item, TurnBegan, TurnEnded
from crow.frontend.frames import INTERNAL_ERROR, INVALID_REQUEST, RequestError, describe
from crow.frontend.host import HostSession, PromptRun
from crow.frontend.missed import Missed
from crow.frontend.params import (
    ClientCapabilities,
    OpenRequest,
    open_request_from,
    prompt_name,
    session_alias,
    session_metadata,
)
from crow.frontend.sessions import ClientSession, ClientSessions
from crow.frontend.subagents import Family
from crow.frontend.updates import Update, ViewLimits
from crow.frontend.v2_updates import FINAL_STATUSES, Wording, commands, config_options, permission_params
from crow.frontend.view import Shown, View
from crow.store import NamedPrompt

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
MAX_VERSION = 65_535

IDLE: Update = {"sessionUpdate": "state_update", "state": "idle"}
RUNNING: Update = {"sessionUpdate": "state_update", "state": "running"}
REQUIRES_ACTION: Update = {"sessionUpdate": "state_update", "state": "requires_action"}


class VersionedConnection(ClientConnection, Protocol):
    """A connection whose requests have the parameters of version 1 or of version 2 of the protocol."""

    checks_parameters: bool
    """Whether `run` checks the parameters of requests against version 1 of the protocol."""


class SessionClientV2(SessionClient):
    """The client of one session, in version 2 of the protocol.

    In addition to updates, this class sends the state of the session. It sends each prompt when the prompt becomes part
    of the conversation. `session` is set before the client is opened.
    """

    session: Session
    sees_own_prompts = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known_commands: list[dict[str, Any]] | None = None
        """The slash commands that the client has been sent."""
        self._wording = Wording()
        self._state = IDLE
        self._insertions: dict[str, asyncio.Future[str]] = {}
        self._names: dict[str, str] = {}  # tool names, by the ids of the calls that have not ended
        self._running_calls: set[str] = set()
        self._cancellable: set[str] = set()
        self._questions: Counter[str] = Counter()  # open questions by call id, which is empty if no call asks

    def expect(self, prompt: PendingPrompt) -> asyncio.Future[str]:
        """Returns a future for the message id of a prompt. The future is done when the prompt becomes part of the
        conversation."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return self._insertions.setdefault(prompt.message_id, future)

    def expect_first(self, message_id: str, known: NamedPrompt) -> None:
        """Expect the stored prompt `known` instead of the prompt `message_id`, which repeats it."""
        if (future := self._insertions.pop(message_id, None)) is not None and not future.done():
            if known.turn is None:
                self._insertions[known.message_id] = future
            else:
                future.set_result(known.message_id)

    async def show(self, item: Item, *, is_own: bool = False) -> None:
        """See `SessionClient.show`."""
        if isinstance(item, TurnEnded):
            await self._end_turn(item)
            return
        await super().show(item, is_own=is_own)
        match item:
            case EntryStored(entry=Entry(body=User(message_id=message_id))):
                self._note_inserted(message_id, message_id)
            case (
                EntryStored(entry=Entry(body=Command(message_id=message_id)))
                | TurnBegan(message_id=message_id, typed=str())
            ):
                self._note_inserted(message_id, f"{message_id}_typed")

    async def _end_turn(self, item: TurnEnded) -> None:
        """Sends the state after a turn."""
        async with self._sending:
            is_inserted = self._insertions.pop(item.message_id, None) is None
            if is_inserted or self._state["state"] != "idle":
                await self._show_state(idle_state(item))
            self._running_calls.clear()
            self._names.clear()

    def _note_inserted(self, message_id: str, shown_as: str) -> None:
        future = self._insertions.pop(message_id, None)
        if future is not None and not future.done():
            future.set_result(shown_as)

    async def show_state(self) -> None:
        """Sends the state of the session."""
        if self._state["state"] == "idle" and (self.session.has_turn or self.session.runs_elsewhere):
            self._state = RUNNING
        await self.send(self._state)

    async def load(
        self,
        history: AsyncIterator[Sequence[Entry]],
        *,
        is_running: Callable[[], bool],
        limits: ViewLimits | None = None,
        family: Family | None = None,
    ) -> View:
        """See `SessionClient.load`."""
        self._wording.begin_replay()
        try:
            return await super().load(history, is_running=is_running, limits=limits, family=family)
        finally:
            self._wording.end_replay()

    async def resume(
        self,
        read: Callable[[], Awaitable[Missed]],
        *,
        is_running: Callable[[], bool],
        is_own: Callable[[str], bool],
    ) -> Missed:
        """See `SessionClient.resume`."""

        async def read_whole_prompt() -> Missed:
            missed = await read()
            first = next((entry.body for entry in missed.entries if isinstance(entry.body, PIECEMEAL)), None)
            if isinstance(first, User):  # its first piece replaces what the client has of the message
                missed = replace(missed, cursor=replace(missed.cursor, pieces=0))
            return missed

        missed = await super().resume(read_whole_prompt, is_running=is_running, is_own=is_own)
        ends = [entry.body for entry in missed.entries if isinstance(entry.body, TurnEnd)]
        if ends and self._state is IDLE:
            self._state = state_after(ends[-1])
        return missed

    def note_last_turn(self, state: Mapping[str, Any]) -> None:
        """Takes from `state` how the last turn of the session ended, unless this is already known."""
        if self._state is IDLE and (stop := state.get("stopReason", "error")) != "error":
            self._state = IDLE | {"stopReason": stop}

    async def send(self, update: Update, cursor: str | None = None) -> None:
        """Converts an update of version 1 to version 2, and sends it."""
        match update:
            case {"sessionUpdate": "available_commands_update", "availableCommands": offered}:
                if offered == self.known_commands:
                    return
                self.known_commands = offered
            case {"sessionUpdate": "session_info_update", "_meta": {"acp/turnState": _}}:
                update = self._state = RUNNING
        converted = tuple(self._wording.updates(update))
        for index, said in enumerate(converted, 1):
            shown = self._with_capabilities(said) if said["sessionUpdate"] == "tool_call_update" else said
            await super().send(shown, cursor if index == len(converted) else NO_PLACE)

    async def _send_shown(self, shown: Sequence[Shown]) -> None:
        await super()._send_shown(shown)
        await self._show_whether_blocked()

    async def _show_state(self, state: Update) -> None:
        self._state = state
        await self.send(state)

    async def _request(self, method: str, params: dict[str, Any]) -> Any:
        """Sends a question for the user, and returns the answer. While the question is open and no other calls are
        running, the state of the session is `requires_action`."""
        call_id = params.get("toolCallId", "")
        if method == "session/request_permission":
            call_id, params = params["toolCall"]["toolCallId"], permission_params(params)
            if (
                call_id in self._running_calls
            ):  # the question comes from an MCP server, and is not about the call itself
                params["subject"]["toolCall"] = {"toolCallId": call_id}
        self._questions[call_id] += 1
        try:
            await self._show_whether_blocked()
            answer = await super()._request(method, params)
        finally:
            self._questions[call_id] -= 1
            self._questions += Counter()  # removes zero counts
        await self._show_whether_blocked()
        return answer

    async def _show_whether_blocked(self) -> None:
        """Sends the session's state if the state has changed to or from `requires_action`."""
        if self._state["state"] == "idle":
            return
        state = REQUIRES_ACTION if self._is_blocked() else RUNNING
        if state is not self._state:
            await self._show_state(state)

    def _is_blocked(self) -> bool:
        """Whether the turn cannot continue until the user answers. A question from a sub-agent blocks the `task` call
        that the sub-agent carries out."""
        working = self._running_calls - self._questions.keys()
        tasks = {call_id for call_id in working if self._names.get(call_id) == "task"}
        own = self.session.running_calls  # a question about a call that is not in here comes from a sub-agent
        asked_by_subagents = sum(count for call_id, count in self._questions.items() if call_id not in own)
        return bool(self._questions) and working == tasks and len(tasks) <= asked_by_subagents

    def _with_capabilities(self, update: Update) -> Update:
        """Returns `update`, an update of a tool call. If the client can cancel the call from now on, or can no longer
        cancel it, this is added to the update. Also notes which calls are running."""
        call_id, status = update["toolCallId"], update.get("status")
        if status in FINAL_STATUSES:
            self._running_calls.discard(call_id)
            self._names.pop(call_id, None)
            if call_id in self._cancellable:
                self._cancellable.discard(call_id)
                return update | {"capabilities": None}
            return update
        if "name" in update:
            self._names[call_id] = update["name"]
        if status == "in_progress":
            self._running_calls.add(call_id)
            is_told = call_id in self._cancellable and not self._wording.is_replaying
            if not is_told and call_id in self.session.running_calls:
                self._cancellable.add(call_id)
                return update | {"capabilities": {"cancel": {}}}
        return update


class VersionedSessions(ClientSessions):
    """The open sessions of a client. The client uses version 1 of the protocol, or version 2 after a call of
    `begin_v2`."""

    is_v2 = False

    def begin_v2(self) -> None:
        """Switches to version 2. No session may be open yet."""
        self.is_v2, self.client_type = True, SessionClientV2

    def find(self, session_id: str) -> Session | None:
        """Returns the open session with this id, or None."""
        opened = self._opened.get(session_id)
        return None if opened is None else opened.session

    async def find_to_cancel(self, session_id: object) -> Session | None:
        """Returns the open session with this id. Returns None if there is no such session, or if this client may not
        cancel prompts in it."""
        opened = self._opened.get(session_id) if isinstance(session_id, str) else None
        if opened is None or not self._may_write(opened):
            return None
        try:
            await self.require(session_id, "write")
        except CrowError:
            return None
        return opened.session

    def is_watched_by_others(self, session_id: str) -> bool:
        """Whether other clients have opened the session too."""
        opened = self._opened.get(session_id)
        return opened is not None and opened.hosted.is_watched_without(self.origin)

    def introduce(self, opened: ClientSession) -> dict[str, Any]:
        """See `ClientSessions.introduce`. In version 2, the response also has the commands, and the mode is only a
        config option."""
        answer = super().introduce(opened)
        if not self.is_v2:
            return answer
        meta = {"_meta": answer["_meta"]} if "_meta" in answer else {}
        offered = self.host.commands(opened.session)
        client_of(opened).known_commands = offered
        return {"configOptions": config_options(answer["configOptions"]), "availableCommands": commands(offered)} | meta

    def _client(self, hosted: HostSession) -> SessionClient:
        client = super()._client(hosted)
        if isinstance(client, SessionClientV2):
            client.session = hosted.session
        return client


class NegotiatingAgent(AcpAgent):
    """Answers the requests of a connection in version 1 or 2 of the protocol. `initialize` chooses the version.

    Version 2 has a method table of its own, but both versions use the same sessions.
    """

    sessions_type = VersionedSessions
    _sessions: VersionedSessions

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """See `AcpAgent.handle`. In version 2, `session/cancel` also withdraws the prompts that wait for the running
        turn."""
        if is_notification and method == "session/cancel" and self._sessions.is_v2:
            revoke_waiting(await self._sessions.find_to_cancel(params.get("sessionId")))
        return await super().handle(method, params, is_notification)

    async def _initialize(self, params: RequestParams) -> dict[str, Any]:
        version = params.get("protocolVersion")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise ArgumentError(f"protocolVersion is {describe(version)}; expected a whole number, such as 2.")
        agreed, spoken = min(max(version, 1), PROTOCOL_VERSION), PROTOCOL_VERSION if self._sessions.is_v2 else 1
        if agreed != spoken and (self._sessions.is_used or self._sessions.is_v2):
            problem = f"This connection already uses version {spoken} of the protocol. Start crow again to use another."
            raise request_error(INVALID_REQUEST, problem)
        if agreed != PROTOCOL_VERSION:
            return await super()._initialize(params)
        caps, info = capabilities_from(params), params["info"]
        self._begin_v2()
        self._sessions.use_capabilities(caps)
        logger.info("Client: %s %s, with protocol version 2", info["name"], info["version"])
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "info": {"name": "crow", "title": "Crow", "version": __version__},
            "capabilities": {
                "session": {
                    "prompt": {"image": {}, "embeddedContext": {}},
                    "mcp": {"stdio": {}, "http": {}},
                    "delete": {},
                    "additionalDirectories": {},
                }
            },
            "authMethods": [
                {"type": "agent", "methodId": method["id"]} | {key: method[key] for key in method if key != "id"}
                for method in auth_methods(caps)
            ],
            "_meta": {"crow": {"promptId": {}}} | ({CURSOR_KEY: {}} if self._host.is_lasting else {}),
        }

    def _begin_v2(self) -> None:
        cast(VersionedConnection, self._connection).checks_parameters = False
        self._sessions.begin_v2()
        self._methods: dict[str, Method] = {
            "initialize": self._initialize,
            "auth/login": self._login,
            "auth/logout": self._logout,
            "session/new": self._new_v2,
            "session/resume": self._resume_v2,
            "session/list": self._list_v2,
            "session/close": self._close_v2,
            "session/delete": self._delete_v2,
            "session/prompt": self._prompt_v2,
            "session/set_config_option": self._set_config_option_v2,
            "tool_call/cancel": self._cancel_call,
        }

    async def _login(self, params: RequestParams) -> dict[str, Any]:
        text_in(params, "methodId")
        return await self._authenticate(params)

    async def _new_v2(self, params: RequestParams) -> dict[str, Any]:
        opened = await self._sessions.create(open_request_v2(params), alias=session_alias(params))
        if opened.session.busy:  # the alias belongs to a session that is already open
            await client_of(opened).show_state()
        return {"sessionId": opened.session.id, **self._sessions.introduce(opened)}

    async def _resume_v2(self, params: RequestParams) -> dict[str, Any]:
        text_in(params, "sessionId")
        request, is_replayed = open_request_v2(params, may_be_missing=True), wants_replay(params)
        async with self._resumed(params, request) if not is_replayed else self._loaded(params, request) as opened:
            client = client_of(opened)
            if cursor_in(params) is not None:
                client.note_last_turn(opened.hosted.clients.last_turn)
            await client.show_state()
            return self._sessions.introduce(opened)

    async def _list_v2(self, params: RequestParams) -> dict[str, Any]:
        cwd, cursor = params.get("cwd"), params.get("cursor")
        if cwd is not None and not (isinstance(cwd, str) and os.path.isabs(cwd)):
            raise ArgumentError(f'cwd is {describe(cwd)}; expected an absolute path, such as "/home/me/project".')
        if cursor is not None and not isinstance(cursor, str):
            raise ArgumentError(f"cursor is {describe(cursor)}; expected the nextCursor of an earlier answer.")
        return await self._list(params)

    async def _close_v2(self, params: RequestParams) -> dict[str, Any]:
        """Closes a session. Also succeeds if the session is not open."""
        session_id = text_in(params, "sessionId")
        session = self._sessions.find(session_id)
        if session is not None:
            if not self._sessions.is_watched_by_others(session_id):
                revoke_waiting(await self._sessions.find_to_cancel(session_id))
            try:
                await self._sessions.close(session_id)
            except NoSuchSession:
                logger.info("Session %s was closed in the meantime", session_id)
        return {}

    async def _delete_v2(self, params: RequestParams) -> dict[str, Any]:
        session_id = text_in(params, "sessionId")
        with suppress(NoSuchSession):
            await self._sessions.require(session_id, "own")
            revoke_waiting(self._sessions.find(session_id))
        return await self._delete(params)

    async def _set_config_option_v2(self, params: RequestParams) -> dict[str, Any]:
        text_in(params, "sessionId")
        text_in(params, "configId")
        kind, value = params.get("type"), params.get("value")
        if (kind, type(value)) not in (("id", str), ("boolean", bool)):
            given = f"type is {describe(kind)} and value is {describe(value)}"
            raise ArgumentError(
                f'{given}; expected the type "id" with a string, or the type "boolean" with true or false.'
            )
        answer = await self._set_config_option(params)
        return {"configOptions": config_options(answer["configOptions"])}

    async def _cancel_call(self, params: RequestParams) -> dict[str, Any]:
        opened, call_id = await self._writable(text_in(params, "sessionId")), text_in(params, "toolCallId")
        scope = opened.session.running_calls.get(call_id)
        if scope is None:
            raise ArgumentError(f"toolCallId is {describe(call_id)}; no call with this id can be cancelled now.")
        scope.cancel()
        return {}

    async def _prompt_v2(self, params: RequestParams) -> dict[str, Any]:
        """Submits a prompt, and responds as soon as the prompt is part of the conversation. After that, updates of the
        state tell the client how the turn goes on."""
        # Over stdio, the prompt is submitted without any wait, so a cancellation sent right after it takes effect.
        opened = await self._writable(text_in(params, "sessionId"))
        key = (self._sessions.requester.connection_id, opened.session.id, params.request_id)
        run = self._host.prompt_again(self._connection, key)
        if run is None:
            session, metadata = opened.session, session_metadata(params)
            is_first = session.branch.prompt is None
            parts = without_repeated_prompts(parts_from(params.get("prompt")), is_first=is_first)
            prompt = session.submit(parts, metadata, prompt_name(params))
            run = PromptRun(session, prompt, self._connection)
            self._host.run_prompt(run, key)
        else:  # sent again, over a new connection
            session, prompt = run.session, run.prompt
        first = prompt.first or prompt
        if opened.hosted.clients.has_begun(first) or session.branch.prompt_with(first.message_id) is not None:
            return {"messageId": first.message_id}
        inserted = client_of(opened).expect(prompt)
        prompt.on_joined = partial(client_of(opened).expect_first, prompt.message_id)
        self._cancel_by_id[params.request_id] = lambda: withdraw(session, prompt)
        self._host.tasks.start_soon(self._follow, run, opened, inserted)
        try:
            return {"messageId": await inserted}
        finally:
            del self._cancel_by_id[params.request_id]

    async def _follow(self, run: PromptRun, opened: ClientSession, inserted: asyncio.Future[str]) -> None:
        """Waits for the end of a prompt's turn. If the prompt has not become part of the conversation by then, sets an
        error in `inserted`."""
        problem = request_error(REQUEST_CANCELLED, "The prompt was cancelled before its turn.")
        try:
            await run.wait()
        except Exception as error:
            if not isinstance(error, CrowError):
                logger.exception("session/prompt failed")
            problem = turn_error(error)
        await opened.flushed()
        known = run.prompt.known
        if known is not None and known.turn is not None and not inserted.done():
            inserted.set_result(known.message_id)
        if not inserted.done():
            if run.prompt.in_inbox and not self._is_closing:
                await drop(run.session, run.prompt)
            inserted.set_exception(problem)


def client_of(opened: ClientSession) -> SessionClientV2:
    """Returns the client of a session that was opened in version 2."""
    return cast(SessionClientV2, opened.client)


def idle_state(end: TurnEnded) -> Update:
    """Returns an update with the state after a turn."""
    if end.error is None:
        return IDLE | {"stopReason": end.state["stopReason"]}
    error = turn_error(end.error)
    return IDLE | {"stopReason": "error", "error": {"code": error.code, "message": str(error), "data": error.data}}


def state_after(end: TurnEnd) -> Update:
    """Returns an update with the state after a turn that ended while the client was not connected."""
    if end.stop not in ("interrupted", "error"):
        return IDLE | {"stopReason": end.stop}
    words = end.detail or "The turn was interrupted."
    return IDLE | {"stopReason": "error", "error": {"code": INTERNAL_ERROR, "message": words}}


def turn_error(error: Exception) -> RequestError:
    """Returns the error response for a turn that failed with `error`."""
    if isinstance(error, CrowError):
        return error_response(error)
    return request_error(INTERNAL_ERROR, "Internal error. Crow's log has the details.")


def withdraw(session: Session, prompt: PendingPrompt) -> None:
    """Withdraws a prompt that waits for an earlier turn. If the turn of the prompt is already running, cancels that
    turn."""
    if not session.revoke(prompt):
        session.withdraw(prompt)


def revoke_waiting(session: Session | None) -> None:
    """Withdraws all prompts that wait for the running turn."""
    if session is not None:
        for prompt in session.waiting:
            session.revoke(prompt)


async def drop(session: Session, prompt: PendingPrompt) -> None:
    """Removes a prompt from the inbox. Must be called if the client that sent the prompt gets an error."""
    try:
        await session.conversation.adapters.store.drop_prompt(
            session.id, prompt.message_id, is_cancelled=prompt.error is None
        )
    except StoreError as error:
        logger.warning("Session %s: a cancelled prompt is still in the inbox: %s", session.id, error)


def capabilities_from(params: Mapping[str, Any]) -> ClientCapabilities:
    """Reads the client's capabilities from the parameters of `initialize`. All clients of version 2 can show terminals,
    notices and compactions.

    :raises ArgumentError: a member has the wrong type.
    """
    info = object_in(params, "info")
    for key in ("name", "version"):
        text_in(info, key, "info.")
    offered = object_in(params, "capabilities") if params.get("capabilities") is not None else {}
    elicitation, auth = (
        value if isinstance(value := offered.get(key), dict) else {} for key in ("elicitation", "auth")
    )
    kinds: tuple[ElicitationKind, ...] = ("form", "url")
    return ClientCapabilities(
        terminal_output=True,
        terminal_auth=isinstance(auth.get("terminal"), dict),
        notices=True,
        compaction=True,
        boolean_options=True,
        cancelled_calls=True,
        question_kinds=frozenset(kind for kind in kinds if isinstance(elicitation.get(kind), dict)),
        cursors=isinstance(meta := offered.get("_meta"), dict) and meta.get("acp/cursor") is True,
    )


def open_request_v2(params: Mapping[str, Any], *, may_be_missing: bool = False) -> OpenRequest:
    """Reads the parameters of `session/new` or `session/resume`. For `may_be_missing`, see `open_request_from`.

    :raises ArgumentError: a parameter cannot be used.
    """
    text_in(params, "cwd")
    for key in ("additionalDirectories", "mcpServers"):
        if not isinstance(params.get(key), list | None):
            raise ArgumentError(f"{key} is {describe(params[key])}; expected a list.")
    for index, server in enumerate(params.get("mcpServers") or ()):
        if isinstance(server, dict) and server.get("type") not in ("stdio", "http"):
            raise ArgumentError(f"mcpServers[{index}].type is {describe(server.get('type'))}; expected stdio or http.")
    if params.get("systemPrompt") is not None:
        raise ArgumentError("Version 2 of the protocol has no systemPrompt; send _meta.systemPrompt instead.")
    return open_request_from(params, may_be_missing=may_be_missing)


def wants_replay(params: Mapping[str, Any]) -> bool:
    """Whether `session/resume` asks for the history. :raises ArgumentError: the value of `replayFrom` is unknown."""
    match params.get("replayFrom"):
        case None:
            return False
        case {"type": "start"}:
            return True
        case other:
            raise ArgumentError(f'replayFrom is {describe(other)}; expected {{"type": "start"}} or null.')


def object_in(params: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the parameter `key`, which must be an object. :raises ArgumentError: the parameter is missing or is not
    an object."""
    value = params.get(key)
    if not isinstance(value, dict):
        raise ArgumentError(f"{key} is {describe(value)}; expected an object.")
    return value


def text_in(params: Mapping[str, Any], key: str, where: str = "") -> str:
    """Returns the parameter `key`, which must be a string. :raises ArgumentError: the parameter is missing or is not a
    string."""
    value = params.get(key)
    if not isinstance(value, str):
        raise ArgumentError(f"{where}{key} is {describe(value)}; expected a string.")
    return value

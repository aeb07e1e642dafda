"""Serves the draft of protocol version 2 to clients that ask for version 2, and version 1 to all other clients.

`VersionTwo` carries out requests of version 2 with the help of the methods of version 1. `Translation` translates the
updates and questions that crow sends about a session from version 1 to version 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from crow.agent.sessions.pending import PendingPrompt
from crow.agent.sessions.session import Session
from crow.domain.entries import TurnEnd
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession
from crow.frontend.client import HISTORY
from crow.frontend.cursors import CURSOR_KEY, cursor_in
from crow.frontend.methods import Methods, MethodTable, auth_methods
from crow.frontend.options import session_commands
from crow.frontend.prompts import PromptRun
from crow.frontend.sessions import ConnectionSession
from crow.protocol import Outlet, RequestParams
from crow.protocol.errors import REQUEST_CANCELLED, request_error, turn_error
from crow.protocol.frames import INTERNAL_ERROR, INVALID_REQUEST, describe_member, text_in
from crow.protocol.params import session_alias
from crow.protocol.updates import Update, turn_state
from crow.protocol.v2 import (
    FINAL_STATUSES,
    Converter,
    capabilities_from,
    commands,
    config_options,
    open_request,
    permission_params,
    wants_replay,
)
from crow.store import NamedPrompt
from crow.version import __version__

logger = logging.getLogger(__name__)

_PROTOCOL_VERSION = 2
_MAX_VERSION = 65_535

_IDLE: Update = {"sessionUpdate": "state_update", "state": "idle"}
_RUNNING: Update = {"sessionUpdate": "state_update", "state": "running"}
_REQUIRES_ACTION: Update = {"sessionUpdate": "state_update", "state": "requires_action"}


class Translation:
    """Translates updates and questions about one session from version 1 to version 2, and sends them to `outlet`.

    It also sends the state of the session, which only version 2 has, and notes when a prompt becomes part of the
    conversation.
    """

    def __init__(self, outlet: Outlet, session: Session) -> None:
        self._outlet = outlet
        self._session = session
        self.known_commands: list[dict[str, Any]] | None = None
        """The slash commands that the client has been sent."""
        self._converter = Converter()
        self._state = _IDLE
        self._place: Mapping[str, Any] = {}
        """The cursor of the newest update, as `_meta`."""
        self._insertions: dict[str, asyncio.Future[str]] = {}
        """Futures for prompts that are not in the conversation yet, by the prompts' message ids. Each future gets the
        message id with which the client is shown the prompt."""
        self._names: dict[str, str] = {}
        """Tool names, by the ids of the calls that have not ended."""
        self._running_calls: set[str] = set()
        """The ids of the calls that the client shows as running."""
        self._cancellable: set[str] = set()
        """The ids of the calls that the client was told it can cancel."""
        self._questions: Counter[str] = Counter()
        """The number of open questions of each call, by the call's id. The id is empty for questions without a call."""

    # Messages of version 1.

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        """See `Outlet`."""
        if method != "session/update":
            await self._outlet.notify(method, params)
            return
        update, meta = params["update"], params.get("_meta", {})
        self._place = {key: value for key, value in meta.items() if key == CURSOR_KEY}
        match update:
            case {"sessionUpdate": "available_commands_update", "availableCommands": offered}:
                if offered == self.known_commands:
                    return
                self.known_commands = offered
            case {"sessionUpdate": "session_info_update", "_meta": {"acp/turnState": turn}}:
                await self._show_turn(turn)
                return
        converted = tuple(self._converter.updates(update, is_history=HISTORY.items() <= meta.items()))
        for index, new in enumerate(converted, 1):
            shown = self._with_capabilities(new) if new["sessionUpdate"] == "tool_call_update" else new
            await self._send(shown, self._place if index == len(converted) else {})
        if update["sessionUpdate"] == "user_message_chunk":
            self._note_inserted(update["messageId"])
        await self._show_whether_blocked()

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """See `Outlet`. While the question is open and no other calls are running, the state of the session is
        `requires_action`."""
        call_id = params.get("toolCallId", "")
        if method == "session/request_permission":
            call_id, params = params["toolCall"]["toolCallId"], permission_params(params)
            if call_id in self._running_calls:  # the question must not change how the running call is shown
                params["subject"]["toolCall"] = {"toolCallId": call_id}
        self._questions[call_id] += 1
        try:
            await self._show_whether_blocked()
            answer = await self._outlet.request(method, params)
        finally:
            self._questions[call_id] -= 1
            self._questions += Counter()  # removes zero counts
        await self._show_whether_blocked()
        return answer

    async def _send(self, update: Update, meta: Mapping[str, Any]) -> None:
        params = {"sessionId": self._session.id, "update": update}
        await self._outlet.notify("session/update", params | ({"_meta": meta} if meta else {}))

    # Prompts.

    def expect(self, prompt: PendingPrompt) -> asyncio.Future[str]:
        """Return a future for the message id of a prompt. The future is done when the prompt becomes part of the
        conversation."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return self._insertions.setdefault(prompt.message_id, future)

    def expect_first(self, message_id: str, known: NamedPrompt) -> None:
        """Handle that the prompt `message_id` repeats the stored prompt `known`: complete the future for the repeated
        prompt now if the turn of `known` has begun, otherwise when `known` becomes part of the conversation."""
        if (future := self._insertions.pop(message_id, None)) is not None and not future.done():
            if known.turn is None:
                self._insertions[known.message_id] = future
            else:
                future.set_result(known.message_id)

    def _note_inserted(self, shown_as: str) -> None:
        future = self._insertions.pop(shown_as.removesuffix("_typed"), None)
        if future is not None and not future.done():
            future.set_result(shown_as)

    # The state of the session.

    async def show_state(self, place: Mapping[str, Any]) -> None:
        """Send the state of the session. `place` is the cursor to send with it, as `_meta`."""
        self._converter.end_replay()
        self._place = place
        if self._state["state"] == "idle" and (self._session.queue or self._session.runs_elsewhere):
            self._state = _RUNNING
        await self._send(self._state, place)

    def note_missed_end(self, end: TurnEnd) -> None:
        """Note how the last turn that the client has missed ended, unless another end is already known."""
        if self._state is _IDLE:
            self._state = _state_after(end)

    def note_last_turn(self, state: Mapping[str, Any]) -> None:
        """Note how the last turn ended, unless this is already known or the turn failed. `state` is the turn state in
        the form of version 1."""
        if self._state is _IDLE and (stop := state.get("stopReason", "error")) != "error":
            self._state = _IDLE | {"stopReason": stop}

    async def _show_turn(self, turn: Mapping[str, Any]) -> None:
        """Send the session's state after a turn has begun or ended. Send nothing for a turn that ended before its
        prompt became part of the conversation, unless the client was told that the session is not idle."""
        if turn["state"] == "running":
            await self._show_state(_RUNNING)
            await self._show_whether_blocked()
            return
        is_inserted = self._insertions.pop(turn["messageId"], None) is None
        if is_inserted or self._state["state"] != "idle":
            ended = {"stopReason": turn["stopReason"]}
            await self._show_state(_IDLE | ended | ({"error": turn["error"]} if "error" in turn else {}))
        self._running_calls.clear()
        self._names.clear()

    async def _show_state(self, state: Update) -> None:
        self._state = state
        await self._send(state, self._place)

    async def _show_whether_blocked(self) -> None:
        """Send the session's state if the state has changed to or from `requires_action`."""
        if self._state["state"] == "idle":
            return
        state = _REQUIRES_ACTION if self._is_blocked() else _RUNNING
        if state is not self._state:
            await self._show_state(state)

    def _is_blocked(self) -> bool:
        """Whether the turn cannot continue until the user answers. A question from a subagent blocks the `task` call
        that the subagent carries out."""
        working = self._running_calls - self._questions.keys()
        tasks = {call_id for call_id in working if self._names.get(call_id) == "task"}
        own = self._session.runner.running_calls  # questions about any other calls come from subagents
        asked_by_subagents = sum(count for call_id, count in self._questions.items() if call_id not in own)
        return bool(self._questions) and working == tasks and len(tasks) <= asked_by_subagents

    def _with_capabilities(self, update: Update) -> Update:
        """Note which calls are running. Return `update`, an update of a tool call, with the member `capabilities` if
        the client can now cancel the call, or can no longer cancel it."""
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
            is_told = call_id in self._cancellable and not self._converter.is_replaying
            if not is_told and call_id in self._session.runner.running_calls:
                self._cancellable.add(call_id)
                return update | {"capabilities": {"cancel": {}}}
        return update


class VersionTwo:
    """The methods of version 2. They use the methods of version 1 and the same sessions.

    Until the client chooses version 2, only `initialize` of version 1 is replaced. Then all methods are replaced.
    """

    def __init__(self, methods: Methods) -> None:
        self._v1 = methods
        self._sessions = methods.sessions
        self._translations: WeakValueDictionary[str, Translation] = WeakValueDictionary()
        self._is_chosen = False
        methods.table = replace(methods.table, requests={**methods.table.requests, "initialize": self._initialize})

    async def _initialize(self, params: RequestParams) -> dict[str, Any]:
        version = params.get("protocolVersion")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= _MAX_VERSION:
            raise ArgumentError(f"protocolVersion is {describe_member(version)}; expected a whole number, such as 2.")
        agreed, spoken = min(max(version, 1), _PROTOCOL_VERSION), _PROTOCOL_VERSION if self._is_chosen else 1
        if agreed != spoken and (self._sessions.store.is_used or self._is_chosen):
            problem = f"This connection already uses version {spoken} of the protocol. Start crow again to use another."
            raise request_error(INVALID_REQUEST, problem)
        if agreed != _PROTOCOL_VERSION:
            return await self._v1.initialize(params)
        caps, info = capabilities_from(params), params["info"]
        self._choose()
        self._sessions.use_capabilities(caps)
        logger.info("Client: %s %s, with protocol version 2", info["name"], info["version"])
        return {
            "protocolVersion": _PROTOCOL_VERSION,
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
            "_meta": {"crow": {"promptId": {}}} | ({CURSOR_KEY: {}} if self._v1.host.is_lasting else {}),
        }

    def _choose(self) -> None:
        """Switch to version 2. No session may be open yet."""
        self._is_chosen = True
        self._sessions.translate = self._translate
        self._v1.table = MethodTable(
            requests={
                "initialize": self._initialize,
                "auth/login": self._login,
                "auth/logout": self._v1.logout,
                "session/new": self._new,
                "session/resume": self._resume,
                "session/list": self._list,
                "session/close": self._close,
                "session/delete": self._delete,
                "session/prompt": self._prompt,
                "session/set_config_option": self._set_config_option,
                "tool_call/cancel": self._cancel_call,
            },
            cancel=self._cancel,
            check=None,
        )

    def _translate(self, outlet: Outlet, session: Session) -> Outlet:
        self._translations[session.id] = translation = Translation(outlet, session)
        return translation

    def _introduction(self, opened: ConnectionSession) -> dict[str, Any]:
        """Return the response to a request that has opened a session. Unlike in version 1, the response includes the
        slash commands, and the mode only as a config option."""
        answer = self._v1.opener.introduce(opened)
        offered = session_commands(opened.session)
        self._translations[opened.session.id].known_commands = offered
        members = {"configOptions": config_options(answer["configOptions"]), "availableCommands": commands(offered)}
        return members | ({"_meta": answer["_meta"]} if "_meta" in answer else {})

    async def _login(self, params: RequestParams) -> dict[str, Any]:
        text_in(params, "methodId")
        return await self._v1.authenticate(params)

    async def _new(self, params: RequestParams) -> dict[str, Any]:
        opened = await self._v1.opener.create(open_request(params), alias=session_alias(params))
        if opened.session.busy:  # the alias belongs to a session that is already open
            await self._translations[opened.session.id].show_state(opened.client.place())
        return {"sessionId": opened.session.id, **self._introduction(opened)}

    async def _resume(self, params: RequestParams) -> dict[str, Any]:
        text_in(params, "sessionId")
        request, is_replayed = open_request(params, may_be_missing=True), wants_replay(params)
        open_session = self._v1.loaded if is_replayed else self._v1.resumed
        async with open_session(params, request) as opened:
            translation = self._translations[opened.session.id]
            if cursor_in(params) is not None:
                if not is_replayed and (missed := opened.client.view.last_end) is not None:
                    translation.note_missed_end(missed)
                translation.note_last_turn(turn_state(opened.hosted.clients.feed.last_turn))
            await translation.show_state(opened.client.place())
            return self._introduction(opened)

    async def _list(self, params: RequestParams) -> dict[str, Any]:
        cwd, cursor = params.get("cwd"), params.get("cursor")
        if cwd is not None and not (isinstance(cwd, str) and os.path.isabs(cwd)):
            raise ArgumentError(
                f'cwd is {describe_member(cwd)}; expected an absolute path, such as "/home/me/project".'
            )
        if cursor is not None and not isinstance(cursor, str):
            raise ArgumentError(f"cursor is {describe_member(cursor)}; expected the nextCursor of an earlier answer.")
        return await self._v1.list(params)

    async def _cancel(self, session_id: object) -> None:
        """Cancel the turn of a session, and withdraw the prompts that wait for that turn."""
        await self._revoke_waiting(session_id)
        await self._v1.cancel(session_id)

    async def _revoke_waiting(self, session_id: object) -> None:
        """Withdraw the prompts that wait for the running turn. Do nothing if this client may not do that."""
        opened = self._sessions.find(session_id)
        if opened is not None and opened.queue.may_write:
            with suppress(CrowError):
                await self._sessions.store.require(session_id, "write")
                _revoke_waiting(opened.session)

    async def _close(self, params: RequestParams) -> dict[str, Any]:
        """Close a session. This also succeeds if the session is not open."""
        session_id = text_in(params, "sessionId")
        opened = self._sessions.find(session_id)
        if opened is not None:
            if not opened.hosted.is_watched_without(self._sessions.origin):
                await self._revoke_waiting(session_id)
            try:
                await self._sessions.close(session_id)
            except NoSuchSession:
                logger.info("Session %s was closed in the meantime", session_id)
        return {}

    async def _delete(self, params: RequestParams) -> dict[str, Any]:
        session_id = text_in(params, "sessionId")
        with suppress(NoSuchSession):
            await self._sessions.store.require(session_id, "own")
            if (opened := self._sessions.find(session_id)) is not None:
                _revoke_waiting(opened.session)
        return await self._v1.stored.delete(params)

    async def _set_config_option(self, params: RequestParams) -> dict[str, Any]:
        text_in(params, "sessionId")
        text_in(params, "configId")
        kind, value = params.get("type"), params.get("value")
        if (kind, type(value)) not in (("id", str), ("boolean", bool)):
            given = f"type is {describe_member(kind)} and value is {describe_member(value)}"
            raise ArgumentError(
                f'{given}; expected the type "id" with a string, or the type "boolean" with true or false.'
            )
        answer = await self._v1.set_config_option(params)
        return {"configOptions": config_options(answer["configOptions"])}

    async def _cancel_call(self, params: RequestParams) -> dict[str, Any]:
        opened, call_id = await self._v1.writable(text_in(params, "sessionId")), text_in(params, "toolCallId")
        scope = opened.session.runner.running_calls.get(call_id)
        if scope is None:
            raise ArgumentError(f"toolCallId is {describe_member(call_id)}; no call with this id can be cancelled now.")
        scope.cancel()
        return {}

    async def _prompt(self, params: RequestParams) -> dict[str, Any]:
        """Submit a prompt, and respond as soon as the prompt is part of the conversation. After that, updates of the
        state tell the client how the turn goes on."""
        text_in(params, "sessionId")
        opened, run = await self._v1.start_prompt(params)
        session, prompt = run.session, run.prompt
        first = prompt.repeat.queued or prompt
        if (first.has_begun and not first.needs_servers) or session.branch.projection.has_prompt(first.message_id):
            return {"messageId": first.message_id}
        translation = self._translations[opened.session.id]
        inserted, message_id = translation.expect(prompt), prompt.message_id

        def join(known: NamedPrompt) -> None:  # by then, `prompt.message_id` is that of `known`
            opened.note_sent(known.message_id)
            translation.expect_first(message_id, known)

        prompt.repeat.on_joined = join
        self._v1.host.tasks.start_soon(self._follow, run, opened, inserted)
        with self._v1.requests.cancelled_by(params.request_id, lambda: _withdraw(session, prompt)):
            return {"messageId": await inserted}

    async def _follow(self, run: PromptRun, opened: ConnectionSession, inserted: asyncio.Future[str]) -> None:
        """Wait for the end of a prompt's turn. If the prompt has not become part of the conversation by then, set an
        error in `inserted`."""
        problem = request_error(REQUEST_CANCELLED, "The prompt was cancelled before its turn.")
        try:
            await run.wait()
        except Exception as error:
            if not isinstance(error, CrowError):
                logger.exception("session/prompt failed")
            problem = turn_error(error)
        await opened.flushed()
        known = run.prompt.repeat.stored
        if known is not None and known.turn is not None and not inserted.done():
            inserted.set_result(known.message_id)
        if not inserted.done():
            if run.prompt.in_inbox and not self._v1.requests.is_closing:
                await run.session.branch.reject_prompt(run.prompt.message_id, is_cancelled=run.prompt.error is None)
            inserted.set_exception(problem)


def _state_after(end: TurnEnd) -> Update:
    """Return an update with the state after a turn that ended while the client was not connected."""
    if end.stop not in ("interrupted", "error"):
        return _IDLE | {"stopReason": end.stop}
    words = end.detail or "The turn was interrupted."
    return _IDLE | {"stopReason": "error", "error": {"code": INTERNAL_ERROR, "message": words}}


def _withdraw(session: Session, prompt: PendingPrompt) -> None:
    """Withdraw a prompt that waits for an earlier turn. If the turn of the prompt is already running, cancel that
    turn."""
    if not session.queue.revoke(prompt):
        session.withdraw(prompt)


def _revoke_waiting(session: Session) -> None:
    """Withdraw all prompts that wait for the running turn."""
    for prompt in session.queue.waiting:
        session.queue.revoke(prompt)

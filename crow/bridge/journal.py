"""Restores the state of a lost connection on the next one, so that the editor does not notice the loss. Does no I/O.

Each message passes through the journal, almost always unchanged. The journal remembers everything that a new connection
needs: the requests without a response, and the open sessions, each with its newest cursor. Each prompt gets a name that
is unique in its session, so any server that opens the session recognises a repeated prompt and does not run it again.
"""

from __future__ import annotations

from crow.bridge.messages import (
    NOT_FOUND,
    as_object,
    crow_meta,
    encode,
    error_response,
    is_id,
    params_of,
    parse,
)
from crow.bridge.questions import Questions

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from typing import Any

    from crow.bridge.messages import Message

_OFFLINE = "offline"
"""There is no connection. Lines of the editor are held."""
_INITIALIZING = "initializing"
"""`initialize` was sent."""
_CONFIGURING = "configuring"
"""The last login and the last change of each provider were sent."""
_RESUMING = "resuming"
"""A request to resume each open session from its cursor was sent."""
_LIVE = "live"
"""The requests without a response and the held lines were sent. Lines of the editor now pass at once."""

_OPENING = frozenset({"session/new", "session/load", "session/resume", "session/fork"})
_CLOSING = frozenset({"session/close", "session/delete", "session/archive"})
_LOGIN = frozenset({"authenticate", "logout", "auth/login", "auth/logout"})
"""Requests whose effect ends with the connection. On a new connection, the bridge repeats the last one that
succeeded."""

_PROVIDERS = frozenset({"providers/set", "providers/disable"})
_REPEATABLE = frozenset(
    {
        *("initialize", *_LOGIN, *_CLOSING, *_PROVIDERS, "auth/status", "providers/list", "session/list"),
        *("session/new", "session/load", "session/resume", "session/status", "session/set_title"),
        *("session/unarchive", "session/set_mode", "session/set_config_option"),
    }
)
"""Requests that the bridge may send twice without harm. A second `session/new` only creates an empty session, which
appears in no list of sessions."""

_NAMED = frozenset({"session/prompt", "_session/steering"})
"""Requests with a prompt. If the server knows names, the bridge names the prompt, and may send the request twice."""

_KEPT = ("cwd", "mcpServers", "additionalDirectories", "systemPrompt", "_meta")
"""The parameters that the bridge keeps when the editor opens a session. The bridge resumes the session with the same
parameters."""

_GAP = (
    "[The connection to crow was lost, and the messages that crow sent meanwhile are missing here. Load the session "
    "again to see all of them.]"
)

_RESTARTED = (
    "The server was restarted, so this turn has ended. The session has everything up to the restart. Send a prompt to "
    "continue."
)


class _Pending:
    """A request from the editor that has no response yet."""

    __slots__ = ("cancels", "is_repeated", "line", "message", "method", "number", "prompt_id", "session")

    def __init__(self, line: bytes, message: Message, number: int) -> None:
        self.line = line
        self.message = message
        self.number = number
        """The number of the request among the messages to the server."""
        self.method: str = message["method"]
        self.session: object = params_of(message).get("sessionId")
        """The id of the session that the request names, or None."""
        self.prompt_id: object = crow_meta(params_of(message)).get("promptId")
        """The name of the prompt, or None if the request is not a prompt with a name."""
        self.cancels: list[bytes] = []
        """The notifications with which the editor cancelled the request."""
        self.is_repeated = False
        """Whether the request was sent again on a new connection."""

    @property
    def is_load(self) -> bool:
        """Whether the request asks for the whole history. In version 2 of the protocol, `session/resume` can ask for
        the whole history too."""
        is_replay = self.method == "session/resume" and params_of(self.message).get("replayFrom") is not None
        return self.method == "session/load" or is_replay


class Journal:
    """Decides which messages go to the server and to the editor.

    The connection is in one of five phases: `_OFFLINE`, `_INITIALIZING`, `_CONFIGURING`, `_RESUMING` and `_LIVE`.
    `connected` begins with the second phase, the responses of the server lead to the next ones (`_restore`), and `lost`
    goes back to the first phase.
    """

    def __init__(self, unique: str) -> None:
        self.to_server: list[bytes] = []
        """Messages that the caller sends to the server. The caller then empties the list."""
        self.to_editor: list[bytes] = []
        """Messages that the caller sends to the editor. The caller then empties the list."""
        self.fatal = ""
        """Why the bridge must end, or an empty string if it can continue."""
        self.held_bytes = 0
        """The total size of the editor's messages that wait for the phase `_LIVE`."""
        self.number = 0
        """The number of the editor's messages that have been sent so far, counted over all connections."""
        self._phase = _OFFLINE
        self._is_known = False
        """Whether the server remembers the earlier connection, which means that it was not restarted."""
        self._unique = unique
        """A part of the name of each prompt. It is different in every journal."""
        self._knows_names = False
        """Whether the server recognises prompts by their names."""
        self._held: list[bytes] = []
        """The editor's messages that wait for the phase `_LIVE`."""
        self._pending: dict[Any, _Pending] = {}
        """The editor's requests that have no response yet, by their ids."""
        self._notices: list[tuple[int, bytes]] = []
        """The editor's notifications that the server may not have read yet, each with its number. Those that cancel a
        request are in `_Pending.cancels`."""
        self._initialize: Message | None = None
        self._is_v2 = False
        self._login: Message | None = None
        """The last request of `_LOGIN` that succeeded."""
        self._providers: dict[str, Message] = {}
        """The last request that changed each provider."""
        self._sessions: dict[str, Message] = {}
        """The open sessions, each with the parameters with which to resume it."""
        self._cursors: dict[str, str] = {}
        """The newest cursor of each session that is open or being loaded: the place up to which the editor shows the
        session. A session has no cursor while it is being loaded and the editor shows nothing of it yet."""
        self._questions = Questions()
        self._own: dict[str, Message] = {}
        """The bridge's own requests on this connection that have no response yet, by their ids."""
        self._own_count = 0

    @property
    def is_live(self) -> bool:
        """Whether the editor's messages go to the server at once."""
        return self._phase == _LIVE

    @property
    def waits_for_answers(self) -> bool:
        """Whether any request other than a prompt has no response yet."""
        return any(pending.method != "session/prompt" for pending in self._pending.values())

    @property
    def has_old(self) -> bool:
        """Whether there are questions from earlier connections that the server has not repeated yet."""
        return self._questions.has_old

    def editor_sent(self, line: bytes) -> None:
        """Handle a line from the editor."""
        if not self.is_live:
            self._held.append(line)
            self.held_bytes += len(line)
            return
        self.number += 1
        message = parse(line)
        method = message.get("method")
        if not isinstance(method, str):
            line = self._questions.answered(line, message, self.number)
        elif "id" in message:
            line = self._note_request(line, message, method)
        else:
            self._note_notification(line, message, method)
        if line:
            self.to_server.append(line)

    def server_sent(self, line: bytes) -> None:
        """Handle a message from the server."""
        message = parse(line)
        method, message_id = message.get("method"), message.get("id")
        if isinstance(method, str):
            if "id" in message:
                line, answer = self._questions.asked(line, message, self.number + 1)
                if answer:
                    self.number += 1
                    self.to_server.append(answer)
            elif method == "$/cancel_request":
                line = self._questions.withdrawn(line, message)
            else:
                self._updated(params_of(message))
        elif isinstance(message_id, str) and message_id in self._own:
            self._answered_us(self._own.pop(message_id), message)
            return
        elif is_id(message_id) and message_id in self._pending:
            pending = self._pending[message_id]
            if _is_refused_for_now(pending, message):
                return
            del self._pending[message_id]
            line = self._answered(line, pending, message)
        if line:
            self.to_editor.append(line)

    def connected(self, *, is_known: bool) -> None:
        """Begin to restore the state on a new connection. `is_known` is true if the server remembers the earlier
        connection, which means that it was not restarted."""
        self._is_known = is_known
        self._questions.connected()
        self._own = {}
        self._phase = _INITIALIZING
        first = next((each for each in self._pending.values() if each.message is self._initialize), None)
        if self._initialize is None:
            self._go_live()
        elif first is not None:
            self.to_server.append(first.line)
        else:
            self._request(self._initialize)

    def lost(self) -> None:
        """Mark the connection as lost."""
        self._phase = _OFFLINE
        self.to_server.clear()
        self.to_editor += self._questions.lost()

    def acknowledged(self, number: int) -> None:
        """Record that the server has read the editor's first `number` messages."""
        self._notices = [notice for notice in self._notices if notice[0] > number]
        self._questions.acknowledged(number)

    def withdraw_old(self) -> None:
        """Withdraw the questions of earlier connections, except those that the server has repeated on the current
        connection."""
        self.to_editor += self._questions.withdraw_old()

    def fail_all(self, problem: str) -> None:
        """Answer every open request from the editor with an error."""
        for request_id in self._pending:
            self.to_editor.append(error_response(request_id, problem))
        for line in self._held:
            message = parse(line)
            if isinstance(message.get("method"), str) and "id" in message:
                self.to_editor.append(error_response(message["id"], problem))
        self._pending.clear()
        self._held.clear()
        self.held_bytes = 0

    # Messages from the editor.

    def _note_request(self, line: bytes, message: Message, method: str) -> bytes:
        """Remember a request until it has its response. Return the line for the server."""
        request_id = message["id"]
        if not is_id(request_id) or request_id in self._pending:
            return line  # the server refuses such an id
        if self._knows_names and method in _NAMED:
            line, message = self._named(line, message)
        self._pending[request_id] = pending = _Pending(line, message, self.number)
        if method == "initialize":
            self._initialize = message
        elif pending.is_load and isinstance(pending.session, str):
            self._cursors.pop(pending.session, None)
        return line

    def _named(self, line: bytes, message: Message) -> tuple[bytes, Message]:
        """Return a prompt with a name, as a line and as a message. Do not change a prompt that has a name, or whose
        parameters are malformed."""
        params = message.get("params")
        meta = params_of(message).get("_meta")
        crow = crow_meta(params_of(message))
        has_odd_meta = not isinstance(meta, dict | None) or not isinstance(as_object(meta).get("crow"), dict | None)
        if not isinstance(params, dict) or has_odd_meta or crow.get("promptId") is not None:
            return line, message
        crow = crow | {"promptId": f"bridge-{self._unique}-{self.number}"}
        message = message | {"params": params | {"_meta": as_object(meta) | {"crow": crow}}}
        return encode(message), message

    def _note_notification(self, line: bytes, message: Message, method: str) -> None:
        """Remember a notification until the server has read it. But keep a notification that cancels a pending request
        as long as that request, and do not keep a `$/cancel_request` for any other request."""
        params = params_of(message)
        if method == "$/cancel_request":
            request_id = params.get("requestId")
            if is_id(request_id) and request_id in self._pending:
                self._pending[request_id].cancels.append(line)
            return
        if method == "session/cancel":
            prompts = [each for each in self._pending.values() if each.method == "session/prompt"]
            cancelled = [each for each in prompts if each.session == params.get("sessionId")]
            if cancelled:
                cancelled[-1].cancels.append(line)
                return
        self._notices.append((self.number, line))

    # Messages from the server.

    def _updated(self, params: Message) -> None:
        session, update = params.get("sessionId"), as_object(params.get("update"))
        if isinstance(session, str):
            self._note_cursor(session, params)
            if update.get("sessionUpdate") == "tool_call_update" and update.get("status") not in (None, "pending"):
                self._questions.forget_answers(session, update.get("toolCallId"))

    def _note_cursor(self, session: str, holder: Message) -> None:
        """Note the cursor in the parameters or the result `holder`, if there is one."""
        cursor = as_object(holder.get("_meta")).get("acp/cursor")
        if isinstance(cursor, str):
            self._cursors[session] = cursor

    def _answered(self, line: bytes, pending: _Pending, message: Message) -> bytes:
        """Note the response to a request from the editor. Return the line for the editor."""
        is_gone = as_object(message.get("error")).get("code") == NOT_FOUND
        if "result" in message:
            line = self._succeeded(line, pending, message)
        elif is_gone and pending.is_repeated and pending.method in _CLOSING:
            self._forget(pending.session)  # the first request succeeded, and only its response was lost
            line = encode({"jsonrpc": "2.0", "id": message["id"], "result": {}})
        if pending.method == "initialize":
            self._restore()
        return line

    def _succeeded(self, line: bytes, pending: _Pending, message: Message) -> bytes:
        method, params, result = pending.method, params_of(pending.message), as_object(message["result"])
        session = result.get("sessionId", pending.session)
        if method == "initialize":
            self._note_server(result)
            self._is_v2 = result.get("protocolVersion") == 2
        elif method in _LOGIN:
            self._login = pending.message
        elif method in _PROVIDERS:
            self._providers[str(params.get("providerId", params.get("id")))] = pending.message
        elif method in _CLOSING:
            self._forget(session)
        elif method in _OPENING and isinstance(session, str):
            self._sessions[session] = {key: params[key] for key in _KEPT if key in params}
        if isinstance(session, str):
            self._note_cursor(session, result)
        if method == "session/prompt" and isinstance(session, str):
            self._questions.forget_answers(session)
            is_cancelled = result.get("stopReason") == "cancelled" and not pending.cancels
            if pending.is_repeated and is_cancelled and not self._is_known:
                return error_response(message["id"], _RESTARTED)
        return line

    def _note_server(self, initialized: Message) -> None:
        self._knows_names = "promptId" in crow_meta(initialized)

    def _forget(self, session: object) -> None:
        if isinstance(session, str):
            self._sessions.pop(session, None)
            self._cursors.pop(session, None)

    # Restoring a new connection.

    def _restore(self) -> None:
        """If all requests of the current phase have their responses, begin the next phase and send its requests. Repeat
        this for phases in which there is nothing to send."""
        while not self._own and self._phase in (_INITIALIZING, _CONFIGURING, _RESUMING):
            if self._phase == _INITIALIZING:
                self._phase = _CONFIGURING
                for request in (*([self._login] if self._login else ()), *self._providers.values()):
                    self._request(request)
            elif self._phase == _CONFIGURING:
                self._phase = _RESUMING
                for session in self._sessions:
                    self._resume(session)
            else:
                self._go_live()

    def _request(self, request: Message) -> None:
        """Send a request that comes from the bridge itself."""
        self._own_count += 1
        request_id = f"crow-bridge-{self._own_count}"
        self._own[request_id] = request
        self.to_server.append(encode(request | {"id": request_id}))

    def _answered_us(self, request: Message, message: Message) -> None:
        """Handle the response to a request of the bridge itself."""
        if self._phase == _INITIALIZING:
            if "error" in message:
                problem = as_object(message["error"]).get("message")
                self.fatal = f"The server refused to initialize the connection again: {problem}"
                return
            self._note_server(as_object(message.get("result")))
        elif self._phase == _RESUMING:
            self._resumed(request["params"], message)
        self._restore()

    def _resume(self, session: str) -> None:
        """Ask the server for the part of an open session that the editor has missed. If the editor is loading the
        session and shows nothing of it yet, load the session instead."""
        cursor = self._cursors.get(session)
        params: Message = {"mcpServers": []}
        params |= self._sessions[session] | {"sessionId": session}
        pending = [each for each in self._pending.values() if each.session == session]
        is_load = cursor is None and any(each.is_load for each in pending)
        if is_load and self._is_v2:
            params["replayFrom"] = {"type": "start"}
        if sent := [each.prompt_id for each in pending if isinstance(each.prompt_id, str)]:
            meta = as_object(params.get("_meta"))  # the editor shows these prompts already
            params["_meta"] = meta | {"crow": as_object(meta.get("crow")) | {"promptIds": sent}}
        method = "session/load" if is_load and not self._is_v2 else "session/resume"
        self._request({"jsonrpc": "2.0", "method": method, "params": _at_cursor(params, cursor)})

    def _resumed(self, params: Message, message: Message) -> None:
        """Handle the response to the bridge's own request to resume a session. `params` are the parameters of that
        request."""
        session, error = params["sessionId"], as_object(message.get("error"))
        if not error:
            self._note_cursor(session, as_object(message.get("result")))
        elif as_object(error.get("data")).get("reason") == "draining":
            return  # the server will end this connection, and the next one resumes the session
        elif "acp/cursor" in as_object(params.get("_meta")) and error.get("code") != NOT_FOUND:
            self._cursors.pop(session, None)
            self._tell_gap(session)
            self._resume(session)
        else:
            self._forget(session)  # the server will answer requests for this session with an error of its own

    def _tell_gap(self, session: str) -> None:
        """Tell the user that a part of the session is missing in the editor."""
        update: Message = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": _GAP}}
        if self._is_v2:
            update["messageId"] = f"crow-bridge-{self._own_count}"
        params = {"sessionId": session, "update": update}
        self.to_editor.append(encode({"jsonrpc": "2.0", "method": "session/update", "params": params}))

    def _go_live(self) -> None:
        """Repeat the requests that have no response. Then send the editor's messages that were held."""
        self._phase = _LIVE
        repeated = list(self._notices)
        for request_id, pending in tuple(self._pending.items()):
            if pending.method == "initialize":
                continue
            if not self._may_repeat(pending):
                del self._pending[request_id]
                self.to_editor.append(error_response(request_id, _unknown_outcome(pending.method)))
                continue
            pending.is_repeated = True
            repeated += [(pending.number, line) for line in (self._repeated(pending), *pending.cancels)]
        # Sort by number, as the editor sent them: a notification that cancels one turn must not cancel a later turn.
        self.to_server += [line for _, line in sorted(repeated, key=lambda each: each[0])]
        held, self._held, self.held_bytes = self._held, [], 0
        for line in held:
            self.editor_sent(line)

    def _may_repeat(self, pending: _Pending) -> bool:
        """Return whether it does no harm to send the request again. A prompt has no name if the editor sent it before
        the first response of the server. Only a server that remembers the connection recognises such a prompt."""
        if pending.method in _REPEATABLE or (isinstance(pending.prompt_id, str) and self._knows_names):
            return True
        return pending.method == "session/prompt" and self._is_known

    def _repeated(self, pending: _Pending) -> bytes:
        """Return the request to repeat. If the editor already shows a part of the requested history, the returned
        request asks only for the rest."""
        cursor = self._cursors.get(pending.session) if isinstance(pending.session, str) else None
        if pending.method not in ("session/load", "session/resume") or cursor is None:
            return pending.line
        params = _at_cursor(params_of(pending.message), cursor)
        params.pop("replayFrom", None)
        return encode(pending.message | {"method": "session/resume", "params": params})


def _is_refused_for_now(pending: _Pending, message: Message) -> bool:
    """Return whether a server that shuts down has refused the request, so that the bridge can send the request again on
    the next connection."""
    reason = as_object(as_object(message.get("error")).get("data")).get("reason")
    return reason == "draining" and pending.method in _REPEATABLE | _NAMED and not pending.cancels


def _unknown_outcome(method: str) -> str:
    return f"The connection broke before the server answered {method}, so it is not known whether {method} succeeded."


def _at_cursor(params: Message, cursor: str | None) -> Message:
    """Return the parameters, with the cursor if there is one."""
    if cursor is None:
        return params
    return params | {"_meta": as_object(params.get("_meta")) | {"acp/cursor": cursor}}

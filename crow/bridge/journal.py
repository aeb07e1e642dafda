"""Remembers which messages passed the bridge, so that the editor does not notice a lost connection. Does no I/O.

On the first connection, every message passes unchanged. After a connection is lost, the journal initializes the next
connection, resumes the open sessions from their cursors, and repeats the requests that have no response. Each prompt
gets a name that is unique in its session, so any server of the session recognises a repeated prompt and does not run it
again.
"""

from __future__ import annotations

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    _Message: TypeAlias = dict[str, Any]


class _AsUsual:
    """The options of `json.loads`."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_int, parse_float, parse_constant = int, float, float


def _refuse_value(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is no part of a message")


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _scan = make_scanner(_AsUsual)  # type: ignore[arg-type]
    _dump = make_encoder(None, _refuse_value, encode_basestring_ascii, None, ":", ",", False, False, True)
except (ImportError, AttributeError):  # some Pythons have no such scanner, or one with more options
    from json import JSONDecoder, JSONEncoder  # takes 4 ms, because it imports `re`

    _scan = JSONDecoder().scan_once  # type: ignore[attr-defined]

    def _dump(message: _Message, _level: int) -> tuple[str, ...]:  # type: ignore[misc]
        return (JSONEncoder(separators=(",", ":")).encode(message),)


_SPACES = " \t\n\r"

_INTERNAL_ERROR, _NOT_FOUND = -32603, -32002

_OPENING = frozenset({"session/new", "session/load", "session/resume", "session/fork"})
_REOPENING = frozenset({"session/resume", "session/load"})
_CLOSING = frozenset({"session/close", "session/delete", "session/archive"})
_REPEATABLE = _CLOSING | {
    *("initialize", "authenticate", "logout", "auth/login", "auth/logout", "auth/status", "session/list"),
    *("session/new", "session/load", "session/resume", "session/status", "session/set_title", "session/unarchive"),
    *("session/set_mode", "session/set_config_option", "providers/list", "providers/set", "providers/disable"),
}
"""Requests that the bridge may send twice without harm. A second `session/new` only creates an empty session, which
appears in no list of sessions."""

_SHOWN = frozenset({"agent_message_chunk", "agent_thought_chunk", "user_message_chunk", "tool_call", "plan"})
"""Updates that an editor shows. If such an update arrives twice, the editor shows it twice."""

_NAMED = frozenset({"session/prompt", "_session/steering"})
"""Requests with a prompt. If the server knows names, the bridge names the prompt, and may send the request twice."""

_MAX_KEPT_ANSWERS = 32

_KEPT = ("cwd", "mcpServers", "additionalDirectories", "systemPrompt", "_meta")
"""The parameters that the bridge keeps when the editor opens a session. The bridge resumes the session with the same
parameters."""

_LOGIN = frozenset({"authenticate", "logout", "auth/login", "auth/logout"})
"""Requests whose effect ends with the connection. On a new connection, the bridge repeats the last of these requests
that succeeded."""

_GAP = (
    "[The connection to crow was lost, and the messages that crow sent meanwhile are missing here. Load the session "
    "again to see all of them.]"
)


class _Pending:
    """A request from the editor that has no response yet."""

    __slots__ = ("cancels", "is_received", "is_repeated", "line", "message", "number", "prompt_id")

    def __init__(self, line: bytes, message: _Message, number: int) -> None:
        self.line = line
        self.message = message
        self.number = number
        """The number of the request among the messages to the server."""
        self.cancels: list[bytes] = []
        """The notifications with which the editor cancelled the request."""
        self.prompt_id = _crow_meta(message).get("promptId")
        """The name of the prompt, or None if the request is not a prompt with a name."""
        self.is_received = False
        """Whether the server has certainly read the request."""
        self.is_repeated = False
        """Whether the request was sent again on a new connection."""

    @property
    def session(self) -> object:
        """The id of the session that the request names."""
        return _object(self.message.get("params")).get("sessionId")

    @property
    def is_load(self) -> bool:
        """Whether the request asks for the whole history. In version 2 of the protocol, `session/resume` can ask for
        the whole history too."""
        method, params = self.message["method"], _object(self.message.get("params"))
        return method == "session/load" or (method == "session/resume" and params.get("replayFrom") is not None)


class _EditorQuestion:
    """A request from the server to the editor. The journal keeps the request until the server is known to have
    received the answer."""

    __slots__ = ("answer", "editor_id", "generation", "is_withdrawn", "key", "number", "params", "server_id")

    def __init__(
        self, key: tuple[str, str, str] | None, params: _Message, editor_id: Any, server_id: Any, generation: int
    ) -> None:
        self.key = key
        """The method, the session and the tool call of the request. A new connection may repeat the request with the
        same key. None if the request is not about a tool call."""
        self.params = params
        self.editor_id = editor_id
        """The id of this request in messages to the editor."""
        self.server_id = server_id
        """The id of this request in messages to the server."""
        self.generation = generation
        """The number of the connection on which `server_id` is valid."""
        self.answer: _Message | None = None
        """The editor's answer, if it has arrived."""
        self.number = 0
        """The number of the answer among the messages to the server, or 0 if it was not sent yet."""
        self.is_withdrawn = False
        """Whether the bridge has withdrawn the request, because the server no longer waits for the answer."""


class Journal:
    """Decides which messages go to the server and to the editor."""

    def __init__(self, unique: str) -> None:
        self.to_server: list[bytes] = []
        """Messages that the caller sends to the server. The caller then empties the list."""
        self.to_editor: list[bytes] = []
        """Messages that the caller sends to the editor. The caller then empties the list."""
        self.fatal = ""
        """Why the bridge must end, or an empty string if it can continue."""
        self.held_bytes = 0
        """The total size of the editor's messages that wait for a connection."""
        self.is_live = False
        """Whether the editor's messages go to the server at once. On a new connection, they wait until the open
        sessions have been resumed."""
        self._generation = 0
        self._is_known = False
        self._unique = unique
        """A part of the names of prompts, which differs from that of every other journal."""
        self._knows_names = False
        """Whether the server recognises prompts by their names."""
        self._number = 0
        self._held: list[bytes] = []
        self._pending: dict[Any, _Pending] = {}
        """The editor's requests that have no response yet, by their ids."""
        self._notices: list[tuple[int, bytes]] = []
        """The editor's other notifications that the server may not have read yet, each with its number."""
        self._initialize: _Message | None = None
        self._is_v2 = False
        self._login: _Message | None = None
        """The last request of `_LOGIN` that succeeded."""
        self._providers: dict[str, _Message] = {}
        """The last request that changed each provider."""
        self._sessions: dict[str, _Message] = {}
        """The open sessions, each with the parameters with which to resume it."""
        self._unseen: set[str] = set()
        """The sessions of which the editor shows nothing yet, so that they may be loaded whole."""
        self._cursors: dict[str, str] = {}
        """The newest cursor of each session."""
        self._asks: dict[Any, _EditorQuestion] = {}
        """The server's requests to the editor, by the ids that the editor knows."""
        self._own: dict[str, _Message] = {}
        """The bridge's own requests on this connection that have no response yet, by their ids."""
        self._own_count = 0

    @property
    def waits_for_answers(self) -> bool:
        """Whether any request other than a prompt has no response yet."""
        return any(pending.message["method"] != "session/prompt" for pending in self._pending.values())

    @property
    def number(self) -> int:
        """The number of the editor's messages that have been sent so far, counted over all connections."""
        return self._number

    def editor_sent(self, line: bytes) -> None:
        """Handle a line from the editor."""
        if not self.is_live:
            self._held.append(line)
            self.held_bytes += len(line)
            return
        sent = self._note(line)
        if sent is not None:
            self.to_server.append(sent)

    def _note(self, line: bytes) -> bytes | None:
        """Remember a line from the editor before it is sent. Return the bytes to send in its place, or None if there is
        nothing to send."""
        self._number += 1
        message = _parse(line)
        method, message_id = message.get("method"), message.get("id")
        if isinstance(method, str) and "id" in message:
            return self._note_request(line, message, method, message_id)
        if isinstance(method, str):
            self._note_notification(line, message, method)
        elif _is_id(message_id) and message_id in self._asks:
            return self._note_answer(line, message, self._asks[message_id])
        return line

    def server_sent(self, text: bytes) -> None:
        """Handle a message from the server."""
        message = _parse(text)
        method, message_id = message.get("method"), message.get("id")
        if isinstance(method, str):
            params = _object(message.get("params"))
            if "id" in message:
                text = self._asked(text, message, method, params)
            elif method == "$/cancel_request":
                text = self._withdrawn(text, message, params)
            else:
                text = self._updated(text, params)
        elif isinstance(message_id, str) and message_id in self._own:
            self._answered_us(self._own.pop(message_id), message)
            return
        elif _is_id(message_id) and message_id in self._pending:
            if self._is_refused_for_now(self._pending[message_id], message):
                return
            text = self._answered(text, self._pending.pop(message_id), message)
        if text:
            self.to_editor.append(text)

    def connected(self, *, is_known: bool) -> None:
        """Begin to restore the state on a new connection. `is_known` is true if the server remembers the earlier
        connection. Such a server recognises repeated prompts."""
        self._generation += 1
        self._is_known = is_known
        self._own = {}
        if self._initialize is None:
            self._go_live()
        elif (request_id := self._initialize["id"]) in self._pending:
            self.to_server.append(self._pending[request_id].line)
        else:
            self._request(self._initialize)

    def lost(self) -> None:
        """Mark the connection as lost."""
        self.is_live = False
        self.to_server.clear()
        for ask in tuple(self._asks.values()):
            # The server repeats permission requests on the next connection. It has given up all its other requests.
            if not _is_asked_again(ask):
                if ask.answer is None:
                    self._withdraw(ask)
                else:
                    del self._asks[ask.editor_id]

    def acknowledged(self, number: int) -> None:
        """Record that the server has read the editor's first `number` messages."""
        self._notices = [notice for notice in self._notices if notice[0] > number]
        for pending in self._pending.values():
            pending.is_received = pending.is_received or pending.number <= number
        answered = [ask for ask in self._asks.values() if ask.answer is not None and 0 < ask.number <= number]
        # Some answers are kept: if the connection breaks before the server has used an answer, the server asks again.
        kept = [ask for ask in answered if _is_asked_again(ask)][-_MAX_KEPT_ANSWERS:]
        for ask in answered:
            if ask not in kept:
                del self._asks[ask.editor_id]

    def withdraw_old(self) -> None:
        """Withdraw the permission requests of earlier connections, except those that the server has repeated on the
        current connection."""
        for ask in tuple(self._asks.values()):
            if self._is_old(ask):
                if ask.answer is None:
                    self._withdraw(ask)
                else:
                    del self._asks[ask.editor_id]

    @property
    def has_old(self) -> bool:
        """Whether there are permission requests from earlier connections that were not withdrawn."""
        return any(map(self._is_old, self._asks.values()))

    def _is_old(self, ask: _EditorQuestion) -> bool:
        return ask.generation < self._generation and not ask.is_withdrawn

    def fail_all(self, problem: str) -> None:
        """Answer every open request from the editor with an error."""
        for pending in self._pending.values():
            self._refuse(pending, problem)
        for line in self._held:
            message = _parse(line)
            if isinstance(message.get("method"), str) and "id" in message:
                self.to_editor.append(_error(message["id"], problem))
        self._pending.clear()
        self._held.clear()
        self.held_bytes = 0

    # Messages from the editor.

    def _note_request(self, line: bytes, message: _Message, method: str, request_id: Any) -> bytes:
        if not _is_id(request_id) or request_id in self._pending:
            return line  # the server refuses such an id
        if self._knows_names and method in _NAMED:
            line, message = self._named(line, message)
        self._pending[request_id] = _Pending(line, message, self._number)
        if method == "initialize":
            self._initialize = message
        elif self._pending[request_id].is_load and isinstance(session := self._pending[request_id].session, str):
            self._cursors.pop(session, None)
            self._unseen.add(session)
        return line

    def _named(self, line: bytes, message: _Message) -> tuple[bytes, _Message]:
        """Give a prompt a name, unless it has one."""
        params, meta, crow = message.get("params"), _object(message.get("params")).get("_meta"), _crow_meta(message)
        has_odd_meta = not isinstance(meta, dict | None) or not isinstance(_object(meta).get("crow"), dict | None)
        if not isinstance(params, dict) or has_odd_meta or crow.get("promptId") is not None:
            return line, message
        crow = crow | {"promptId": f"bridge-{self._unique}-{self._number}"}
        message = message | {"params": params | {"_meta": _object(meta) | {"crow": crow}}}
        return _encode(message), message

    def _note_notification(self, line: bytes, message: _Message, method: str) -> None:
        params = _object(message.get("params"))
        if method == "session/cancel":
            meant = [
                pending
                for pending in self._pending.values()
                if pending.message["method"] == "session/prompt" and pending.session == params.get("sessionId")
            ]
        else:
            request_id = params.get("requestId") if method == "$/cancel_request" else None
            meant = [self._pending[request_id]] if _is_id(request_id) and request_id in self._pending else []
        for pending in meant[-1:] if method == "session/cancel" else meant:
            pending.cancels.append(line)
        if not meant and method != "$/cancel_request":
            self._notices.append((self._number, line))

    def _note_answer(self, line: bytes, message: _Message, ask: _EditorQuestion) -> bytes | None:
        if ask.is_withdrawn:
            del self._asks[ask.editor_id]
            return None
        ask.answer = message
        if ask.generation < self._generation:
            return None  # the answer is sent when the server repeats its request
        ask.number = self._number
        return line if ask.server_id == ask.editor_id else _encode(message | {"id": ask.server_id})

    # Messages from the server.

    def _asked(self, text: bytes, message: _Message, method: str, params: _Message) -> bytes:
        server_id = message["id"]
        if not _is_id(server_id):
            return text
        # Version 2 has the call in `subject`.
        call = _object(params.get("toolCall", _object(params.get("subject")).get("toolCall"))).get("toolCallId")
        key = (method, str(params.get("sessionId")), str(call)) if call is not None else None
        for ask in self._asks.values():
            if key is not None and ask.key == key and self._is_old(ask):
                if ask.answer is not None and ask.params != params:
                    break  # this is a different request about the same call
                ask.server_id, ask.generation = server_id, self._generation
                if ask.answer is not None:
                    self._number += 1
                    ask.number = self._number
                    self.to_server.append(_encode(ask.answer | {"id": server_id}))
                return b""
        editor_id = server_id
        while editor_id in self._asks:  # a request from an earlier connection already uses this id
            editor_id = f"{server_id}~{self._generation}" if editor_id == server_id else f"{editor_id}~"
        self._asks[editor_id] = _EditorQuestion(key, params, editor_id, server_id, self._generation)
        return text if editor_id == server_id else _encode(message | {"id": editor_id})

    def _withdrawn(self, text: bytes, message: _Message, params: _Message) -> bytes:
        for ask in self._asks.values():
            if ask.server_id == params.get("requestId") and ask.generation == self._generation:
                if ask.editor_id != ask.server_id:
                    return _encode(message | {"params": params | {"requestId": ask.editor_id}})
                break
        return text

    def _updated(self, text: bytes, params: _Message) -> bytes:
        session, update = params.get("sessionId"), _object(params.get("update"))
        if not isinstance(session, str):
            return text
        self._note_cursor(session, params)
        if update.get("sessionUpdate") in _SHOWN:
            self._unseen.discard(session)
        elif update.get("sessionUpdate") == "tool_call_update" and update.get("status") not in (None, "pending"):
            self._drop_answers(session, update.get("toolCallId"))
        prompts = [each for each in self._pending.values() if each.session == session and _is_prompt(each)]
        if not self.is_live and update.get("sessionUpdate") in ("user_message_chunk", "user_message"):
            for pending in prompts:
                if _is_part_of(pending, update):
                    pending.is_received = True
                    return text if self._is_v2 else b""  # in version 1, the editor shows the prompt that it sent
        elif self.is_live:
            for pending in prompts:
                pending.is_received = True
        return text

    def _drop_answers(self, session: str, call: object = None) -> None:
        """Forget the user's answers about a tool call that runs or has ended. The server will not ask about that call
        again.

        If `call` is None, forget the answers about all calls of the session, because the turn has ended.
        """
        for ask in tuple(self._asks.values()):
            if ask.answer is None or ask.key is None or ask.key[1] != session:
                continue
            if call is None or ask.key[2] == str(call):
                del self._asks[ask.editor_id]

    def _note_cursor(self, session: str, holder: _Message) -> None:
        cursor = _object(holder.get("_meta")).get("acp/cursor")
        if isinstance(cursor, str):
            self._cursors[session] = cursor

    def _answered(self, text: bytes, pending: _Pending, message: _Message) -> bytes:
        method, params = pending.message["method"], _object(pending.message.get("params"))
        if "result" not in message:
            is_gone = _object(message.get("error")).get("code") == _NOT_FOUND
            if pending.is_repeated and is_gone and method in _CLOSING:
                self._forget(pending.session)  # the first request succeeded, and only its response was lost
                return _encode({"jsonrpc": "2.0", "id": message["id"], "result": {}})
            if method == "initialize" and not self.is_live:
                self._go_live()
            return text
        result = _object(message["result"])
        session = result.get("sessionId", pending.session)
        if method == "session/prompt" and isinstance(session, str):
            self._drop_answers(session)
            if (
                pending.is_repeated
                and result.get("stopReason") == "cancelled"
                and not (pending.cancels or self._is_known)
            ):
                return _error(message["id"], _lost_answer(method, is_restarted=True))
        if method == "initialize":
            self._note_server(result)
            self._is_v2 = result.get("protocolVersion") == 2
            if not self.is_live:
                self._go_live()
        elif method in _LOGIN:
            self._login = pending.message
        elif method in ("providers/set", "providers/disable"):
            self._providers[str(params.get("providerId", params.get("id")))] = pending.message
        elif method in _CLOSING:
            self._forget(session)
        elif method in _OPENING and isinstance(session, str):
            self._sessions[session] = {key: params[key] for key in _KEPT if key in params}
            if method == "session/new":
                self._unseen.add(session)
        if isinstance(session, str):
            self._note_cursor(session, result)
        return text

    def _is_refused_for_now(self, pending: _Pending, message: _Message) -> bool:
        """Return whether a server that shuts down has refused the request, so that the bridge can send the request
        again on the next connection."""
        method = pending.message["method"]
        reason = _object(_object(message.get("error")).get("data")).get("reason")
        return reason == "draining" and (method in _REPEATABLE or method in _NAMED) and not pending.cancels

    def _note_server(self, initialized: _Message) -> None:
        self._knows_names = "promptId" in _object(_object(initialized.get("_meta")).get("crow"))

    def _forget(self, session: object) -> None:
        if isinstance(session, str):
            self._sessions.pop(session, None)
            self._cursors.pop(session, None)
            self._unseen.discard(session)

    # Restoring a new connection.

    def _request(self, request: _Message) -> None:
        """Send a request that comes from the bridge itself."""
        self._own_count += 1
        request_id = f"crow-bridge-{self._own_count}"
        self._own[request_id] = request
        self.to_server.append(_encode(request | {"id": request_id}))

    def _answered_us(self, request: _Message, message: _Message) -> None:
        method, error = request["method"], _object(message.get("error"))
        if method == "initialize":
            if error:
                self.fatal = f"The server refused to initialize the connection again: {error.get('message')}"
                return
            self._note_server(_object(message.get("result")))
            for each in (*([self._login] if self._login else ()), *self._providers.values()):
                self._request(each)
        elif method in _REOPENING and request["params"].get("sessionId") in self._sessions:
            self._resumed(request["params"], error, message)
        if self._own:
            return
        if method in _REOPENING or not self._sessions:
            self._go_live()
            return
        for session in self._sessions:
            cursor = self._cursors.get(session)
            self._resume(session, cursor, is_unseen=cursor is None and session in self._unseen)

    def _resume(self, session: str, cursor: str | None, *, is_unseen: bool = False) -> None:
        params: _Message = {"mcpServers": []}
        params |= self._sessions[session] | {"sessionId": session}
        method = "session/load" if is_unseen and not self._is_v2 else "session/resume"
        if is_unseen and self._is_v2:
            params["replayFrom"] = {"type": "start"}
        names = [pending.prompt_id for pending in self._pending.values() if pending.session == session]
        if sent := [name for name in names if isinstance(name, str)]:  # the editor shows these prompts already
            meta = _object(params.get("_meta"))
            params["_meta"] = meta | {"crow": _object(meta.get("crow")) | {"promptIds": sent}}
        self._request({"jsonrpc": "2.0", "method": method, "params": _at_cursor(params, cursor)})

    def _resumed(self, params: _Message, error: _Message, message: _Message) -> None:
        session = params["sessionId"]
        if error and "acp/cursor" in _object(params.get("_meta")) and error.get("code") != _NOT_FOUND:
            self._cursors.pop(session, None)
            content = {"type": "text", "text": _GAP}
            update: _Message = {"sessionUpdate": "agent_message_chunk", "content": content}
            if self._is_v2:
                update["messageId"] = f"crow-bridge-{self._own_count}"
            notice: _Message = {"jsonrpc": "2.0", "method": "session/update"}
            self.to_editor.append(_encode(notice | {"params": {"sessionId": session, "update": update}}))
            self._resume(session, None)
        elif error:
            self._forget(session)  # the server will answer requests for this session with an error of its own
        else:
            self._note_cursor(session, _object(message.get("result")))

    def _go_live(self) -> None:
        """Repeat the requests that have no response. Then send the editor's messages that arrived while there was no
        connection."""
        self.is_live = True
        repeated = list(self._notices)
        for request_id, pending in tuple(self._pending.items()):
            method = pending.message["method"]
            if method == "initialize":
                continue
            is_named = isinstance(pending.prompt_id, str) and self._knows_names
            is_run_again = _is_prompt(pending) and pending.is_received and not (self._is_known or is_named)
            if is_run_again or not (_is_prompt(pending) or is_named or method in _REPEATABLE):
                del self._pending[request_id]
                self._refuse(pending, _lost_answer(method, is_restarted=is_run_again))
                continue
            pending.is_repeated = True
            repeated += [(pending.number, line) for line in (self._repeated(pending), *pending.cancels)]
        # In the order of the editor: a notification that cancels one turn must not cancel a later one.
        self.to_server += [line for _, line in sorted(repeated, key=lambda each: each[0])]
        held, self._held, self.held_bytes = self._held, [], 0
        for line in held:
            self.editor_sent(line)

    def _repeated(self, pending: _Pending) -> bytes:
        """Return the request to repeat. If the editor already shows a part of the history that the request loads, the
        returned request asks only for the rest."""
        session = pending.session
        cursor = self._cursors.get(session) if isinstance(session, str) else None
        if not pending.is_load or cursor is None:
            return pending.line
        params = _at_cursor(_object(pending.message.get("params")), cursor)
        params.pop("replayFrom", None)
        return _encode(pending.message | {"method": "session/resume", "params": params})

    def _refuse(self, pending: _Pending, problem: str) -> None:
        self.to_editor.append(_error(pending.message["id"], problem))

    def _withdraw(self, ask: _EditorQuestion) -> None:
        """Tell the editor that nobody waits for its answer any more. The question stays until the editor has answered,
        because the answer would otherwise go to a new question of the server with the same id."""
        if ask.is_withdrawn:
            return
        ask.is_withdrawn = True
        params = {"requestId": ask.editor_id}
        self.to_editor.append(_encode({"jsonrpc": "2.0", "method": "$/cancel_request", "params": params}))


def _lost_answer(method: str, *, is_restarted: bool) -> str:
    if is_restarted:
        return (
            "The server was restarted, so this turn has ended. The session has everything up to the restart. Send a "
            "prompt to continue."
        )
    return f"The connection broke before the server answered {method}, so it is not known whether {method} succeeded."


def _error(request_id: Any, problem: str) -> bytes:
    error = {"code": _INTERNAL_ERROR, "message": problem, "data": {"details": problem}}
    return _encode({"jsonrpc": "2.0", "id": request_id, "error": error})


def _at_cursor(params: _Message, cursor: str | None) -> _Message:
    if cursor is None:
        return params
    return params | {"_meta": _object(params.get("_meta")) | {"acp/cursor": cursor}}


def _is_prompt(pending: _Pending) -> bool:
    return bool(pending.message["method"] == "session/prompt")


def _is_part_of(pending: _Pending, update: _Message) -> bool:
    """Return whether an update shows a part of this prompt."""
    parts = _object(pending.message.get("params")).get("prompt")
    content = update.get("content")
    shown = content if isinstance(content, list) else [content]
    return isinstance(parts, list) and all(any(_is_same(part, each) for part in parts) for each in shown)


def _is_same(part: Any, shown: Any) -> bool:
    texts = [_object(each).get("text") for each in (part, shown)]
    return bool(part == shown or (isinstance(texts[0], str) and texts[0] == texts[1]))


def _is_asked_again(ask: _EditorQuestion) -> bool:
    return ask.key is not None


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _object(value: Any) -> _Message:
    return value if isinstance(value, dict) else {}


def _parse(line: bytes) -> _Message:
    """Return the message in `line`, or an empty dict if `line` is not a message. The receiver of an invalid line
    refuses the line."""
    try:
        text = line.decode().strip(_SPACES)
        message, end = _scan(text, 0)
    except (StopIteration, ValueError, RecursionError):
        return {}
    return _object(message) if end == len(text) else {}


def _crow_meta(message: _Message) -> _Message:
    return _object(_object(_object(message.get("params")).get("_meta")).get("crow"))


def _encode(message: _Message) -> bytes:
    return "".join(_dump(message, 0)).encode()

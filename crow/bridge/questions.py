"""Remembers the server's requests to the editor, such as permission requests, across connections. Does no I/O.

On a new connection, the server repeats each permission request whose answer it has not received, with a new id. The
editor must not show such a request twice, and an answer that was lost with the old connection must reach the server.
"""

from __future__ import annotations

from crow.bridge.messages import as_object, encode, is_id, params_of

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from crow.bridge.messages import Message

    _Key: TypeAlias = tuple[str, str, str]

_MAX_KEPT_ANSWERS = 32
"""At most this many answers are kept after the server has read them."""

_OPEN = "open"
"""The editor has not answered."""
_ANSWERED = "answered"
"""The editor has answered. The answer is kept as long as the server may repeat the question."""
_WITHDRAWN = "withdrawn"
"""The server no longer waits for the answer, and the editor was told so. The question is kept until the editor has
answered, because the answer would otherwise go to a new question of the server with the same id."""


class _Question:
    """A request from the server to the editor."""

    __slots__ = ("answer", "connection", "editor_id", "key", "line", "number", "params", "server_id", "state")

    def __init__(self, key: _Key | None, params: Message, editor_id: Any, server_id: Any, connection: int) -> None:
        self.key = key
        """The method, the session and the tool call of the request. None if the request is not about a tool call. On a
        new connection, the server repeats only requests about tool calls."""
        self.params = params
        self.editor_id = editor_id
        """The id of this request in messages to the editor."""
        self.server_id = server_id
        """The id of this request in messages to the server."""
        self.connection = connection
        """The number of the connection on which `server_id` is valid."""
        self.state = _OPEN
        """One of `_OPEN`, `_ANSWERED` and `_WITHDRAWN`."""
        self.line = b""
        """The editor's answer as a line. Empty if there is none."""
        self.answer: Message = {}
        """The message in `line`."""
        self.number = 0
        """The number of the answer among the messages to the server, or 0 if the answer was not sent yet."""

    def answer_line(self, number: int) -> bytes:
        """Return the answer as a line for the server. `number` is its number among the messages to the server."""
        self.number = number
        return self.line if self.server_id == self.editor_id else encode(self.answer | {"id": self.server_id})


class Questions:
    """The server's requests to the editor that have no answer yet or whose answers may still be needed."""

    def __init__(self) -> None:
        self._connection = 0
        """The number of the newest connection."""
        self._known: dict[Any, _Question] = {}
        """The questions by the ids that the editor knows."""

    def asked(self, line: bytes, message: Message, number: int) -> tuple[bytes, bytes]:
        """Handle a request from the server. Return a line for the editor and a line for the server. Either may be
        empty.

        Usually, the first line is the request. It is empty if the editor already has the request from an earlier
        connection. If the editor has also answered the request, the second line is the answer, which gets the number
        `number`.
        """
        server_id, params = message["id"], params_of(message)
        if not is_id(server_id):
            return line, b""
        key = _key_of(message["method"], params)
        for question in self._known.values():
            if key is not None and question.key == key and self._is_old(question) and question.params == params:
                question.server_id, question.connection = server_id, self._connection
                return b"", question.answer_line(number) if question.state == _ANSWERED else b""
        editor_id = server_id
        while editor_id in self._known:  # a question from an earlier connection already uses this id
            editor_id = f"{server_id}~{self._connection}" if editor_id == server_id else f"{editor_id}~"
        self._known[editor_id] = _Question(key, params, editor_id, server_id, self._connection)
        return line if editor_id == server_id else encode(message | {"id": editor_id}), b""

    def answered(self, line: bytes, message: Message, number: int) -> bytes:
        """Handle a response from the editor. `number` is the number of this message. Return the line for the server.

        The line is empty if the server has withdrawn the question. It is also empty if the server asked on an earlier
        connection, because the server gets the answer when it repeats the question.
        """
        question = self._known.get(message.get("id")) if is_id(message.get("id")) else None
        if question is None:
            return line
        if question.state == _WITHDRAWN:
            del self._known[question.editor_id]
            return b""
        question.state, question.line, question.answer = _ANSWERED, line, message
        return question.answer_line(number) if question.connection == self._connection else b""

    def withdrawn(self, line: bytes, message: Message) -> bytes:
        """Handle `$/cancel_request` from the server. Return the line for the editor."""
        params = params_of(message)
        for question in self._known.values():
            if question.server_id == params.get("requestId") and question.connection == self._connection:
                if question.editor_id != question.server_id:
                    return encode(message | {"params": params | {"requestId": question.editor_id}})
                break
        return line

    def connected(self) -> None:
        """Note that there is a new connection, on which the server may repeat questions of earlier connections."""
        self._connection += 1

    def lost(self) -> list[bytes]:
        """Note that the connection was lost: give up the questions that the server will not repeat on the next one.
        Return the lines for the editor."""
        return self._give_up([each for each in self._known.values() if each.key is None])

    def withdraw_old(self) -> list[bytes]:
        """Give up the questions of earlier connections that the server has not repeated. Return the lines for the
        editor."""
        return self._give_up([each for each in self._known.values() if self._is_old(each)])

    @property
    def has_old(self) -> bool:
        """Whether there are questions of earlier connections that the server has not repeated yet."""
        return any(map(self._is_old, self._known.values()))

    def acknowledged(self, number: int) -> None:
        """Note that the server has read the first `number` messages. Forget the answers among them, except the newest
        ones about tool calls: if the connection breaks before the server has used such an answer, the server repeats
        the question."""
        read = [each for each in self._known.values() if each.state == _ANSWERED and 0 < each.number <= number]
        kept = [each for each in read if each.key is not None][-_MAX_KEPT_ANSWERS:]
        for question in read:
            if question not in kept:
                del self._known[question.editor_id]

    def forget_answers(self, session: str, call: object = None) -> None:
        """Forget the answers about a tool call that runs or has ended: the server will not repeat those questions.

        If `call` is None, forget the answers about all calls of the session, because the turn has ended.
        """
        for question in tuple(self._known.values()):
            if question.state != _ANSWERED or question.key is None or question.key[1] != session:
                continue
            if call is None or question.key[2] == str(call):
                del self._known[question.editor_id]

    def _is_old(self, question: _Question) -> bool:
        return question.connection < self._connection and question.state != _WITHDRAWN

    def _give_up(self, questions: list[_Question]) -> list[bytes]:
        """Forget the answered ones among `questions`. Withdraw the open ones, and return the lines for the editor."""
        lines = []
        for question in questions:
            if question.state == _ANSWERED:
                del self._known[question.editor_id]
            elif question.state == _OPEN:
                question.state = _WITHDRAWN
                params = {"requestId": question.editor_id}
                lines.append(encode({"jsonrpc": "2.0", "method": "$/cancel_request", "params": params}))
        return lines


def _key_of(method: str, params: Message) -> _Key | None:
    """Return the key of a question (see `_Question.key`)."""
    subject = as_object(params.get("subject"))  # version 2 has the call in here
    call = as_object(params.get("toolCall", subject.get("toolCall"))).get("toolCallId")
    return None if call is None else (method, str(params.get("sessionId")), str(call))

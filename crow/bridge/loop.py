"""Carries messages between an editor on stdin and stdout and a server. Connects again when a connection is lost."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes 4 ms
import _thread
import os
import select
import stat
import time

from crow.bridge import FAILED, USERS_FAULT
from crow.bridge.websocket import (
    CLOSE,
    GOING_AWAY,
    NO_STATUS,
    NORMAL,
    PING,
    POLICY,
    PONG,
    TEXT,
    Address,
    WebSocketError,
    close_payload,
    close_reason,
)
from crow.bridge.wire import CHUNK_BYTES, NotConnected, WebSocket, connect

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from collections.abc import Callable

    from crow.bridge.journal import Journal

MAX_LINE_BYTES = 32 * 1024 * 1024
"""The size of the largest message that the bridge accepts from an editor. It must be equal to
`crow.protocol.frames.MAX_LINE_BYTES`."""

MAX_UNSENT_BYTES = 4 * 1024 * 1024
"""While more bytes than this wait to be sent to one side, the bridge reads nothing from the other side."""

_MAX_HELD_BYTES = 64 * 1024 * 1024
"""While more bytes than this wait for a connection, the bridge reads nothing from the editor."""

_MAX_COOKIES = 20

_TEMPORARY = frozenset({NORMAL, GOING_AWAY, NO_STATUS, 1011, 1012, 1013, 1014})
"""The close codes after which the bridge connects again. Any other code means that a new connection would end in the
same way."""


class Times:
    """The time limits of the bridge, in seconds."""

    connect = 10.0
    """The server has this long to accept a connection, and then the same time again to answer the HTTP request."""
    ping = 20.0
    """After this long without a byte from the server, the bridge sends a ping."""
    pong = 10.0
    """The server has this long to answer a ping."""
    first_delay, longest_delay = 0.05, 5.0
    """The first delay that is not 0, and the longest delay, both without the random part. See `_retry_later`."""
    give_up = 120.0
    """After this long without a connection, the bridge ends."""
    close = 0.08
    """After the editor has closed stdin, the bridge waits this long for responses and unsent messages. Then it waits
    the same time again for the server to end the connection."""
    last_words = 5.0
    """If the bridge ends with an error, the editor has this long to read why."""
    ask_again = 5.0
    """On a new connection, the server has this long to repeat its permission requests. Then the bridge withdraws the
    requests that the server did not repeat."""


class _Lines:
    """Splits the editor's bytes into lines. If a line is too long, only its size is kept."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        """Add bytes. Return the lines that are now complete, each with its size in bytes. A line of more than
        `MAX_LINE_BYTES` is returned as empty bytes."""
        *complete, rest = data.split(b"\n")
        lines = []
        for part in complete:
            self._add(part)
            lines.append(self.end())
        self._add(rest)
        return lines

    def end(self) -> tuple[bytes, int]:
        """End the line that is not complete yet, and return it as `feed` does."""
        line, size = b"".join(self._parts), self._size
        self._parts, self._size = [], 0
        return line, size

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > MAX_LINE_BYTES:
            self._parts.clear()
        elif part:
            self._parts.append(part)


class Bridge:
    """The connection between one editor and a server.

    One thread runs everything: `run` polls the editor, the WebSocket and the clock. The exceptions are attempts to
    connect that may take long: each runs in a second thread. The bridge is in one of these states:

    - *Disconnected*: `_wire` is None. `_connect_if_due` connects. After a lost connection, it connects only once the
      editor has sent something.
    - *Restoring*: `_wire` is set, and `_gone_since` is still set. The journal restores the sessions.
    - *Connected*: `_gone_since` is None. Messages pass in both directions.
    - *Ending*: `_end_at` is set, because the editor has closed stdin.
    - *Ended*: `_exit_code` is set. `problem` says why, if an error ended the bridge.
    """

    times = Times()

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        wire: WebSocket | None = None,
        start_server: Callable[[], str] | None = None,
        on_change: Callable[[], object] | None = None,
        source: int = 0,
        sink: int = 1,
        handles_signals: bool = False,
    ) -> None:
        """Prepare the bridge. `wire` is the first connection, if it is already open. The bridge reads the editor's
        messages from the file descriptor `source`, and writes messages for the editor to `sink`.

        If no server listens, the bridge calls `start_server`, which starts a server. `start_server` returns an empty
        string, or the reason why the server did not start. The bridge calls `on_change` when `is_connected` changes.
        """
        self._address, self._token = address, token
        self._source, self._sink = source, sink
        self._start_server, self._on_change = start_server, on_change
        self._handles_signals = handles_signals
        self._journal: Journal | None = None
        self._wire: WebSocket | None = None
        self._connection_id = ""
        self._cookies: dict[str, str] = {}
        self._connections = 0
        self._is_connecting = self._is_reading_rest = False
        self._outcome: WebSocket | NotConnected | None = None
        """The result of an attempt to connect. `_try` sets it, often in a second thread, and `_woken` takes it."""
        self._delay_s = 0.0
        """The delay for the next call of `_retry_later`, without its random part."""
        self._next_attempt_at = 0.0
        self._gone_since: float | None = time.monotonic()
        """The time at which messages stopped reaching the server. None while they reach the server."""
        self._heard_at = 0.0
        """The time at which the last bytes came from the server. All times are monotonic, in seconds."""
        self._pinged_at: float | None = None
        """The time of the ping that the server has not answered yet. None if there is none."""
        self._ask_again_at = 0.0
        """The time at which permission requests that the server has not repeated are withdrawn. 0 if there are none."""
        self._pinged_number = 0
        """The number in the newest ping whose answer will confirm that the server has read this many messages."""
        self._lines = _Lines()
        self._unnoted: list[tuple[Callable[[Journal, bytes], None], bytes]] = []
        """The messages that passed before the journal was loaded, each with a function that adds it to the journal."""
        self._output = bytearray()
        """The bytes that wait to be written to the editor."""
        self._is_at_end = False
        """Whether the editor has closed stdin, or `stop` was called."""
        self._end_at: float | None = None
        """The latest time at which the bridge ends. None until `_is_at_end` is true."""
        self._exit_code: int | None = None
        self.problem = ""
        """Why the bridge ended, or why it last lost or could not open a connection. Empty if nothing has failed."""
        self._wakeup, self._wake_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._wake_end, False)
        if wire is not None:
            self._connected(wire)

    def run(self) -> int:
        """Carry messages until the editor closes stdin or an error ends the bridge. Return the exit code."""
        was_blocking = _is_pipe(self._sink) and os.get_blocking(self._sink)
        if was_blocking:
            os.set_blocking(self._sink, False)
        try:
            while self._exit_code is None:
                self._connect_if_due()
                self._poll()
                self._check_times()
            self._finish()
        finally:
            if was_blocking:
                os.set_blocking(self._sink, True)
        return self._exit_code

    def stop(self) -> None:
        """Act as if stdin had ended. A signal handler or another thread may call this method."""
        self._is_at_end = True
        self._wake()

    @property
    def is_connected(self) -> bool:
        """Whether messages reach the server now. Any thread may read this property."""
        return self._gone_since is None

    @property
    def exit_code(self) -> int | None:
        """The exit code. None while the bridge runs. Any thread may read this property."""
        return self._exit_code

    def _set_gone_since(self, time_s: float | None) -> None:
        has_changed = (time_s is None) is not self.is_connected
        self._gone_since = time_s
        if has_changed and self._on_change is not None:
            self._on_change()

    # Reading and writing.

    def _poll(self) -> None:
        poll, wire = select.poll(), self._wire
        poll.register(self._wakeup, select.POLLIN)
        if not self._is_at_end:
            # Registered with 0, poll still reports that the editor has closed the pipe.
            poll.register(self._source, select.POLLIN if self._may_read_editor else 0)
        if self._output:
            poll.register(self._sink, select.POLLOUT)
        if wire is not None:
            reads = select.POLLIN if self._may_read_server else 0
            poll.register(wire.fd, reads | (select.POLLOUT if wire.unsent_bytes else 0))
        is_ready = wire is not None and wire.is_readable and self._may_read_server
        for fd, events in poll.poll(0 if is_ready else self._timeout_ms()):
            if fd == self._wakeup:
                self._woken()
            elif fd == self._source:
                self._read_editor(events)
            elif fd == self._sink:
                self._write_editor()
            elif wire is self._wire:
                self._serve_wire(events)
        if is_ready and wire is self._wire:
            self._serve_wire(select.POLLIN)

    @property
    def _may_read_editor(self) -> bool:
        if self._wire is not None and self._wire.unsent_bytes > MAX_UNSENT_BYTES:
            return False
        return self._journal is None or self._journal.held_bytes <= _MAX_HELD_BYTES

    @property
    def _may_read_server(self) -> bool:
        return len(self._output) <= MAX_UNSENT_BYTES

    def _wake(self) -> None:
        try:
            os.write(self._wake_end, b"\0")
        except OSError:
            return  # the pipe is full of earlier wake-ups, so the loop will wake up

    def _woken(self) -> None:
        os.read(self._wakeup, 4096)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, WebSocket):
            self._is_connecting = False
            self._connected(outcome)
        elif isinstance(outcome, NotConnected):
            self._is_connecting = False
            self._not_connected(outcome)

    def _read_editor(self, events: int) -> None:
        if not events & (select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL):
            return
        try:
            data = os.read(self._source, CHUNK_BYTES) if self._may_read_editor else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for line, size in self._lines.feed(data):
            self._editor_sent(line, size)
        if not data:
            self._editor_sent(*self._lines.end())
            self._is_at_end = True
        self._send()

    def _editor_sent(self, line: bytes, size: int) -> None:
        if size > MAX_LINE_BYTES:
            words = f"The line is {size} bytes long; crow reads at most {MAX_LINE_BYTES} bytes (32 MiB) in one message."
            self._write(_refused_line(-32600, words))
            return
        if not line or line.isspace():
            return
        try:
            line if line.isascii() else line.decode()
        except UnicodeDecodeError as error:
            self._write(_refused_line(-32700, f"The line is not UTF-8 (byte {error.start}): {error.reason}."))
            return
        if self._journal is None and self._wire is not None:
            self._wire.send(TEXT, line)
            self._unnoted.append((lambda journal, line: journal.editor_sent(line), line))
        else:
            self._load_journal().editor_sent(line)

    def _load_journal(self) -> Journal:
        """Return the journal. The first call imports its module, which takes 1 ms. So if messages can pass without the
        journal, the first call comes only after the first response has been written to the editor."""
        if self._journal is None:
            from crow.bridge.journal import Journal

            self._journal = journal = Journal(os.urandom(8).hex())
            if self._connections:
                journal.connected(is_known=False)
            for note, message in self._unnoted:
                note(journal, message)
            self._unnoted.clear()
            journal.to_editor.clear()
            journal.to_server.clear()
            if self._handles_signals:
                _handle_signals(self, self._wake_end)
        return self._journal

    def _write(self, message: bytes) -> None:
        self._output += message.replace(b"\n", b" ").replace(b"\r", b" ")
        self._output += b"\n"

    def _write_editor(self) -> None:
        while self._output:
            try:
                written = os.write(self._sink, self._output[:CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:
                self._output.clear()
                self._exit_code = 0  # the editor is gone
                return
            del self._output[:written]

    def _serve_wire(self, events: int) -> None:
        assert self._wire is not None
        try:
            if events & select.POLLOUT:
                self._flush()
            if self._wire is None or self._exit_code is not None:
                return
            if events & ~select.POLLOUT and self._may_read_server:
                data = self._wire.read()
                if data is not None:
                    self._server_sent(data)
            elif events & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                self._read_rest("the connection broke")
        except OSError as error:
            self._lost(str(error.strerror or error))

    def _server_sent(self, data: bytes) -> None:
        if not data:
            self._lost("the server ended the connection")
            return
        self._heard_at, self._pinged_at = time.monotonic(), None
        assert self._wire is not None
        try:
            for opcode, payload in self._wire.decoder.feed(data):
                self._handle(opcode, payload)
                if self._wire is None:
                    return
        except WebSocketError as error:
            self._wire.send(CLOSE, close_payload(error.code, str(error)))
            self._flush()
            self._fail(f"{self._address.text}: {error}", FAILED)
            return
        self._send()

    def _handle(self, opcode: int, payload: bytes) -> None:
        assert self._wire is not None
        if opcode == TEXT:
            if self._journal is None:
                self._write(payload)
                self._write_editor()
                self._unnoted.append((lambda journal, message: journal.server_sent(message), payload))
                self._load_journal()
            else:
                self._journal.server_sent(payload)
        elif opcode == PING:
            self._wire.send(PONG, payload)
        elif opcode == PONG and payload.isdigit():
            if self._journal is not None and self._journal.is_live:
                self._journal.acknowledged(int(payload))
        elif opcode == CLOSE:
            code, reason = close_reason(payload)
            words = f" ({code}{': ' + _printable(reason) if reason else ''})"
            # The server may give up waiting for `initialize` at the moment when the editor sends it.
            is_late = code == POLICY and self._journal is None and self._connections == 1
            self._wire.send(CLOSE, close_payload(NORMAL if code == NO_STATUS else code))
            self._flush()
            if code in _TEMPORARY or not self._has_begun or is_late:
                self._lost(f"the server closed the connection{words}")
            else:
                problem = f"{self._address.text} closed the connection{words}, so crow does not connect again."
                self._fail(problem, FAILED)

    # Connections.

    def _connect_if_due(self) -> None:
        if self._wire is not None or self._is_connecting or self._exit_code is not None:
            return
        if self._connections and not self._has_begun:
            return  # the server ended the connection because the editor has sent nothing yet, so wait for the editor
        if time.monotonic() < self._next_attempt_at:
            return
        self._is_connecting = True
        headers = first_headers(self._token)
        if self._connection_id:
            headers.append(("Acp-Connection-Id", self._connection_id))
        if self._cookies:
            headers.append(("Cookie", "; ".join(f"{name}={value}" for name, value in self._cookies.items())))
        if self._address.path and not self._connections:
            self._try(headers)  # connecting to a Unix socket takes no time, so it needs no thread
        else:
            _thread.start_new_thread(self._try, (headers,))

    def _try(self, headers: list[tuple[str, str]]) -> None:
        try:
            self._outcome = self._connect(headers)
        except NotConnected as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - the loop must hear of it
            self._outcome = NotConnected(f"{self._address.text}: {type(error).__name__}: {error}", FAILED)
        self._wake()

    def _connect(self, headers: list[tuple[str, str]]) -> WebSocket:
        try:
            return connect(self._address, headers, self.times.connect)
        except NotConnected as error:
            if self._start_server is None or not error.is_absent:
                raise
        if problem := self._start_server():
            raise NotConnected(problem)
        return connect(self._address, headers, self.times.connect)

    def _connected(self, wire: WebSocket) -> None:
        self._wire = wire
        self._connections += 1
        self._heard_at, self._pinged_at = time.monotonic(), None
        given = wire.response.headers.get("acp-connection-id", "")
        is_known = bool(given) and given == self._connection_id
        self._connection_id = given if given.isascii() and given.isprintable() else ""
        for cookie in wire.response.headers.get("set-cookie", "").split("\n"):
            name, equals, value = cookie.partition(";")[0].partition("=")
            if equals and len(self._cookies) < _MAX_COOKIES:
                self._cookies[name.strip()] = value.strip()
        if self._journal is None:
            self._set_gone_since(None)
        else:
            self._journal.connected(is_known=is_known)
        self._send()

    def _not_connected(self, refused: NotConnected) -> None:
        if refused.exit_code or not self._connections:
            self._fail(str(refused), refused.exit_code or USERS_FAULT)
            return
        self.problem = str(refused)
        self._retry_later()

    def _lost(self, why: str) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire, self._ask_again_at = None, 0.0
        if self._exit_code is None:  # otherwise the reason for the end is already known
            self.problem = f"{self._address.text}: {why}"
        self._set_gone_since(self._gone_since or time.monotonic())
        if self._unnoted or self._journal is not None:
            self._load_journal().lost()
            self._take_output()
        self._retry_later()

    def _retry_later(self) -> None:
        """Set the time of the next attempt to connect. The first attempt is immediate. Each later delay is about twice
        as long as the previous delay, up to `longest_delay`.

        The delays have a random part, so that many bridges do not all connect at the same moment.
        """
        share = 0.5 + int.from_bytes(os.urandom(2), "big") / 131072
        self._next_attempt_at = time.monotonic() + self._delay_s * share
        self._delay_s = min(max(self._delay_s * 2, self.times.first_delay), self.times.longest_delay)

    # Between the journal and the wire.

    def _send(self) -> None:
        journal = self._journal
        if journal is not None:
            was_gone = self._gone_since is not None
            if journal.is_live and was_gone and self._wire is not None:
                self._set_gone_since(None)
                self._ask_again_at = time.monotonic() + self.times.ask_again if journal.has_old else 0.0
            self._take_output()
            if self._wire is not None and journal.to_server:
                for message in journal.to_server:
                    self._wire.send(TEXT, message)
                journal.to_server.clear()
            if self._wire is not None and journal.is_live and journal.number > self._pinged_number:
                self._pinged_number = journal.number
                self._wire.send(PING, b"%d" % journal.number)  # the answer says how many messages the server has read
            if journal.fatal:
                self._fail(f"{self._address.text}: {journal.fatal}", FAILED)
        self._flush()
        if self._output:
            self._write_editor()

    def _take_output(self) -> None:
        assert self._journal is not None
        for message in self._journal.to_editor:
            self._write(message)
            self._delay_s = 0.0  # this connection has worked
        self._journal.to_editor.clear()

    def _flush(self) -> None:
        if self._wire is not None and self._wire.unsent_bytes:
            try:
                self._wire.flush()
            except OSError as error:
                self._read_rest(str(error.strerror or error))

    def _read_rest(self, why: str) -> None:
        """Handle everything that the server sent before the connection broke, such as a close frame with a reason. Then
        treat the connection as lost, unless the close frame has ended the bridge. `why` is the problem to report if
        there is no close frame."""
        if self._is_reading_rest:
            return
        self._is_reading_rest = True
        while self._wire is not None and self._exit_code is None:
            try:
                data = self._wire.read()
            except OSError:
                data = None
            if data:
                self._server_sent(data)
            else:
                self._lost(why)
        self._is_reading_rest = False

    # Time.

    def _timeout_ms(self) -> float | None:
        now = time.monotonic()
        times = [at for at in (self._end_at, self._ask_again_at or None) if at is not None]
        if self._wire is None:
            is_waiting = self._connections > 0 and not self._has_begun
            times += [] if self._is_connecting or is_waiting else [self._next_attempt_at]
            times += [] if self._gone_since is None or is_waiting else [self._gone_since + self.times.give_up]
        elif self._pinged_at is not None:
            times.append(self._pinged_at + self.times.pong)
        elif self._next_ping_at is not None:
            times.append(self._next_ping_at)
        return max(0.0, min(times) - now) * 1000 + 1 if times else None

    def _check_times(self) -> None:
        now = time.monotonic()
        if self._is_at_end and self._end_at is None:
            self._end_at = now + self.times.close
        if self._end_at is not None and (now >= self._end_at or self._is_done):
            self._exit_code = self._exit_code or 0
        elif self._wire is None and self._gone_since is not None and now - self._gone_since > self.times.give_up:
            words = f"No connection to crow for {self.times.give_up:g} s: {self.problem}"
            self._fail(f"{words.rstrip('.')}. The sessions are kept.", FAILED)
        elif self._wire is not None and not self._may_read_server:
            # The editor reads too slowly, so the bridge has stopped reading from the server and cannot see a pong.
            self._heard_at, self._pinged_at = now, None
        elif self._wire is not None and self._pinged_at is not None and now - self._pinged_at >= self.times.pong:
            self._lost(f"the server did not answer for {self.times.pong:g} s")
        elif self._next_ping_at is not None and now >= self._next_ping_at:
            self._pinged_at = now
            assert self._wire is not None
            self._wire.send(PING, b"")
            self._flush()
        if self._ask_again_at and now >= self._ask_again_at and self._journal is not None:
            self._ask_again_at = 0.0
            self._journal.withdraw_old()
            self._send()

    @property
    def _has_begun(self) -> bool:
        """Whether the editor has sent anything."""
        return self._journal is not None or bool(self._unnoted)

    @property
    def _next_ping_at(self) -> float | None:
        """The time at which to send the next ping, or None if no ping is planned. A Unix socket needs no pings, because
        the system always reports when the other end is closed."""
        if self._wire is None or self._address.path or self._pinged_at is not None:
            return None
        return self._heard_at + self.times.ping

    @property
    def _is_done(self) -> bool:
        """Whether the bridge can end now that stdin has ended."""
        if self._output or self._is_connecting:
            return False
        if self._journal is None:
            return not self._unnoted
        if self._wire is None:
            return not self._journal.held_bytes
        return not self._wire.unsent_bytes and not self._journal.waits_for_answers

    def _fail(self, problem: str, exit_code: int) -> None:
        """End the bridge with an error. Every request that has no response yet is answered with the same error."""
        self.problem, self._exit_code = problem, exit_code
        self._load_journal()
        self._answer_all()

    def _finish(self) -> None:
        if self._wire is not None:
            self._wire.send(CLOSE, close_payload(NORMAL))
            self._flush()
        if self._wire is not None:
            if not self._exit_code:
                self._await_end_of_server(self._wire)
            self._wire.close()
            self._wire = None
        if self._exit_code:
            self._answer_all()
        now = time.monotonic()
        deadline = now + self.times.close
        while self._output or self._exit_code:
            is_read = self._output and self._exit_code and not self._is_at_end
            left_s = (now + self.times.last_words if is_read else deadline) - time.monotonic()
            if left_s <= 0:
                break
            poll = select.poll()
            if self._exit_code and not self._is_at_end:
                poll.register(self._source, select.POLLIN)  # a request may still arrive, and gets the error as well
            if self._output:
                poll.register(self._sink, select.POLLOUT)
            for fd, events in poll.poll(left_s * 1000):
                if fd == self._source:
                    self._read_editor(events)
                    self._answer_all()
                self._write_editor()

    def _await_end_of_server(self, wire: WebSocket) -> None:
        """Wait until the server has ended the connection, for at most `times.close` seconds. Drop any bytes that the
        server still sends.

        If the bridge closed its socket first, the server's next write, such as its answer to a ping, would fail. Then
        the server would not read the bridge's close frame, and would report a broken connection.
        """
        deadline = time.monotonic() + self.times.close
        poll = select.poll()
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                poll.register(wire.fd, select.POLLIN | (select.POLLOUT if wire.unsent_bytes else 0))
                poll.poll(0 if wire.is_readable else left_s * 1000)
                wire.flush()
                if wire.read() == b"":
                    return
        except OSError:
            return

    def _answer_all(self) -> None:
        """Answer all requests that have no response with the error that ends the bridge."""
        assert self._journal is not None
        self._journal.lost()
        self._journal.fail_all(self.problem)
        self._take_output()


def first_headers(token: str) -> list[tuple[str, str]]:
    """Return the headers for each connection. One header asks the server for cursors, because the bridge needs them
    even if the editor does not ask for them."""
    return [("Crow-Cursors", "1"), *([("Authorization", f"Bearer {token}")] if token else [])]


def _refused_line(code: int, words: str) -> bytes:
    """Return the error response to a line that is not a valid request."""
    return b'{"jsonrpc":"2.0","id":null,"error":{"code":%d,"message":"%b","data":{"details":"%b"}}}' % (
        code,
        words.encode(),
        words.encode(),
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _is_pipe(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _handle_signals(bridge: Bridge, wakeup: int) -> None:
    """Make SIGTERM, SIGINT and SIGHUP end the bridge just as the end of stdin does."""
    for number in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP):
        _signal.signal(number, lambda *_: bridge.stop())
    _signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

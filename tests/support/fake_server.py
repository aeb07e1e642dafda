"""A small server of the protocol over WebSocket, with cursors, for tests of the bridge. It shares no code with crow."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

Message = dict[str, Any]


class Connection:
    """One WebSocket. `id` is its Acp-Connection-Id; a client that comes back with it keeps it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.id = ""
        self.is_open = True
        self.headers: dict[str, str] = {}
        self.pongs = True
        self.closed_with: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The payload of the client's close frame. Raises ConnectionError if the connection has ended without one."""

    async def upgrade(self, give_id: Callable[[str], str], *, status: str = "", extra: str = "") -> bool:
        """Answer the HTTP request; with a `status`, refuse it."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        pairs = (line.partition(":") for line in head.split("\r\n")[1:] if line)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.headers["request"] = head.split("\r\n", 1)[0]
        if status:
            self._writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
            return False
        self.id = give_id(self.headers.get("acp-connection-id", ""))
        guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1((self.headers["sec-websocket-key"] + guid).encode()).digest()).decode()
        self._writer.write(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\nAcp-Connection-Id: {self.id}\r\n{extra}\r\n".encode()
        )
        return True

    async def receive(self) -> bytes | None:
        """The next text message; None at the end. Answers pings."""
        while True:
            try:
                first, second = await self._reader.readexactly(2)
                assert first & 0x80, "the bridge sends whole messages"
                assert second & 0x80, "a client masks"
                size = second & 0x7F
                if size == 126:
                    (size,) = struct.unpack(">H", await self._reader.readexactly(2))
                elif size == 127:
                    (size,) = struct.unpack(">Q", await self._reader.readexactly(8))
                key = await self._reader.readexactly(4)
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return None
            keys = itertools.cycle(key)
            data = bytes(a ^ b for a, b in zip(data, keys, strict=False)) if size < 1 << 16 else unmask(data, key)
            match first & 0x0F:
                case 1:
                    return data
                case 8:
                    self.closed_with.set_result(data)
                    return None
                case 9 if self.pongs:
                    self.frame(10, data)

    def frame(self, opcode: int, data: bytes, *, is_last: bool = True) -> None:
        """Send a frame, unless the connection has ended."""
        if not self.is_open or self._writer.transport.is_closing():
            return
        size = len(data)
        if size < 126:
            head = struct.pack(">BB", opcode | (0x80 if is_last else 0), size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", opcode | (0x80 if is_last else 0), 126, size)
        else:
            head = struct.pack(">BBQ", opcode | (0x80 if is_last else 0), 127, size)
        self._writer.write(head + data)

    def send(self, message: Message) -> None:
        """Send a message."""
        self.frame(1, json.dumps({"jsonrpc": "2.0"} | message).encode())

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)

    def stop_reading(self) -> None:
        """From now on, every write of the bridge fails. What was sent to the bridge can still be read."""
        with socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno())) as copy:
            copy.shutdown(socket.SHUT_RD)

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame."""
        self.frame(8, code.to_bytes(2, "big") + reason.encode())
        self.end()

    def end(self) -> None:
        """End the connection without a close frame."""
        self.is_open = False
        self._writer.close()


def unmask(data: bytes, key: bytes) -> bytes:
    """The masked bytes of a large message."""
    keys = (key * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(keys, "big")).to_bytes(len(data), "big")


class FakeServer:
    """Sessions with a log of updates. The prompt "N words" makes a turn of N pieces, "ask" one that asks first.

    An update's cursor is its place in the log of its session. A turn goes on without a connection.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: dict[str, list[tuple[set[str], Message]]] = {}
        self.prompts: Counter[str] = Counter()
        self.received: list[Message] = []
        self.connections: list[Connection] = []
        self.status = ""
        self.extra = ""
        self.piece_s = 0.0
        self.loses_cursors = False
        self._changed = asyncio.Event()
        self._attached: dict[str, set[Connection]] = {}
        self._known: set[str] = set()
        self._turns: dict[object, asyncio.Task[Message]] = {}
        self._ended: set[object] = set()
        self._asked: dict[str, tuple[Message, asyncio.Future[Message]]] = {}
        self._asks: dict[tuple[Connection, int], str] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 26)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_listening()
        tasks = (*self._turns.values(), *self._tasks)
        for task in tasks:  # also connections that have not been upgraded, which `drop` does not know
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop_listening(self) -> None:
        """End, as a killed process does."""
        self._server.close()
        self.path.unlink(missing_ok=True)
        self.drop()
        await asyncio.sleep(0)

    async def listen_again(self) -> None:
        """Start again at the same place. What is stored is still there, what ran is not."""
        self.restart()
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 26)

    def restart(self) -> None:
        """Forget connections and turns."""
        self._known.clear()
        for task in self._turns.values():
            task.cancel()
        self._ended |= self._turns.keys()
        self._turns.clear()
        self._asked.clear()
        self.drop()

    def drop(self) -> None:
        """Cut every connection."""
        for connection in self.connections:
            connection.end()

    def text(self, session: str) -> str:
        """What the agent has said in a session."""
        updates = [update for _, update in self.logs[session] if update["sessionUpdate"] == "agent_message_chunk"]
        return "".join(update["content"]["text"] for update in updates)

    async def until(self, wanted: Callable[[], object]) -> None:
        """Wait until `wanted()` is true; it is asked again after each connection and message."""
        while not wanted():
            self._changed.clear()
            await self._changed.wait()

    @property
    def last(self) -> Connection:
        """The newest connection."""
        return self.connections[-1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connection = Connection(reader, writer)
        try:
            if await connection.upgrade(self._give_id, status=self.status, extra=self.extra):
                self.connections.append(connection)
                self._changed.set()
                while (data := await connection.receive()) is not None:
                    self._handle(connection, data)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            connection.is_open = False
            if not connection.closed_with.done():
                connection.closed_with.set_exception(ConnectionError("The connection has ended without a close frame."))
                connection.closed_with.exception()  # most tests do not look at it
            for attached in self._attached.values():
                attached.discard(connection)
            writer.close()

    def _give_id(self, old: str) -> str:
        given = old if old in self._known else f"c{next(self._ids)}"
        self._known.add(given)
        return given

    def _handle(self, connection: Connection, data: bytes) -> None:
        message = json.loads(data)
        self.received.append(message)
        self._changed.set()
        method, request_id, params = message.get("method"), message.get("id"), message.get("params", {})
        if method is None:
            session = self._asks.pop((connection, request_id), None)
            if session in self._asked and not self._asked[session][1].done():
                self._asked[session][1].set_result(message)
            return
        if request_id is None:
            return
        match method:
            case "initialize":
                info = {"name": "fake", "version": "1"}
                result: Message = {"protocolVersion": 1, "agentInfo": info, "_meta": {"crow": {"promptId": {}}}}
            case "session/new":
                session = f"s{next(self._ids)}"
                self.logs[session] = []
                self._attached[session] = {connection}
                result = {"sessionId": session, "_meta": {"acp/cursor": "0"}}
            case "session/load" | "session/resume":
                session = params["sessionId"]
                if session not in self.logs:
                    connection.send({"id": request_id, "error": {"code": -32002, "message": "No such session"}})
                    return
                cursor = params.get("_meta", {}).get("acp/cursor")
                if cursor is not None and self.loses_cursors:
                    error = {"code": -32602, "message": "gap", "data": {"reason": "cursor_gap"}}
                    connection.send({"id": request_id, "error": error})
                    return
                log = self.logs[session]
                senders = {connection.id, *params.get("_meta", {}).get("crow", {}).get("promptIds", ())}
                start = int(cursor) if cursor is not None else 0 if method == "session/load" else len(log)
                for place in range(start, len(log)):
                    self._show(connection, session, place, own=senders if cursor is not None else set())
                self._attached[session].add(connection)
                if session in self._asked and not self._asked[session][1].done():
                    self._ask(connection, session)
                result = {"modes": None, "_meta": {"acp/cursor": str(len(log))}}
            case "session/prompt":
                name = params.get("_meta", {}).get("crow", {}).get("promptId", "")
                key = name or (connection.id, request_id)
                if key not in self._turns and key in self._ended:
                    connection.send({"id": request_id, "result": {"stopReason": "cancelled"}})
                    return
                if key not in self._turns:
                    self._turns[key] = asyncio.create_task(self._turn({connection.id, name}, params))
                self._turns[key].add_done_callback(lambda task: self._answer(connection, request_id, task))
                return
            case "echo":
                result = params
            case _:
                result = {}
        connection.send({"id": request_id, "result": result})

    def _answer(self, connection: Connection, request_id: Any, task: asyncio.Task[Message]) -> None:
        if not task.cancelled():
            connection.send({"id": request_id, "result": task.result()})

    async def _turn(self, senders: set[str], params: Message) -> Message:
        session, text = params["sessionId"], params["prompt"][0]["text"]
        self.prompts[text] += 1
        self._store(
            session, senders, {"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": text}}
        )
        if text == "ask":
            call = {"toolCallId": f"t{next(self._ids)}", "title": "rm"}
            asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            self._asked[session] = ({"sessionId": session, "toolCall": call, "options": []}, asked)
            for connection in tuple(self._attached[session]):
                self._ask(connection, session)
            answer = await asked
            del self._asked[session]
            text = f"3 {json.dumps(answer.get('result'))}"
        count, _, word = text.partition(" ")
        for number in range(int(count) if count.isdigit() else 1):
            await asyncio.sleep(self.piece_s)
            piece = {"type": "text", "text": f"{word}{number} "}
            self._store(session, set(), {"sessionUpdate": "agent_message_chunk", "content": piece})
        return {"stopReason": "end_turn"}

    def _ask(self, connection: Connection, session: str) -> None:
        request_id = sum(1 for holder, _ in self._asks if holder is connection)
        self._asks[connection, request_id] = session
        connection.send({"id": request_id, "method": "session/request_permission", "params": self._asked[session][0]})

    def _store(self, session: str, senders: set[str], update: Message) -> None:
        self.logs[session].append((senders, update))
        for connection in tuple(self._attached[session]):
            self._show(connection, session, len(self.logs[session]) - 1, own={connection.id})

    def _show(self, connection: Connection, session: str, place: int, *, own: set[str]) -> None:
        """Send an update, unless one of its senders is in `own`: the client already shows its own prompts."""
        senders, update = self.logs[session][place]
        if not senders & own:
            params = {"sessionId": session, "update": update, "_meta": {"acp/cursor": str(place + 1)}}
            connection.send({"method": "session/update", "params": params})

"""An ACP client for tests that drives a real process and checks every line.

It does not use the SDK, which could hide a fault in crow. `benchmarks/process/client.py` is the client that
measures time.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio

from acp_check.schema import SchemaChecker, Side, Violation
from tests.support import fork_server
from tests.support.house_rules import HouseRules
from tests.support.order import OrderChecker

WAIT_S = 120.0
LINE_BYTES = 1_000_000
STREAM_BYTES = 64 << 20

Answer: TypeAlias = Callable[[dict[str, Any]], Any | Awaitable[Any]]


class RpcError(Exception):
    """An error response. `request` raises it; an answer function raises it to send one."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(f"{code} {message}")
        self.code, self.message, self.data = code, message, data


@dataclass(frozen=True, slots=True)
class Logged:
    """One message; its index in the log is its order."""

    sender: Side
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was sent; `index` is its index in the log."""

    id: int
    index: int
    outcome: asyncio.Future[Any]

    async def result(self) -> Any:
        """Waits for the result. The usage of a turn is left out; `CrowProcess.usage` returns it.

        :raises RpcError: the response is an error.
        """
        with anyio.fail_after(WAIT_S):
            return await asyncio.shield(self.outcome)


def allow_once(params: dict[str, Any]) -> dict[str, Any]:
    """Answers a permission request: allow this call."""
    return chosen(params, "allow_once")


def reject_once(params: dict[str, Any]) -> dict[str, Any]:
    """Answers a permission request: reject this call."""
    return chosen(params, "reject_once")


def chosen(params: dict[str, Any], kind: str) -> dict[str, Any]:
    """The answer to a permission request that chooses the option of this kind."""
    option = next(option for option in params["options"] if option["kind"] == kind)
    return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}


class CrowProcess:
    """A running agent. Use as `async with CrowProcess(...) as crow`: leaving closes stdin and waits for the exit.

    Without `argv` it starts `crow acp`, if possible forked from a process that has already imported it. `answers`
    maps client methods to the functions that answer them; permission requests are allowed by default. On leaving,
    every line must have been valid and stderr empty, unless `stderr_is_empty` is False. While `checks_schema` is
    False, messages are not checked against the schema.
    """

    arguments: Sequence[str] = ("acp",)
    program = "crow.cli"
    """The module with the function `main` that a forked process calls."""
    before = ""
    """Code that changes constants of crow in the process before it starts."""

    def __init__(
        self,
        argv: Sequence[str] | None,
        *,
        env: Mapping[str, str],
        cwd: Path,
        answers: Mapping[str, Answer] | None = None,
    ) -> None:
        self._argv, self._env, self._cwd = argv, env, cwd
        self.answers: dict[str, Answer] = {"session/request_permission": allow_once} | dict(answers or {})
        self.log: list[Logged] = []
        self.stderr = b""
        self.stderr_is_empty = True
        self.checks_schema = True
        self._ids = itertools.count(1)
        self._pending: dict[Any, asyncio.Future[Any]] = {}
        self._schema, self._order = SchemaChecker(), OrderChecker()
        self._house = HouseRules()
        self._faults: list[str] = []
        self._arrived = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process: asyncio.subprocess.Process | fork_server.ForkedProcess
        if self._argv is None and sys.platform == "linux":
            self._process = await fork_server.start(
                self.arguments,
                env=self._env,
                cwd=self._cwd,
                limit=STREAM_BYTES,
                program=self.program,
                before=self.before,
            )
        else:
            start = f"{self.before}\nimport sys\nfrom {self.program} import main\nsys.exit(main(sys.argv[1:]))"
            argv = self._argv or [sys.executable, "-c", start, *self.arguments]
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(self._env), cwd=self._cwd, limit=STREAM_BYTES
            )
        self._readers = [asyncio.create_task(self._read_stdout()), asyncio.create_task(self._read_stderr())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with anyio.move_on_after(WAIT_S, shield=True) as scope:
                await self.close_stdin_and_wait()
            if scope.cancelled_caught:
                await self.kill()
                raise AssertionError("The process did not end after its stdin was closed") from error
        finally:
            for task in (*self._answering, *self._readers):
                task.cancel()
            await asyncio.gather(*self._answering, *self._readers, return_exceptions=True)
            if isinstance(self._process, fork_server.ForkedProcess):
                self._process.close()
        if kind is None:
            self.check()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    def check(self) -> None:
        """Checks everything received so far. :raises Violation: an invalid line, or output on stderr."""
        if self._faults:
            raise Violation("\n".join(self._faults))
        if self.stderr_is_empty and self.stderr:
            raise Violation(f"stderr is not empty: {self.stderr.decode(errors='replace')}")

    async def initialize(self, **capabilities: Any) -> Any:
        """Initializes with these client capabilities."""
        params = {"protocolVersion": 1, "clientCapabilities": capabilities, "clientInfo": {"name": "t", "version": "0"}}
        return await self.request("initialize", params)

    async def new_session(self, cwd: Path, **params: Any) -> str:
        """Opens a session in `cwd` and returns its id."""
        result = await self.request("session/new", {"cwd": str(cwd), "mcpServers": []} | params)
        return str(result["sessionId"])

    async def load_session(self, session_id: str, cwd: Path) -> Any:
        """Loads a session; `updates(since=...)` returns its replay."""
        return await self.request("session/load", {"sessionId": session_id, "cwd": str(cwd), "mcpServers": []})

    async def prompt(self, session_id: str, text: str) -> Any:
        """Prompts with a text and waits for the result."""
        return await (await self.start_prompt(session_id, text)).result()

    async def start_prompt(self, session_id: str, text: str) -> Call:
        """Prompts with a text without waiting."""
        return await self.start("session/prompt", {"sessionId": session_id, "prompt": [{"type": "text", "text": text}]})

    async def request(self, method: str, params: Any) -> Any:
        """Sends a request and waits for its result. :raises RpcError: the response is an error."""
        return await (await self.start(method, params)).result()

    async def start(self, method: str, params: Any) -> Call:
        """Sends a request without waiting."""
        (call,) = await self.start_at_once((method, params))
        return call

    async def start_at_once(self, *requests: tuple[str, Any]) -> list[Call]:
        """Sends several requests in one write, without waiting."""
        calls, lines = [], b""
        for method, params in requests:
            number = next(self._ids)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._pending[number] = future
            calls.append(Call(number, len(self.log), future))
            lines += self._sent({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        await self.send_raw(lines)
        return calls

    async def notify(self, method: str, params: Any) -> None:
        """Sends a notification."""
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def send_raw(self, data: bytes) -> None:
        """Sends raw bytes without checking or logging them."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        with anyio.fail_after(WAIT_S):
            await self._process.stdin.drain()

    async def wait_for(self, wanted: Callable[[dict[str, Any]], bool], *, since: int = 0) -> int:
        """Waits for an agent message with index `since` or later for which `wanted` is true; returns its index in the
        log."""
        with anyio.fail_after(WAIT_S):
            while True:
                for index in range(since, len(self.log)):
                    logged = self.log[index]
                    if logged.sender == "agent" and wanted(logged.message):
                        return index
                since = len(self.log)
                if self.returncode is not None and all(reader.done() for reader in self._readers):
                    raise AssertionError(f"The process ended ({self.returncode}) before that: {self.stderr!r}")
                self._arrived.clear()
                await self._arrived.wait()

    async def wait_for_update(self, kind: str, *, since: int = 0, **fields: Any) -> int:
        """Like `wait_for`, for an update of this kind with these fields."""

        def wanted(message: dict[str, Any]) -> bool:
            update = message.get("params", {}).get("update") if message.get("method") == "session/update" else None
            return update is not None and {"sessionUpdate": kind, **fields}.items() <= flat(update).items()

        return await self.wait_for(wanted, since=since)

    async def wait_for_text(self, session_id: str, wanted: str, *, since: int = 0) -> None:
        """Waits until the agent's text in the session contains `wanted`."""
        await self.wait_for(lambda _: wanted in self.text(session_id, since=since), since=since)

    def updates(self, session_id: str, *kinds: str, since: int = 0) -> list[dict[str, Any]]:
        """The session's updates in order, optionally only those of the given kinds."""
        return [
            logged.message["params"]["update"]
            for logged in self.log[since:]
            if logged.sender == "agent"
            and logged.message.get("method") == "session/update"
            and logged.message["params"]["sessionId"] == session_id
            and (not kinds or logged.message["params"]["update"]["sessionUpdate"] in kinds)
        ]

    def text(self, session_id: str, kind: str = "agent_message_chunk", *, since: int = 0) -> str:
        """The joined text of all chunks of this kind."""
        chunks = self.updates(session_id, kind, since=since)
        return "".join(chunk["content"].get("text", "") for chunk in chunks)

    def response_index(self, call: Call) -> int:
        """The index of the response to `call` in the log."""
        return next(
            index
            for index, logged in enumerate(self.log[call.index :], start=call.index)
            if logged.sender == "agent" and "method" not in logged.message and logged.message["id"] == call.id
        )

    def usage(self, call: Call) -> Any:
        """The usage in the response to a prompt; None if there is none."""
        return self.log[self.response_index(call)].message["result"].get("usage")

    async def kill(self) -> None:
        """Sends SIGKILL, and waits until the process has ended and its output is read."""
        if self._process.returncode is None:
            self._process.kill()
        await self._gone()

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    async def close_stdin_and_wait(self) -> int:
        """Closes stdin, waits for the exit and returns its code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._gone()
        return self._process.returncode or 0

    async def wait(self) -> int:
        """Waits for the exit without closing stdin and returns its code."""
        await self._gone()
        return self._process.returncode or 0

    async def _gone(self) -> None:
        with anyio.fail_after(WAIT_S):
            await self._process.wait()
            await asyncio.wait(self._readers)

    async def _send(self, message: dict[str, Any]) -> None:
        await self.send_raw(self._sent(message))

    def _sent(self, message: dict[str, Any]) -> bytes:
        """Checks and logs a message; returns its line."""
        for rule in self._rules():
            rule.check("client", message)
        self.log.append(Logged("client", message))
        return json.dumps(message, ensure_ascii=False).encode() + b"\n"

    def _rules(self) -> tuple[SchemaChecker | OrderChecker | HouseRules, ...]:
        rules = (self._order, self._house)
        return (self._schema, *rules) if self.checks_schema else rules

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(65536):
            self.stderr += data

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(line)
                self._arrived.set()
        finally:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ConnectionError(f"The process ended before it answered: {self.stderr!r}"))
            self._arrived.set()

    def _take(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            return  # the process was killed in the middle of a line
        if len(line) > LINE_BYTES:
            self._faults.append(f"A line of {len(line)} bytes: {line[:200]!r}")
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise Violation(f"Not an object: {line[:200]!r}")
        except (ValueError, Violation) as error:
            self._faults.append(f"Not a message on stdout ({error}): {line[:200]!r}")
            return
        self.log.append(Logged("agent", message))
        for rule in self._rules():
            try:
                rule.check("agent", message)
            except Violation as error:
                self._faults.append(str(error))
        if "method" not in message:
            self._settle(message)
        elif "id" in message:
            task = asyncio.create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def _settle(self, message: dict[str, Any]) -> None:
        future = self._pending.pop(message["id"], None)
        if future is None or future.done():
            return
        if "error" in message:
            error = message["error"]
            future.set_exception(RpcError(error["code"], error["message"], error.get("data")))
        else:
            result = message["result"]
            is_turn = isinstance(result, dict) and "stopReason" in result
            future.set_result({key: result[key] for key in result if key != "usage"} if is_turn else result)

    async def _answer(self, message: dict[str, Any]) -> None:
        answer = self.answers.get(message["method"])
        try:
            if answer is None:
                raise RpcError(-32601, "Method not found")
            result = answer(message["params"])
            response = {"result": await result if inspect.isawaitable(result) else result}
        except RpcError as error:
            response = {"error": {"code": error.code, "message": error.message, "data": error.data}}
        try:
            await self._send({"jsonrpc": "2.0", "id": message["id"]} | response)
        except ConnectionError:
            return  # the process has ended


def flat(update: dict[str, Any]) -> dict[str, Any]:
    """The scalar fields of an update, which can be compared."""
    return {key: value for key, value in update.items() if isinstance(value, str | int | float | bool | None)}

"""Three `crow serve` on one PostgreSQL server, with faults under load: `python -m tests.soak.cluster`.

FAULTS faults (1000) from SEED (1), in rounds of 100 with a new database each. SLOW (1) says how many times slower the
machine is than a quiet one; only the limits of takeovers depend on it. At a failure, the logs of the nodes are kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from crow.domain.rendering import INTERRUPTED
from tests.support.acp_client import RpcError
from tests.support.cluster import Cluster, Node, Probe, Takeover, broken_chains, fenced_writes, log_of, takeovers
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, calls, text
from tests.support.postgres import OwnServer

ROUND = 100
SESSIONS = 6
WORK = ("say 5", "say 20", "slow 60", "slow 60", "run 1", "run 2", "long 1", "long 2")
"""What prompts ask for: pieces of text, or commands."""

GONE = (OSError, WebSocketException, TimeoutError, EOFError)

KINDS: dict[str, int] = {
    "kill -9": 14,
    "SIGTERM": 3,
    "SIGSTOP beyond the lease": 10,
    "SIGSTOP within the lease": 6,
    "database connections cut": 14,
    "database half-open": 8,
    "database stalled": 8,
    "database delayed": 7,
    "database partitioned": 6,
    "PostgreSQL restarted": 4,
    "PostgreSQL crashed": 4,
    "clock set": 8,
    "client connections cut": 14,
    "client connections stalled": 4,
}
"""The faults, and how often each comes."""


@dataclass
class Report:
    """What one or more rounds have shown."""

    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    takeover_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    """What contradicts the log, or happened twice, or by a process that had lost its turn."""
    differences: list[str] = field(default_factory=list)
    """Clients that show something other than the log."""

    def add(self, other: Report) -> None:
        """Add another report."""
        self.faults += other.faults
        self.counts += other.counts
        self.errors += other.errors
        self.failures += other.failures
        self.differences += other.differences
        for kind, times in other.takeover_s.items():
            self.takeover_s[kind] += times

    def lines(self) -> list[str]:
        """The report as a table."""
        lines = [f"{count:6}  {kind}" for kind, count in self.faults.most_common()]
        lines += [f"{self.faults.total():6}  faults", ""]
        lines += [f"{count:6}  {what}" for what, count in self.counts.items()]
        lines.append("")
        for kind, times in sorted(self.takeover_s.items()):
            times.sort()
            at = [times[min(len(times) - 1, int(len(times) * part))] for part in (0.5, 0.99)]
            figures = f"p50 {at[0]:.2f} s, p99 {at[1]:.2f} s, max {times[-1]:.2f} s"
            lines.append(f"{len(times):6}  {kind}: {figures}")
        lines += [f"{count:6}  {what}" for what, count in self.errors.most_common()]
        lines.append(f"{len(self.differences):6}  clients that show something other than the log")
        return [*lines, f"{len(self.failures):6}  failures"]


class Peer:
    """One WebSocket connection to a node."""

    def __init__(self, socket: ClientConnection, take: Callable[[dict[str, Any]], None]) -> None:
        self.socket = socket
        self._take = take
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, take: Callable[[dict[str, Any]], None], *, within_s: float = 3) -> Peer:
        """Connect and initialize. `take` gets each update."""
        socket = await connect(
            url,
            compression=None,
            proxy=None,
            max_size=None,
            open_timeout=within_s,
            ping_interval=1,
            ping_timeout=within_s,
        )
        peer = cls(socket, take)
        try:
            capabilities = {"_meta": {"acp/cursor": True}}
            await peer.request("initialize", protocolVersion=1, clientCapabilities=capabilities, within_s=3 * within_s)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def request(self, method: str, *, within_s: float, **params: Any) -> Any:
        """Send a request and wait for the result. :raises RpcError: it failed. :raises OSError: the connection did."""
        self._last_id += 1
        number = self._last_id
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._reader.done():
            raise ConnectionError("gone")
        try:
            async with asyncio.timeout(within_s):
                await self.socket.send(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}))
                return await future
        finally:
            self._pending.pop(number, None)

    async def gone(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.wait([self._reader])

    async def close(self) -> None:
        """End the connection without a close frame."""
        self.socket.transport.abort()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for frame in self.socket:
                message = json.loads(frame)
                if "method" not in message:
                    future = self._pending.get(message["id"])
                    if future is not None and not future.done():
                        self._settle(future, message)
                elif message["method"] == "session/update":
                    self._take(message["params"])
        except WebSocketException:
            pass
        finally:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ConnectionError("gone"))

    @staticmethod
    def _settle(future: asyncio.Future[Any], message: dict[str, Any]) -> None:
        error = message.get("error")
        if error is None:
            future.set_result(message["result"])
        else:
            future.set_exception(RpcError(error["code"], error["message"], error.get("data")))


class View:
    """What a client shows of a session: the agent's text, and each call with its last status."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.calls: dict[str, str] = {}
        self.entries: set[int] = set()
        self.cursor = ""

    def take(self, params: dict[str, Any]) -> None:
        """Apply an update."""
        update = params["update"]
        match update["sessionUpdate"]:
            case "agent_message_chunk":
                key = update.get("messageId") or ""
                self.texts[key] = self.texts.get(key, "") + update["content"].get("text", "")
            case "tool_call" | "tool_call_update":
                call = update["toolCallId"]
                self.calls[call] = update.get("status", self.calls.get(call, ""))
        self.pass_cursor(params)

    def pass_cursor(self, holder: dict[str, Any]) -> None:
        """Keep the cursor of an update or a response."""
        cursor = (holder.get("_meta") or {}).get("acp/cursor")
        if cursor is not None:
            self.cursor = cursor
            self.entries.add(int(cursor[1:].partition(".")[0]))


class Client:
    """Follows one session through all faults, on any node. A driver also prompts."""

    def __init__(self, run: Round, session: str, *, is_driver: bool, seed: str) -> None:
        self._run, self.session, self.is_driver = run, session, is_driver
        self._random = random.Random(seed)
        self.view = View()
        self.seen: set[int] = set()
        """The entries that the client was told of, also before it had to load the session again."""
        self.prompts: dict[str, str] = {}
        """The stop reason of each prompt; empty if the client never learned it."""
        self._unanswered: tuple[str, str] | None = None
        """The word of the last prompt, and what it asks for, until the client learns the outcome."""
        self.repeats = self.gaps = 0
        self.heard: deque[str] = deque(maxlen=4000)
        """What the client was sent, and when it connected to which node."""

    async def live(self) -> None:
        """Come back after each end of the connection, until cancelled."""
        while True:
            try:
                await self._visit(self._choose(), self._stay)
            except (*GONE, RpcError) as error:
                self._run.note(error)
                await asyncio.sleep(0.02 + self._random.random() * 0.05)

    async def finish(self, *, prompts: bool = True) -> None:
        """Come back once more. With `prompts`, have a prompt answered."""
        until = time.monotonic() + 60 * self._run.slow
        while True:
            node = self._random.choice(self._run.cluster.nodes)
            try:
                await self._visit(node, self._finish if prompts else self._leave, within_s=10)
            except (*GONE, RpcError) as error:
                self._run.log.append(
                    f"{time.time() - self._run.began:8.3f} {self.session} on {node.process_name}: {error!r}"
                )
                if time.monotonic() > until:
                    raise AssertionError(f"{self.session} could not be used after all was healed: {error!r}") from error
                await asyncio.sleep(0.1)
            else:
                return

    async def _visit(self, node: Node, stay: Callable[[Peer], Awaitable[None]], *, within_s: float = 3) -> None:
        peer = await Peer.open(node.url, self._take, within_s=within_s)
        try:
            self._hear(f"connected to {node.process_name}, cursor {self.view.cursor!r}")
            await self._attach(peer)
            self._hear(f"attached, cursor {self.view.cursor!r}")
            await stay(peer)
        finally:
            self._hear("left")
            await peer.close()

    def _hear(self, words: str) -> None:
        self.heard.append(f"{time.time() - self._run.began:8.3f} {words}")

    def _choose(self) -> Node:
        healthy = [node for node in self._run.cluster.nodes if node.is_healthy]
        return self._random.choice(healthy or self._run.cluster.nodes)

    def _take(self, params: dict[str, Any]) -> None:
        if params["sessionId"] == self.session:
            self.view.take(params)
            self._hear(json.dumps(params["update"] | {"cursor": self.view.cursor})[:500])

    async def _attach(self, peer: Peer) -> None:
        params: dict[str, Any] = {"sessionId": self.session, "cwd": str(self._run.place), "mcpServers": []}
        method, meta = "session/load", {}
        if self.view.cursor:
            method, meta = "session/resume", {"acp/cursor": self.view.cursor}
        else:
            self.seen |= self.view.entries
            self.view = View()
        try:
            answer = await peer.request(method, within_s=15, **params, _meta=meta)
        except RpcError as error:
            if isinstance(error.data, dict) and error.data.get("reason") == "cursor_gap":
                self.gaps += 1
                self.view.cursor = ""
                await self._attach(peer)
                return
            raise
        except BaseException:
            if method == "session/load":
                self.view.cursor = ""  # the history was shown only in part
            raise
        self.view.pass_cursor(answer)

    async def _stay(self, peer: Peer) -> None:
        if not self.is_driver:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5 + self._random.random() * 4):
                    await peer.gone()
            return
        while True:
            await self._prompt(peer)
            await asyncio.sleep(self._random.random() * 0.2)
            if self._random.random() < 0.05:
                return  # to another node

    async def _finish(self, peer: Peer) -> None:
        await self._prompt(peer, "say 3")

    async def _leave(self, peer: Peer) -> None:
        """Only attach."""

    async def _prompt(self, peer: Peer, what: str = "") -> None:
        """Send a prompt, or repeat the last one if its outcome is unknown. Sometimes also repeat it after its end."""
        if self._unanswered is None:
            self._unanswered = f"{self.session[-6:]}x{len(self.prompts)}x", what or self._random.choice(WORK)
        else:
            self.repeats += 1
        word, what = self._unanswered
        self.prompts[word] = ""
        try:
            answer = await self._request(peer, what, word)
        except RpcError:
            self._unanswered = None
            raise
        self._unanswered = None
        self.prompts[word] = answer["stopReason"]
        if self._random.random() < 0.1:
            self.repeats += 1
            again = await self._request(peer, what, word)
            if again["stopReason"] != answer["stopReason"]:
                self._run.fail(f"the prompt {word} was answered with {answer}, and then with {again}")

    async def _request(self, peer: Peer, what: str, word: str) -> Any:
        prompt, meta = [{"type": "text", "text": f"{what} {word}"}], {"crow": {"promptId": word}}
        patience_s = self._run.cluster.lease_s * (1 + self._random.random()) + 3
        return await peer.request(
            "session/prompt", sessionId=self.session, prompt=prompt, _meta=meta, within_s=patience_s
        )


class Round:
    """One cluster with its load, its faults and its checks."""

    def __init__(
        self, server: OwnServer, folder: Path, *, seed: int, slow: float, pause_s: float, lease_s: float, sessions: int
    ) -> None:
        self.seed, self.slow, self.place = seed, slow, folder
        self.report = Report()
        self.log: list[str] = []
        self.evidence: dict[str, list[str]] = {}
        """What clients that show something other than the log were sent, and the logs of their sessions."""
        self.cluster: Cluster
        self._server, self._pause_s, self._lease_s, self._sessions = server, pause_s, lease_s, sessions
        self._random = random.Random(seed)
        self._calls = 0
        self._deaths: list[tuple[str, float, float]] = []
        """From when to when each process was killed, stopped or cut off."""
        self._measures: list[asyncio.Task[None]] = []
        self._server_lock = asyncio.Lock()

    def answer_to(self, request: Recorded) -> Reply:
        """What the model says: pieces of text, or commands that leave a line in a file."""
        last = request.body["messages"][-1]
        words = last["content"] if isinstance(last["content"], str) else json.dumps(last["content"])
        found = re.search(r"(say|slow|run|long) (\d+) (\S+x)", words) if last["role"] == "user" else None
        if found is None:
            return text("Done", ". ")
        kind, count, word = found[1], int(found[2]), found[3]
        if kind in ("run", "long"):
            pause = "sleep 0.7; " if kind == "long" else ""
            commands = []
            for _ in range(count):
                self._calls += 1  # a model that is asked again asks for another call
                commands.append(("shell", {"command": f"{pause}echo ran-{self._calls}- >> ran"}))
            return calls(*commands, prefix=f"c{self._calls}-")
        pieces = [f"{word}{number} " for number in range(count)]
        return text(*pieces, between=[0.03 if kind == "slow" else 0.003] * count)

    def note(self, error: Exception) -> None:
        """Count what clients were told."""
        words = str(error) if isinstance(error, RpcError) else "a connection that ended or was silent"
        words = re.sub(r"crow-[\w-]+|process \d+ on \S+|\d+|'[^']*'", "*", words)
        self.report.errors[f"times a client was told: {words[:110]}"] += 1
        if isinstance(error, RpcError) and ("Internal error" in error.message or "internal" in error.message.lower()):
            self.fail(f"a bug: {error}")

    def fail(self, words: str) -> None:
        """Note a failure."""
        number = self.report.faults.total()
        self.report.failures.append(f"seed {self.seed}, fault {number}: {words}")

    async def run(self, faults: int) -> Report:
        """Run until there were this many faults, then check everything."""
        async with (
            FakeEndpoint(otherwise=self.answer_to) as endpoint,
            Cluster.open(self._server, self.place, endpoint.base_url, lease_s=self._lease_s) as self.cluster,
        ):
            self.began = time.time()
            sessions = [await self._new_session() for _ in range(self._sessions)]
            clients = [
                Client(self, session, is_driver=is_driver, seed=f"{self.seed} {session} {is_driver}")
                for session in sessions
                for is_driver in (True, False)
            ]
            await asyncio.gather(*(client.finish() for client in clients if client.is_driver))
            living = [asyncio.create_task(client.live()) for client in clients]
            running: set[asyncio.Task[None]] = set()
            try:
                while self.report.faults.total() < faults:
                    await asyncio.sleep(self._random.random() * 2 * self._pause_s)
                    for task in living:
                        if task.done():
                            task.result()
                    kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
                    node = self._random.choice(self.cluster.nodes)
                    if self._begin(kind, node, running):
                        self.report.faults[kind] += 1
                    endpoint.requests.clear()
                await asyncio.gather(*running)
                await _cancel(living)
                self.cluster.heal()
                await asyncio.gather(*(client.finish() for client in clients if client.is_driver))
                await self._idle()
                await asyncio.gather(*(client.finish(prompts=False) for client in clients))
                await asyncio.gather(*self._measures)
                await self._check(clients)
            finally:
                await _cancel([*living, *running, *self._measures])
        return self.report

    async def _idle(self) -> None:
        """Wait until no turn runs. Prompts whose clients have gone may still wait for their turn."""
        busy = """SELECT id, 'runs' FROM crow.sessions WHERE state = 'running'
            UNION ALL SELECT session, message_id FROM crow.inbox WHERE crow.is_alive(owner)"""
        until = time.monotonic() + 60 * self.slow
        while found := await self.cluster.read(busy):
            if time.monotonic() > until:
                raise AssertionError(f"these prompts never end: {[tuple(each) for each in found]}")
            await asyncio.sleep(0.1)

    async def _new_session(self) -> str:
        peer = await Peer.open(self._random.choice(self.cluster.nodes).url, lambda _: None, within_s=60)
        try:
            answer = await peer.request("session/new", cwd=str(self.place), mcpServers=[], within_s=60)
            return str(answer["sessionId"])
        finally:
            await peer.close()

    # faults

    def _begin(self, kind: str, node: Node, running: set[asyncio.Task[None]]) -> bool:
        """Begin a fault, unless another fault makes it impossible now."""
        is_of_server = kind.startswith("PostgreSQL")
        if is_of_server and self._server_lock.locked():
            return False
        if not is_of_server and kind != "clock set" and node.troubles:
            return False
        if not is_of_server and sum(other.is_healthy for other in self.cluster.nodes) <= 1 and kind != "clock set":
            return False  # one node stays for the clients
        self.log.append(f"{time.time() - self.began:8.3f} {kind} {'' if is_of_server else node.process_name}")
        task = asyncio.create_task(self._fault(kind, node))
        running.add(task)
        task.add_done_callback(running.discard)
        return True

    async def _fault(self, kind: str, node: Node) -> None:
        chance, lease_s = self._random, self.cluster.lease_s
        if kind == "clock set":
            node.set_clock(chance.choice([-72, -5, -0.01, 0, 0.01, 5, 72]))
            return
        if kind.startswith("PostgreSQL"):
            async with self._server_lock:
                await self._server.stop("fast" if kind.endswith("restarted") else "immediate")
                await asyncio.sleep(chance.random())
                await self._server.start()
            return
        node.troubles.add(kind)
        try:
            match kind:
                case "kill -9":
                    await self._begin_death(kind, node, node.kill)
                    await node.end()
                    await asyncio.sleep(chance.random() * 1.5)
                    await node.start(self.cluster.model_url)
                case "SIGTERM":
                    await node.end(signal.SIGTERM)
                    await asyncio.sleep(chance.random() * 1.5)
                    await node.start(self.cluster.model_url)
                case "SIGSTOP beyond the lease" | "SIGSTOP within the lease":
                    is_long = kind.endswith("beyond the lease")
                    if is_long:
                        await self._begin_death(kind, node, node.stop)
                    else:
                        node.stop()
                    factor = 1.3 + chance.random() * 0.7 if is_long else chance.random() * 0.5
                    await asyncio.sleep(lease_s * factor)
                    self._revive(node)
                    node.wake()
                case "database connections cut":
                    node.database.cut()
                case "database half-open":
                    node.database.swallow(*chance.choice([(0,), (1,), (0, 1)]))
                    await asyncio.sleep(lease_s * 1.5)
                case "database stalled":
                    node.database.hold(new=chance.random() < 0.5)
                    await asyncio.sleep(lease_s * chance.random() * 2)
                    node.database.release()
                case "database delayed":
                    node.database.delay_s = chance.random() * 0.05
                    await asyncio.sleep(chance.random() * 3)
                    node.database.delay_s = 0.0
                case "database partitioned":
                    node.database.refuses = True
                    await self._begin_death(kind, node, node.database.hold)
                    await asyncio.sleep(lease_s * (0.5 + chance.random()))
                    self._revive(node)
                    node.database.cut()
                    node.database.refuses = False
                case "client connections cut":
                    node.front.cut()
                case "client connections stalled":
                    node.front.hold()
                    await asyncio.sleep(chance.random() * 2)
                    node.front.cut()
        finally:
            node.troubles.discard(kind)

    async def _begin_death(self, kind: str, node: Node, begin: Callable[[], None]) -> None:
        """Begin a fault, and measure how long it takes until other nodes may take over."""
        probe = await self.cluster.probe(node)
        self._deaths.append((node.process_name, time.time(), math.inf))
        begin()
        if probe is not None:
            self._measures.append(asyncio.create_task(self._measure(kind, node, probe)))

    def _revive(self, node: Node) -> None:
        self._deaths = [
            (name, since, min(until, time.time()) if name == node.process_name else until)
            for name, since, until in self._deaths
        ]

    async def _measure(self, kind: str, node: Node, probe: Probe) -> None:
        most_s = (1.0 if kind == "kill -9" else self.cluster.lease_s + 0.5) * self.slow
        name, servers = node.process_name, self.report.faults.total()
        took_s = await probe.until_dead(5 * most_s)
        if took_s is not None:
            self.report.takeover_s[f"seconds until others may take over after {kind}"].append(took_s)
            if took_s > most_s:
                self.fail(f"{name}: others had to wait {took_s:.2f} s after fault {servers}, {kind}")

    # checks

    async def _check(self, clients: Sequence[Client]) -> None:
        cluster, report = self.cluster, self.report
        for words in (*await fenced_writes(cluster), *await broken_chains(cluster)):
            self.fail(words)
        rows = await cluster.read("SELECT session, id, turn, kind, body, call_entry FROM crow.entries ORDER BY id")
        stored = {(row["session"], row["id"]) for row in rows}
        ends = {(row["session"], row["turn"]): row["body"] for row in rows if row["kind"] == "turn_end"}
        prompts = {
            word: row for row in rows if row["kind"] == "user" for word in re.findall(r"\w{6}x\d+x", row["body"])
        }
        asked = Counter(
            word for row in rows if row["kind"] == "user" for word in set(re.findall(r"\w{6}x\d+x", row["body"]))
        )
        for word, count in asked.items():
            if count > 1:
                self.fail(f"the prompt {word} was stored {count} times")
        for client in clients:
            for entry in (client.seen | client.view.entries) - {0}:
                if (client.session, entry) not in stored:
                    self.fail(f"a client of {client.session} was told of entry {entry}, which is not stored")
            for word, stop in client.prompts.items():
                row = prompts.get(word)
                if stop and row is None:
                    self.fail(f"the prompt {word} was answered with {stop}, and is not stored")
                elif stop and row is not None and f'"{stop}"' not in ends.get((row["session"], row["turn"]), ""):
                    self.fail(f"the prompt {word} was answered with {stop}, and its turn is stored otherwise")
            if client.is_driver and not any(client.prompts.values()):
                self.fail(f"no prompt of {client.session} was ever answered")
        self._check_calls(rows)
        await self._check_views(clients)
        self._count_takeovers(await takeovers(cluster))
        report.counts["prompts sent"] += sum(len(client.prompts) for client in clients)
        report.counts["prompts repeated"] += sum(client.repeats for client in clients)
        report.counts["prompts answered"] += sum(1 for client in clients for stop in client.prompts.values() if stop)
        report.counts["turns"] += len(ends)
        report.counts["entries"] += len(rows)
        report.counts["entries of which clients were told"] += sum(
            len(each.seen | each.view.entries) for each in clients
        )
        report.counts["times a client's cursor was refused, and it loaded the session"] += sum(
            each.gaps for each in clients
        )
        logged = [line for node in cluster.nodes for lines in node.logs.values() for line in lines]
        fenced = sum("took over session" in json.dumps(line) or "changed elsewhere" in str(line) for line in logged)
        report.counts["turns that ended because the session was taken over"] += fenced

    def _check_calls(self, rows: Sequence[Any]) -> None:
        path = self.place / "ran"
        ran = Counter(re.findall(r"ran-(\d+)-", path.read_text()) if path.exists() else ())
        planned = {
            number: row
            for row in rows
            if row["kind"] == "assistant"
            for number in re.findall(r"ran-(\d+)-", row["body"] or "")
        }
        started = {row["call_entry"] for row in rows if row["kind"] == "started"}
        for number, count in ran.items():
            if count > 1:
                self.fail(f"the command ran-{number}- ran {count} times")
            if number not in planned or planned[number]["id"] not in started:
                self.fail(f"the command ran-{number}- ran and was not stored before")
        self.report.counts["commands planned"] += len(planned)
        self.report.counts["commands run"] += len(ran)

    async def _check_views(self, clients: Sequence[Client]) -> None:
        for client in clients:
            for node in self.cluster.nodes:
                view = await self._loaded(node, client.session)
                if wrong := self._differences(client.view, view):
                    role = "driver" if client.is_driver else "watcher"
                    words = f"the {role} of {client.session} shows\n{wrong}"
                    self.report.differences.append(f"seed {self.seed}: {words}")
                    self.evidence[f"{client.session} {role}"] = list(client.heard)
                    self.evidence[client.session] = await log_of(self.cluster, client.session)
                    break
            else:
                self.report.counts["clients that show the log"] += 1

    async def _loaded(self, node: Node, session: str) -> View:
        """What a new client of a node is shown. After a fault, the node may need a moment to reach the database."""
        params: dict[str, Any] = {"sessionId": session, "cwd": str(self.place), "mcpServers": []}
        async with asyncio.timeout(60 * self.slow):
            while True:
                view = View()
                peer = await Peer.open(node.url, view.take, within_s=60)
                try:
                    await peer.request("session/load", within_s=60 * self.slow, **params)
                except RpcError as error:
                    if "cannot be read now" not in str(error):
                        raise
                    self.report.counts["loads that were refused because the database did not answer"] += 1
                else:
                    return view
                finally:
                    await peer.close()

    def _differences(self, shown: View, stored: View) -> str:
        """What a client shows otherwise than the log, in words.

        A node shows text before it is stored, at most about a second. If the node is lost or loses the turn, a client
        that was connected to it has seen more of the answer than the log has.
        """
        lines = []
        for key in dict.fromkeys([*shown.texts, *stored.texts]):
            if key.startswith("turn_end_"):
                continue  # a client that was connected got an error response instead
            seen, logged = shown.texts.get(key, ""), stored.texts.get(key, "")
            is_cut = not logged or logged.endswith(INTERRUPTED)
            seen, logged = (each.removesuffix(INTERRUPTED).removesuffix("\n\n") for each in (seen, logged))
            if is_cut and len(seen) > len(logged) and seen.startswith(logged):
                self.report.counts["answers of which a client saw more than could be stored"] += 1
            elif seen != logged:
                lines.append(f"  message {key}: {seen!r} and not {logged!r}")
        for key in dict.fromkeys([*shown.calls, *stored.calls]):
            if shown.calls.get(key) != stored.calls.get(key):
                lines.append(f"  call {key}: {shown.calls.get(key)!r} and not {stored.calls.get(key)!r}")
        if not lines and [*filter(stored.texts.get, shown.texts)] != [*filter(shown.texts.get, stored.texts)]:
            lines.append("  the same in another order")
        return "\n".join(lines[:20])

    def _count_takeovers(self, found: Sequence[Takeover]) -> None:
        self.report.counts["running turns taken over"] += len(found)
        for each in found:
            died = next((a for name, a, b in self._deaths if name == each.dead and a <= each.at_s <= b), None)
            if died is not None:
                self.report.takeover_s["seconds until a client had the turn of a dead node taken over"].append(
                    each.at_s - died
                )


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_round(
    server: OwnServer,
    *,
    seed: int,
    faults: int,
    slow: float = 1.0,
    pause_s: float = 0.5,
    lease_s: float = 3.0,
    sessions: int = SESSIONS,
    keep: Path | None = None,
) -> Report:
    """Run one round. If it fails and `keep` is given, the logs of the nodes and the list of faults are put there."""
    with tempfile.TemporaryDirectory(prefix="crow-cluster-") as directory:
        one = Round(server, Path(directory), seed=seed, slow=slow, pause_s=pause_s, lease_s=lease_s, sessions=sessions)
        try:
            async with asyncio.timeout((120 + faults * (2 * pause_s + 1)) * slow):
                await one.run(faults)
        except Exception:  # noqa: BLE001  the report has it
            one.fail(traceback.format_exc())
        failures = one.report.failures + one.report.differences
        if failures and keep is not None:
            folder = keep / f"seed-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "faults").write_text("\n".join(one.log))
            (folder / "failures").write_text("\n".join(failures))
            for name, heard in one.evidence.items():
                (folder / name).write_text("\n".join(heard))
            for node in one.cluster.nodes if hasattr(one, "cluster") else ():
                for name, lines in node.logs.items():
                    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return one.report


async def main() -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    faults, seed = int(os.environ.get("FAULTS", "1000")), int(os.environ.get("SEED", "1"))
    slow, keep = float(os.environ.get("SLOW", "1")), Path("build/soak-cluster")
    total, since = Report(), time.monotonic()
    try:
        async with OwnServer.open() as server:
            while total.faults.total() < faults:
                wanted = min(ROUND, faults - total.faults.total())
                report = await run_round(server, seed=seed, faults=wanted, slow=slow, keep=keep)
                total.add(report)
                passed = f"{total.faults.total()} faults in {time.monotonic() - since:.0f} s"
                print(f"seed {seed}: {passed}, {len(report.failures)} failures", flush=True)
                for failure in (report.failures + report.differences)[:10]:
                    print(failure, flush=True)
                seed += 1
    finally:  # also if the run is interrupted
        print("\n".join(total.lines()), flush=True)
        if total.failures or total.differences:
            print(f"The logs of the nodes are below {keep}.")
    return 1 if total.failures or total.differences else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

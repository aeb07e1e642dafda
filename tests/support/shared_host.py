"""A host that several clients in this process share, with a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from crow.agent.turns.adapters import Adapters
from crow.app import Wiring
from crow.frontend.agent import Negotiate, serve
from crow.frontend.host import ServerDependencies, SessionHost, share_host
from crow.frontend.requester import Requester
from crow.settings import load_settings
from crow.store import Store
from crow.store.principals import session_view
from crow.terminal.connection import TerminalConnection
from tests.support.scripted_model import Say, ScriptedModel

__all__ = ["Shared", "Watcher", "shared", "transcript"]

Params = dict[str, Any]


class _Connection(TerminalConnection):
    """Also passes on the requests that a terminal never gets."""

    @property
    def is_patient(self) -> bool:
        """Like the connection of a server, which disconnects a client that does not read."""
        return False

    async def _ask(self, method: str, params: Any) -> dict[str, Any]:
        assert isinstance(self._client, Watcher)
        return await self._client.answer_request(method, dict(params))


class Watcher:
    """A client: notes what it is sent, and answers questions by `on_request`, by default with "allow once"."""

    def __init__(self, shared: Shared, requester: Requester, negotiate: Negotiate | None) -> None:
        self.updates: list[Params] = []
        self.requests: list[tuple[str, Params]] = []
        self.withdrawn = 0
        self.asked = anyio.Event()
        self.blocked: anyio.Event | None = None
        """While this is set, the client reads no update until the event is set."""
        self.on_request: Callable[[str, Params], Awaitable[Params]] | None = None
        self.changed = anyio.Event()
        self.connection = _Connection(self, lambda: None)  # type: ignore[arg-type,return-value]
        self._shared = shared
        self._serving = asyncio.create_task(
            serve(self.connection, shared.dependencies, host=shared.host, requester=requester, negotiate=negotiate)
        )
        self._serving.add_done_callback(self.connection.close)

    async def update(self, params: Any) -> None:
        if self.blocked is not None:
            await self.blocked.wait()
        self.updates.append(dict(params))
        self.changed.set()
        self.changed = anyio.Event()

    async def ask_permission(self, params: Any) -> Params:
        raise AssertionError("see answer_request")

    async def elicit(self, params: Any) -> Params:
        raise AssertionError("see answer_request")

    async def answer_request(self, method: str, params: Params) -> Params:
        self.requests.append((method, params))
        self.asked.set()
        try:
            if self.on_request is not None:
                return await self.on_request(method, params)
            return {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise

    async def call(self, method: str, **params: Any) -> Any:
        return await self.connection.call(method, params)

    async def new(self, **more: Any) -> str:
        answer = await self.call("session/new", cwd=str(self._shared.cwd), mcpServers=[], **more)
        return str(answer["sessionId"])

    async def open(self, method: str, session_id: str, **more: Any) -> Any:
        return await self.call(method, sessionId=session_id, cwd=str(self._shared.cwd), mcpServers=[], **more)

    async def prompt(self, session_id: str, text: str) -> Any:
        return await self.call("session/prompt", sessionId=session_id, prompt=[{"type": "text", "text": text}])

    async def until(self, is_done: Callable[[list[Params]], bool]) -> None:
        """Wait until the updates satisfy a condition."""
        while not is_done(self.kinds_and_texts()):
            await self.changed.wait()

    async def until_kind(self, kind: str, text: str = "") -> None:
        """Wait for an update of this kind that contains the text."""
        while not any(each["sessionUpdate"] == kind and text in str(each) for each in self.kinds_and_texts()):
            await self.changed.wait()

    def kinds_and_texts(self) -> list[Params]:
        return [each["update"] for each in self.updates]

    def text(self, kind: str = "agent_message_chunk") -> str:
        return "".join(each["content"]["text"] for each in self.kinds_and_texts() if each["sessionUpdate"] == kind)

    async def drop(self) -> None:
        """Lose the connection."""
        self.connection.stop()
        await asyncio.wait([self._serving])
        self._serving.result()


class Shared:
    """The host, and what connects clients to it."""

    def __init__(self, host: SessionHost, dependencies: ServerDependencies, cwd: Path, model: ScriptedModel) -> None:
        self.host = host
        self.dependencies = dependencies
        self.cwd = cwd
        self.model = model
        self.clients: list[Watcher] = []

    async def client(
        self,
        *,
        capabilities: Params | None = None,
        requester: Requester | None = None,
        negotiate: Negotiate | None = None,
        version: int = 1,
    ) -> Watcher:
        client = Watcher(self, requester or Requester(), negotiate)
        self.clients.append(client)
        await client.connection.started.wait()
        if version == 1:
            await client.call("initialize", protocolVersion=1, clientCapabilities=capabilities or {})
        else:
            info = {"name": "test", "version": "1"}
            await client.call("initialize", protocolVersion=2, capabilities=capabilities or {}, info=info)
        return client


@asynccontextmanager
async def shared(
    directory: Path,
    *says: Say,
    change: Callable[[ServerDependencies], ServerDependencies] = lambda each: each,
    has_principals: bool = False,
    database_url: str = "",
    node: str = "",
) -> AsyncIterator[Shared]:
    """A shared host below `directory`, whose model says this. With `has_principals`, it is as on a server with
    tokens. Hosts with the same `database_url` are like nodes on one PostgreSQL database; `node` is the name of one."""
    cwd = directory / "work"
    cwd.mkdir(exist_ok=True)
    (directory / "home").mkdir(exist_ok=True)
    environment = {"CROW_HOME": str(directory / "home"), "CROW_MODEL": "offline"}
    if database_url:
        environment["CROW_DATABASE_URL"] = database_url
    wiring = Wiring(load_settings({"serve.node": node} if node else {}, environment))
    wiring.is_bounded = lambda: has_principals
    model, dependencies = ScriptedModel(*says), wiring.dependencies()

    async def scripted(_name: str) -> ScriptedModel:
        return model

    def adapters(store: Store) -> Adapters:
        return replace(wiring.adapters(store), model=scripted)

    dependencies = change(replace(dependencies, adapters=adapters))
    async with share_host(dependencies, session_view=session_view if has_principals else None) as host:
        made = Shared(host, dependencies, cwd, model)
        try:
            yield made
        finally:
            for client in made.clients:
                await client.drop()
    await wiring.close()


def transcript(updates: Sequence[Params]) -> list[tuple[str, str, str]]:
    """What a user sees after these updates: messages and calls, in order of appearance."""
    found: dict[tuple[str, str], str] = {}
    for update in (each.get("update", each) for each in updates):
        match update["sessionUpdate"]:
            case "agent_message_chunk" | "agent_thought_chunk" | "user_message_chunk" as kind:
                key = (kind, update["messageId"])
                found[key] = found.get(key, "") + str(update["content"].get("text", update["content"]))
            case "user_message" | "agent_message" | "agent_thought" as kind:
                key = (f"{kind}_chunk", update["messageId"])
                found[key] = "".join(str(block.get("text", block)) for block in update["content"])
            case "tool_call" | "tool_call_update":
                found[("call", update["toolCallId"])] = update["status"]
    return [(kind, name, value) for (kind, name), value in found.items()]

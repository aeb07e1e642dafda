"""A session on a real store, with a scripted model, functions as tools and a client that records events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.hooks import Hooks
from crow.agent.sessions.session import Session
from crow.agent.turns.adapters import Adapters, OpenToolbox, SessionSettings
from crow.domain.entries import Announcement, Body, Entry
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, EntryStored, Event, TextShown
from crow.domain.messages import Part, Text, ToolCall, ToolSpec
from crow.llm import Model
from crow.store import NewSession
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from crow.tools import Access, AgentKind, OnOutput, Outcome, PlannedCall, ServerStatus, SkillInfo
from crow.tools.servers import McpServer, ServerPrompt
from crow.tools.workspace import DiskWorkspace

__all__ = ["NoteTaker", "Tool", "Tools", "opened", "text"]


def text(words: str) -> tuple[Text, ...]:
    return (Text(text=words),)


class NoteTaker:
    """A client: notes every event, answers every question in order (then allows)."""

    def __init__(self, *answers: PermissionAnswer) -> None:
        self.events: list[Event] = []
        self.questions: list[PermissionQuestion] = []
        self.elicitations: list[Elicitation] = []
        self.never_answers = False
        self.notices = False
        self.asked = anyio.Event()
        self._answers = list(answers)

    async def publish(self, event: Event) -> None:
        self.events.append(event)

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        self.questions.append(question)
        self.asked.set()
        if self.never_answers:
            await anyio.sleep_forever()
        return self._answers.pop(0) if self._answers else "allow_once"

    @property
    def takes_notices(self) -> bool:
        return self.notices

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        return frozenset({"form", "url"})

    @property
    def shows_subagents(self) -> bool:
        return False

    def open_subagent(self, session_id: str) -> NoteTaker:
        raise AssertionError(f"{session_id} is not shown")

    def close_subagent(self, session_id: str) -> None:
        """No subagent is shown."""

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        self.elicitations.append(question)
        return ElicitationAnswer(action="decline")

    async def finish_question(self, question_id: str) -> None:
        """Nothing is shown."""

    def shown(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextShown))

    def stored(self, kind: type[Body]) -> list[Any]:
        return [e.entry.body for e in self.events if isinstance(e, EntryStored) and isinstance(e.entry.body, kind)]


class Tool:
    """A tool: what it does to the world, and the function that is it."""

    def __init__(
        self, access: Access, function: Callable[..., Awaitable[str]], *, is_barrier: bool = False, fault: str = ""
    ) -> None:
        self.access, self.function, self.is_barrier, self.fault = access, function, is_barrier, fault


class Tools:
    """A toolbox of functions."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools
        self.order: list[str] = []
        self.statuses: tuple[ServerStatus, ...] = ()

    def prepare(self) -> None:
        pass

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(ToolSpec(name=name, description=name, input_schema={"type": "object"}) for name in self.tools)

    def deferred(self) -> tuple[ToolSpec, ...]:
        return ()

    def narrowed(self, names: Collection[str]) -> Tools:
        return self

    def isolated(self, task_id: str) -> AbstractAsyncContextManager[Tools]:
        raise NotImplementedError

    async def changes_of(self, task_id: str) -> str:
        raise NotImplementedError

    def servers(self) -> tuple[ServerStatus, ...]:
        return self.statuses

    def skills(self) -> tuple[SkillInfo, ...]:
        return ()

    def agents(self) -> tuple[AgentKind, ...]:
        return ()

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        self.order.append(f"restart {name}")
        return () if name is None else (name,)

    async def wait_ready(self, timeout_s: float, *, beside: Callable[[], None] | None = None) -> None:
        """Always ready."""
        if beside is not None:
            beside()

    def prompts(self) -> tuple[ServerPrompt, ...]:
        return ()

    async def prompt(self, name: str) -> ServerPrompt | None:
        return None

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        raise NotImplementedError

    def understood(self, call: ToolCall) -> ToolCall:
        return call

    async def plan(self, call: ToolCall) -> PlannedCall:
        tool = self.tools.get(call.name)
        announcement = Announcement(title=f"{call.name} {call.arguments}")
        if tool is None:
            return PlannedCall(announcement=announcement, access="none", fault=f"No tool {call.name}.")
        return PlannedCall(
            announcement=announcement,
            access=tool.access,
            fault=call.fault or tool.fault or None,
            is_barrier=tool.is_barrier,
        )

    async def run(
        self, call: ToolCall, call_id: str, on_output: OnOutput, *, planned: PlannedCall | None = None
    ) -> Outcome:
        self.order.append(f"{call.name} begins")
        words = await self.tools[call.name].function(**json.loads(call.arguments))
        self.order.append(f"{call.name} ends")
        return Outcome(text=words)


class Opened:
    """A running session and everything around it."""

    def __init__(self, session: Session, store: SqliteStore, client: NoteTaker, tools: Tools) -> None:
        self.session, self.store, self.client, self.tools = session, store, client, tools

    async def log(self) -> list[Entry]:
        """The stored path."""
        return [entry async for batch in self.store.history(self.session.id) for entry in batch]

    async def kinds(self) -> list[str]:
        """The kinds on the stored path, without the prompt entry."""
        names = [type(entry.body).__name__ for entry in await self.log()]
        return [name for name in names if name != "Prompt"]


@asynccontextmanager
async def opened(
    directory: Path,
    model: Model,
    *,
    tools: Mapping[str, Tool] | None = None,
    client: NoteTaker | None = None,
    steps: int = 50,
    mode: str = "ask",
    session_id: str | None = None,
    servers: Sequence[McpServer] = (),
    open_tools: OpenToolbox | None = None,
    compaction: CompactionPolicy | None = None,
    user_instructions: Path | None = None,
    models: Sequence[str] = (),
    hooks: Hooks | None = None,
    others: Mapping[str, Model] | None = None,
    fallback: str = "",
    limits: Mapping[str, Any] | None = None,
    database_url: str = "",
) -> AsyncIterator[Opened]:
    """A session in `directory`; `session_id` opens a stored one, `open_tools` real tools in place of functions.
    `models` are the names to choose from. `others` are models by name; every other name gets `model`, whose fallback is
    `fallback`. `limits` are read anew whenever crow reads the settings. The session is in the PostgreSQL database at
    `database_url` if that is given."""
    client, toolbox = client or NoteTaker(), Tools(tools or {})

    @asynccontextmanager
    async def open_toolbox(*_: object, **__: object) -> AsyncIterator[Tools]:
        yield toolbox

    async def load() -> None:
        """Nothing is heavy here."""

    def lookup(name: str) -> Model:
        return (others or {}).get(name, model)

    async def named(name: str) -> Model:
        return lookup(name)

    def settings() -> SessionSettings:
        policy = compaction or CompactionPolicy()
        return SessionSettings(steps_per_turn=steps, compaction=policy, **(limits or {}))

    store: Any = await (PostgresStore.open(database_url) if database_url else SqliteStore.open(directory / "crow.db"))
    try:
        if session_id is None:
            session_id = "s1"
            await store.create_session(NewSession(id=session_id, cwd=str(directory), model="scripted", mode=mode))
        adapters = Adapters(
            store=store,
            load=load,
            model=named,
            info=lambda name: lookup(name).info,
            fallback=lambda name: "" if name in (others or {}) else fallback,
            open_toolbox=open_tools or open_toolbox,
            models=models,
            settings=settings,
            user_instructions=user_instructions,
            hooks=hooks,
        )
        session = Session(adapters, client, DiskWorkspace(directory), servers, await store.open_session(session_id))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.run)
                yield Opened(session, store, client, toolbox)
                await session.close()
    finally:
        await store.close()

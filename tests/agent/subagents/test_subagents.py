"""Subagents: own conversation, the session's permissions, several at once, one level deep."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.hooks import Hooks
from crow.agent.permissions.rules import user_rules
from crow.agent.sessions.session import Session
from crow.agent.turns.adapters import Adapters, SessionSettings
from crow.domain.entries import Assistant, Checkpoint, Command, Custom, File, Skill, ToolResult, TurnEnd
from crow.domain.errors import StoreUnavailable
from crow.domain.events import CallAnnounced, CallProgressed, SubagentChanged
from crow.domain.messages import SystemMessage, Text, ToolMessage, Usage, UserMessage
from crow.llm import ModelInfo, Request
from crow.store import NewSession, SessionChanges
from crow.store.sqlite.store import SqliteStore
from crow.tools import Task
from crow.tools.mcp.client import ToolSettings, open_toolbox
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker, Tools, text
from tests.support.scripted_model import Say, ScriptedStream, call

NOTHING = Usage(input_tokens=0, output_tokens=0)


class Casting:
    """A model that answers by whom it is: the first words of the conversation choose the script."""

    def __init__(self, **scripts: list[Say]) -> None:
        self.requests: dict[str, list[Request]] = {name: [] for name in scripts}
        self._scripts = scripts
        self.info = ModelInfo(
            name="m", endpoint="test m", context_window=128_000, input_price=1.0, cached_price=None, output_price=1.0
        )

    def check(self) -> None:
        """Always ready."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        first = next(message for message in request.messages if isinstance(message, UserMessage))
        words = next(part.text for part in first.parts if isinstance(part, Text))
        name = words.split()[0]
        self.requests[name].append(request)
        yield ScriptedStream(self._scripts[name].pop(0))

    async def close(self) -> None:
        """Nothing is open."""


class Running:
    def __init__(self, session: Session, store: SqliteStore, client: NoteTaker, model: Casting) -> None:
        self.session, self.store, self.client, self.model = session, store, client, model

    async def bodies(self, session_id: str) -> list[Any]:
        return [entry.body async for batch in self.store.history(session_id) for entry in batch]


@asynccontextmanager
async def running(
    root: Path,
    model: Casting,
    *,
    mode: str = "ask",
    client: NoteTaker | None = None,
    deny: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    hooks: Hooks | None = None,
) -> AsyncIterator[Running]:
    work = root / "work"
    work.mkdir(exist_ok=True)
    client = client or NoteTaker()

    async def load() -> None: ...

    async def chosen(_: str) -> Casting:
        return model

    store = await SqliteStore.open(root / "crow.db")
    try:
        await store.create_session(NewSession(id="s1", cwd=str(work), model="m", mode=mode))
        adapters = Adapters(
            store=store,
            load=load,
            model=chosen,
            info=lambda _: model.info,
            open_toolbox=lambda workspace, ports, servers, on_change: open_toolbox(
                workspace, ports, servers, ToolSettings(skill_folders=(root / "skills",))
            ),
            settings=lambda: SessionSettings(
                steps_per_turn=20, compaction=CompactionPolicy(), rules=user_rules(allow, deny)
            ),
            hooks=hooks,
        )
        session = Session(adapters, client, DiskWorkspace(work), (), await store.open_session("s1"))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.run)
                yield Running(session, store, client, model)
                await session.close()
    finally:
        await store.close()


def task(call_id: str = "c1", **arguments: object) -> Any:
    return call("task", call_id, **{"description": "Look into it", **arguments})


def task_id_of(result: ToolResult) -> str:
    found = result.raw_output["task"]
    assert isinstance(found, str)
    return found


async def test_a_task_has_its_own_conversation_and_the_sessions_permissions(tmp_path: Path) -> None:
    model = Casting(
        parent=[
            Say(calls=(task(prompt="child write a.txt"),), usage=Usage(input_tokens=1_000_000, output_tokens=0)),
            Say(text=["All done."], usage=NOTHING),
        ],
        child=[
            Say(text=["I write."], calls=(call("write_file", path="a.txt", content="hello\n"),), usage=NOTHING),
            Say(text=["Written: ", "a.txt"], usage=Usage(input_tokens=500_000, output_tokens=500_000)),
        ],
    )
    async with running(tmp_path, model) as run:
        assert await run.session.prompt(text("parent go")) == "end_turn"
        (result,) = run.client.stored(ToolResult)[1:]
        child = task_id_of(result)
        row, parent = await run.store.session(child), await run.store.session("s1")
        kinds = [type(body).__name__ for body in await run.bodies(child)]
        files = [body for body in await run.bodies("s1") if isinstance(body, File)]
        listed = (await run.store.sessions()).rows
    assert (tmp_path / "work" / "a.txt").read_text() == "hello\n"
    assert result.text == f"Written: a.txt\n[task {child}; to continue it, call task with resume={child}]"
    assert (row.parent_id, row.title, row.cwd) == ("s1", "Look into it", str(tmp_path / "work"))
    assert kinds == ["User", "Prompt", "Assistant", "Started", "File", "ToolResult", "Assistant", "TurnEnd"]
    assert files == []
    assert [row.id for row in listed] == ["s1"]
    # the one question was about the write, with the child's call, put to the session's own client
    assert [question.name for question in run.client.questions] == ["write_file"]
    announced = [event.name for event in run.client.events if isinstance(event, CallAnnounced)]
    assert announced == ["task", "write_file"]
    shown = [event.text for event in run.client.events if isinstance(event, CallProgressed)]
    assert "I write.\n● Write a.txt" in shown
    assert (row.cost, parent.cost) == (1.0, 2.0)  # the session's sum holds the task's


async def test_a_subagent_has_only_the_tools_of_its_task_and_never_the_task_tool(tmp_path: Path) -> None:
    model = Casting(
        parent=[
            Say(calls=(task(prompt="child look", tools=["read_file", "grep"]),)),
            Say(calls=(task("c2", prompt="child look", tools=["task"]),)),
            Say(text=["ok"]),
        ],
        child=[Say(calls=(call("shell", command="touch x"),)), Say(text=["no shell"])],
    )
    async with running(tmp_path, model, mode="auto") as run:
        await run.session.prompt(text("parent go"))
        results = run.client.stored(ToolResult)
    assert [spec.name for spec in model.requests["child"][0].tools] == ["read_file", "grep"]
    assert [result.text for result in results if result.name == "shell"] == [
        'This task has no tool "shell". It has: read_file, grep.'
    ]
    assert results[-1].text.startswith('task: tools contains "task"; a task can only use read_file, write_file, ')
    assert not (tmp_path / "work" / "x").exists()


async def test_a_resumed_task_continues_and_must_belong_to_the_session(tmp_path: Path) -> None:
    parent = [Say(calls=(task(prompt="child first"),))]
    model = Casting(parent=parent, child=[Say(text=["one"]), Say(text=["two"])])
    async with running(tmp_path, model) as run:
        parent.append(Say(text=["ok"]))
        await run.session.prompt(text("parent go"))
        child = task_id_of(run.client.stored(ToolResult)[0])
        parent += [
            Say(calls=(task(prompt="and second", resume=child), task("c2", prompt="x", resume="s1"))),
            Say(text=["ok"]),
        ]
        await run.session.prompt(text("more"))
        again, stranger = run.client.stored(ToolResult)[1:]
        if again.is_error:
            again, stranger = stranger, again
    assert again.text.startswith("two\n")
    assert task_id_of(again) == child
    assert stranger.text == 'task: this session has no task "s1" to resume'
    said = [
        part.text
        for message in model.requests["child"][1].messages
        if isinstance(message, UserMessage)
        for part in message.parts
        if isinstance(part, Text)
    ]
    assert said == ["child first", "and second"]


async def test_a_resumed_task_has_the_present_system_prompt_of_the_session(tmp_path: Path) -> None:
    parent = [Say(calls=(task(prompt="child first"),)), Say(text=["ok"])]
    model = Casting(parent=parent, child=[Say(text=["one"]), Say(text=["two"])])
    async with running(tmp_path, model) as run:
        await run.session.prompt(text("parent go"))
        child = task_id_of(run.client.stored(ToolResult)[0])
        await run.session.branch.change(SessionChanges(config={"system_prompt_append": "Be brief."}))
        parent += [Say(calls=(task(prompt="and second", resume=child),)), Say(text=["ok"])]
        await run.session.prompt(text("more"))
    first, second = (each.messages[0] for each in model.requests["child"])
    assert isinstance(first, SystemMessage)
    assert isinstance(second, SystemMessage)
    assert "\n\nBe brief.\n\n" not in first.text
    assert "\n\nBe brief.\n\n" in second.text


async def test_several_tasks_run_at_once(tmp_path: Path) -> None:
    first, second = anyio.Event(), anyio.Event()
    hold_one, hold_two = Say(text=["1"], hold=second), Say(text=["2"], hold=first)
    model = Casting(
        parent=[Say(calls=(task("a", prompt="one go"), task("b", prompt="two go"))), Say(text=["both"])],
        one=[hold_one],
        two=[hold_two],
    )
    async with running(tmp_path, model) as run, anyio.create_task_group() as tasks:

        async def let_both_on() -> None:
            await hold_one.reached.wait()
            await hold_two.reached.wait()
            first.set()
            second.set()

        tasks.start_soon(let_both_on)
        assert await run.session.prompt(text("parent go")) == "end_turn"
    outputs = [message.text for message in model.requests["parent"][1].messages if isinstance(message, ToolMessage)]
    assert [output[0] for output in outputs] == ["1", "2"]


async def test_deny_rules_and_plan_mode_apply_to_subagents(tmp_path: Path) -> None:
    def script() -> Casting:
        return Casting(
            parent=[Say(calls=(task(prompt="child go"),)), Say(text=["ok"])],
            child=[Say(calls=(call("write_file", path="a", content="x"),)), Say(text=["could not"])],
        )

    async with running(tmp_path, script(), mode="auto", deny=("write_file",)) as run:
        await run.session.prompt(text("parent go"))
        denied = run.client.stored(ToolResult)[0].text
    (tmp_path / "crow.db").unlink()
    async with running(tmp_path, script(), mode="plan") as run:
        await run.session.prompt(text("parent go"))
        planned = run.client.stored(ToolResult)[0].text
    assert denied == (
        "The user has forbidden this call of write_file. Deny rule: `write_file` in config.toml under "
        "[permissions]. Do it another way, or tell the user, because only the user can remove the rule."
    )
    assert planned.startswith("write_file is not available in plan mode")
    assert not (tmp_path / "work" / "a").exists()


async def test_cancelling_a_turn_cancels_its_tasks_and_a_later_turn_can_resume_them(tmp_path: Path) -> None:
    stuck = Say(text=["thinking"], hold=anyio.Event())
    model = Casting(parent=[Say(calls=(task(prompt="child go"),)), Say(text=["ok"])], child=[stuck, Say(text=["now"])])
    async with running(tmp_path, model) as run:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await stuck.reached.wait()
                run.session.cancel()

            tasks.start_soon(stop)
            assert await run.session.prompt(text("parent go")) == "cancelled"
        children = [row for row in await ids_of_tasks(run) if row.parent_id == "s1"]
        (child,) = children
        bodies = await run.bodies(child.id)
    assert child.state == "idle"
    assert [body.text for body in bodies if isinstance(body, Assistant)] == ["thinking"]
    assert bodies[-1] == TurnEnd(stop="cancelled")


class Shower(NoteTaker):
    """A client that shows subagents."""

    def __init__(self) -> None:
        super().__init__()
        self.child = NoteTaker()

    @property
    def shows_subagents(self) -> bool:
        return True

    def open_subagent(self, session_id: str) -> NoteTaker:
        return self.child


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("UPDATE sessions SET leaf = NULL WHERE parent_id = 's1'", "Another process changed session"),
        (None, "is locked"),
    ],
)
async def test_a_subagent_whose_end_cannot_be_stored_is_shown_as_failed(
    tmp_path: Path, change: str | None, error: str
) -> None:
    hold, client = anyio.Event(), Shower()
    child = Say(text=["found"], hold=hold)
    model = Casting(parent=[Say(calls=(task(prompt="child go"),)), Say(text=["ok"])], child=[child])
    async with running(tmp_path, model, client=client) as run:
        run.store.database.lock_timeout.timeout_s = 0.01
        with closing(sqlite3.connect(tmp_path / "crow.db", isolation_level=None)) as other:

            async def disturb() -> None:
                await child.reached.wait()
                other.execute(change or "BEGIN IMMEDIATE")
                hold.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(disturb)
                with suppress(StoreUnavailable):
                    await run.session.prompt(text("parent go"))
            if other.in_transaction:
                other.execute("ROLLBACK")
    states = [event for event in client.events if isinstance(event, SubagentChanged)]
    assert [event.state for event in states] == [None, "running", "idle"]
    assert states[-1].stop == "error"
    assert error in states[-1].detail


async def ids_of_tasks(run: Running) -> list[Any]:
    names = {body.session for body in [entry async for batch in run.store.history("s1") for entry in batch]}
    assert names == {"s1"}
    found = []
    for number in range(1, 30):
        entry = await run.store.entry(number)
        if entry is not None and entry.session.startswith("task-"):
            found.append(entry.session)
    return [await run.store.session(name) for name in dict.fromkeys(found)]


async def test_a_skill_becomes_an_entry_that_the_model_sees_after_the_result(tmp_path: Path) -> None:
    folder = tmp_path / "skills" / "release"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: release\ndescription: How to release\n---\nTag it.")
    model = Casting(parent=[Say(calls=(call("skill", name="release"),)), Say(text=["ok"])])
    async with running(tmp_path, model) as run:
        await run.session.prompt(text("parent go"))
        stored = run.client.stored(Skill)
    system = json.dumps(str(model.requests["parent"][0].messages[0]))
    assert "- release: How to release" in system
    assert stored == [Skill(name="release", text="Tag it.")]
    last = model.requests["parent"][1].messages[-1]
    assert isinstance(last, UserMessage)
    assert [part.text for part in last.parts if isinstance(part, Text)] == ['<skill name="release">\nTag it.\n</skill>']
    assert run.client.questions == []


async def test_an_unloaded_skill_is_gone_from_the_context_until_it_is_loaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "skills" / "release"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: release\n---\nTag it.")
    load, unload = Say(calls=(call("skill", name="release"),)), Say(calls=(call("skill", name="release", unload=True),))
    model = Casting(parent=[load, unload, Say(text=["ok"]), load, Say(text=["ok"]), Say(text=["ok"])])
    async with running(tmp_path, model) as run:
        for prompt in ("parent one", "parent two", "/skills unload release", "parent three", "/skills"):
            await run.session.prompt(text(prompt))
        told = [command.answer for command in run.client.stored(Command)]
    seen = ["Tag it." in repr(request.messages) for request in model.requests["parent"]]
    assert seen == [False, True, False, False, True, False]
    assert told[0] == "Unloaded `release`. The model no longer sees its text; it can load the skill again."
    assert told[1] == "The model has loaded no skills."


async def test_each_skill_of_a_workspace_asks_once_for_itself(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / "work" / ".crow" / "skills" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\n---\nText of {name}.")
    calls = tuple(call("skill", f"c{number}", name=name) for number, name in enumerate(("one", "two", "one")))
    model = Casting(parent=[Say(calls=calls), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", client=NoteTaker("allow_once", "reject_once")) as run:
        await run.session.prompt(text("parent go"))
        asked = [(question.arguments, question.always, question.plan.review_text) for question in run.client.questions]
        assert asked == [(calls[0].arguments, "", "Text of one."), (calls[1].arguments, "", "Text of two.")]
        assert [skill.name for skill in run.client.stored(Skill)] == ["one", "one"]


async def test_a_skill_of_the_workspace_survives_a_compaction_and_asks_once(tmp_path: Path) -> None:
    folder = tmp_path / "work" / ".crow" / "skills" / "release"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: release\n---\nTag it, then tell the rooks.")
    load = Say(calls=(call("skill", name="release"),))
    model = Casting(
        parent=[load, *(Say(text=[f"{number} " + "words " * 3_000]) for number in range(4)), Say(text=["Summary."])],
        **{"[The": [load, Say(text=["done"])]},  # as what is left after a compaction begins
    )
    async with running(tmp_path, model, mode="auto", client=NoteTaker("allow_once")) as run:
        for number in range(4):
            await run.session.prompt(text(f"parent {number} " + "more " * 6_000))
        await run.session.prompt(text("/compact"))
        assert run.client.stored(Checkpoint)
        await run.session.prompt(text("Go on."))
        (question,) = run.client.questions
    assert question.name == "skill"
    after = model.requests["[The"][0]
    assert "words words" not in str(after.messages[1]), "the head is gone"
    assert str(after.messages).count("Tag it, then tell the rooks.") == 1


async def test_tasks_that_start_together_in_the_background_keep_to_the_limit(tmp_path: Path) -> None:
    tasks = tuple(task(f"c{n}", prompt="Work on it", background=True) for n in range(10))
    held = [Say(hold=anyio.Event()) for _ in tasks]
    model = Casting(Begin=[Say(calls=tasks), Say(text=["started"])], Work=held)
    async with running(tmp_path, model) as run:
        assert await run.session.prompt(text("Begin")) == "end_turn"
        assert len(run.session.runner.subagents) == 8
        results = [body for body in await run.bodies("s1") if isinstance(body, ToolResult)]
        refused = [body.text for body in results if body.is_error]
        assert refused == ["task: 8 tasks already work in the background; wait until one ends"] * 2


async def test_a_task_that_is_cancelled_before_it_begins_ends_as_cancelled(tmp_path: Path) -> None:
    model = Casting(Begin=[Say(calls=(task(prompt="Work", files=["notes.txt"]),)), Say(text=["ok"])])
    async with running(tmp_path, model) as run, anyio.create_task_group() as tasks:
        (tmp_path / "work" / "notes.txt").write_text("notes")
        tasks.start_soon(run.session.prompt, text("Begin"))
        while not run.session.runner.subagents:
            await anyio.lowlevel.checkpoint()
        assert run.session.runner.cancel_subagent(*run.session.runner.subagents)
    (result,) = run.client.stored(ToolResult)
    assert "[the task ended early: cancelled]" in result.text


class OutOfThreads(Tools):
    """A toolbox whose layers cannot be read, because the system gives no more threads."""

    @asynccontextmanager
    async def isolated(self, task_id: str) -> AsyncIterator[Tools]:
        yield self

    async def changes_of(self, task_id: str) -> str:
        raise RuntimeError("can't start new thread")


async def test_changes_that_cannot_be_read_end_neither_the_session_nor_the_answer(tmp_path: Path) -> None:
    model = Casting(Work=[Say(text=["done"])], Begin=[Say(text=["ok"]), Say(text=["I see"])])
    async with running(tmp_path, model) as run:
        await run.session.prompt(text("Begin"))
        tools, runner = OutOfThreads({}), run.session.runner.get()

        async def ignore(_: str) -> None: ...

        work = Task(title="Look", prompt="Work", background=True, isolated=True)
        await runner.subagents.delegate("call_1_0", work, tools, ignore)
        while not runner.inbox.has_news and not run.session.closing:
            await anyio.lowlevel.checkpoint()
        assert await run.session.prompt(text("Go on")) == "end_turn"
        told = [body.text for body in await run.bodies("s1") if isinstance(body, Custom)]
        assert "done" in told[0]
        assert "Its changes cannot be shown" in told[0]


async def test_the_usage_of_a_task_that_ends_between_two_turns_counts_for_the_next_turn(tmp_path: Path) -> None:
    gate = anyio.Event()
    model = Casting(
        Begin=[
            Say(calls=(task(prompt="Work on it", background=True),), usage=NOTHING),
            Say(text=["started"], usage=NOTHING),
            Say(text=["known"], usage=Usage(input_tokens=1, output_tokens=1)),
        ],
        Work=[Say(text=["done"], hold=gate, usage=Usage(input_tokens=70, output_tokens=7))],
    )
    async with running(tmp_path, model) as run:
        assert await run.session.prompt(text("Begin")) == "end_turn"
        gate.set()
        while run.session.runner.subagents:
            await anyio.lowlevel.checkpoint()
        later = run.session.submit(text("Again"))
        assert await run.session.answer(later) == "end_turn"
    assert later.usage == Usage(input_tokens=71, output_tokens=8)

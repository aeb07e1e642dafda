"""A session from the prompt to the stored end of its turn."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from crow.agent.history.options import set_mode, set_option
from crow.domain.entries import (
    Assistant,
    Checkpoint,
    Command,
    Note,
    Prompt,
    Remark,
    Reminder,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.errors import AuthError, ConfigError, CrowError, NetworkError, QuotaExceeded, TurnError
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    EntryStored,
    Event,
    NoticeShown,
    TextShown,
    TitleChanged,
    TurnBegan,
    TurnEnded,
)
from crow.domain.messages import AssistantMessage, ToolMessage, Usage, UserMessage
from crow.domain.tokens import estimate_message
from crow.llm import ModelInfo
from crow.store import paths
from crow.store.sqlite.store import SqliteStore
from crow.tools import ServerStatus
from crow.tools.mcp.client import open_toolbox
from tests.agent.harness import NoteTaker, Tool, opened, text
from tests.store.scenes import add, begin, converse, new_session, result, said
from tests.support.disks import without_shared_memory
from tests.support.scripted_model import Say, ScriptedModel, call


async def quick(**arguments: object) -> str:
    return f"did {arguments}"


async def test_a_prompt_is_answered_and_every_step_is_stored_in_order(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["Hel", "lo"], usage=Usage(input_tokens=10, output_tokens=2)))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("Hi there\nsecond line")) == "end_turn"
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]
        assert run.client.shown() == "Hello"
        row = await run.store.session("s1")
        assert (row.title, row.state, row.tokens_in, row.tokens_out) == ("Hi there", "idle", 10, 2)
        assert TitleChanged(title="Hi there") in run.client.events


async def test_the_prompt_is_on_disk_before_the_model_is_asked(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=["x"], hold=hold)
    async with opened(tmp_path, ScriptedModel(say)) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.session.prompt, text("Hi"))
        await say.reached.wait()
        assert await run.kinds() == ["User"]
        assert (await run.store.session("s1")).state == "running"
        hold.set()


async def test_a_call_is_stored_announced_permitted_started_run_and_answered_in_this_order(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["Looking."], calls=(call("act", path="x"),)), Say(text=["Done."]))
    async with opened(tmp_path, model, tools={"act": Tool("write", quick)}) as run:
        await run.session.prompt(text("Do it"))
        assert await run.kinds() == ["User", "Assistant", "Started", "ToolResult", "Assistant", "TurnEnd"]
        (question,) = run.client.questions
        assert (question.name, question.always) == ("act", "every act call in this directory and session")
        order = [
            type(event).__name__ if not isinstance(event, EntryStored) else type(event.entry.body).__name__
            for event in run.client.events
        ]
        for before, after in [("Assistant", "CallAnnounced"), ("CallAnnounced", "Started"), ("Started", "ToolResult")]:
            assert order.index(before) < order.index(after)
        last = model.requests[1].messages[-1]
        assert last == ToolMessage(call_id="c1", text="did {'path': 'x'}")


async def test_a_rejected_call_gets_an_answer_and_never_starts(tmp_path: Path) -> None:
    model = ScriptedModel(Say(calls=(call("act"),)), Say(text=["All right."]))
    client = NoteTaker("reject_once")
    async with opened(tmp_path, model, tools={"act": Tool("execute", quick)}, client=client) as run:
        assert await run.session.prompt(text("Do it")) == "end_turn"
        assert run.tools.order == []
        assert client.stored(Started) == []
        (result,) = client.stored(ToolResult)
        assert result.is_error
        assert "did not allow" in result.text


async def test_an_always_answer_is_stored_and_holds_after_a_load(tmp_path: Path) -> None:
    client = NoteTaker("allow_always")
    model = ScriptedModel(Say(calls=(call("act"),)), Say(text=["1"]), Say(calls=(call("act"),)), Say(text=["2"]))
    tools = {"act": Tool("write", quick)}
    async with opened(tmp_path, model, tools=tools, client=client) as run:
        await run.session.prompt(text("once"))
    async with opened(tmp_path, model, tools=tools, client=client, session_id="s1") as run:
        await run.session.prompt(text("again"))
        assert len(client.questions) == 1
        assert [started.why for started in client.stored(Started)] == [
            "allow always by the user",
            "always allowed by the user in this session",
        ]


async def test_calls_that_write_run_alone_in_order_and_others_at_once(tmp_path: Path) -> None:
    both = anyio.Event()
    waiting = 0

    async def meet() -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        return "met"

    calls = (call("look", "1"), call("look", "2"), call("put", "3"), call("run", "4"))
    tools = {
        "look": Tool("read", meet),
        "put": Tool("write", quick, is_barrier=True),
        "run": Tool("execute", quick),
    }
    model = ScriptedModel(Say(calls=calls), Say(text=["ok"]))
    async with opened(tmp_path, model, tools=tools, mode="auto") as run:
        await run.session.prompt(text("go"))
        assert run.tools.order[2:] == ["look ends", "look ends", "put begins", "put ends", "run begins", "run ends"]
        assert [message.call_id for message in model.requests[1].messages if isinstance(message, ToolMessage)] == [
            "1",
            "2",
            "3",
            "4",
        ]


async def test_an_invalid_call_is_answered_with_its_fault_and_the_others_run(tmp_path: Path) -> None:
    model = ScriptedModel(Say(calls=(call("nothing", "1"), call("look", "2"))), Say(text=["ok"]))
    async with opened(tmp_path, model, tools={"look": Tool("read", quick)}) as run:
        await run.session.prompt(text("go"))
        results = run.client.stored(ToolResult)
        assert [(result.name, result.is_error) for result in results] == [("nothing", True), ("look", False)]


async def test_cancel_while_streaming_keeps_the_partial_text_and_the_next_prompt_works(tmp_path: Path) -> None:
    say = Say(text=["partial ", "text"], hold=anyio.Event())
    model = ScriptedModel(say, Say(text=["fine"]))
    async with opened(tmp_path, model) as run:
        stops: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def prompt() -> None:
                stops.append(await run.session.prompt(text("Hi")))

            tasks.start_soon(prompt)
            await say.reached.wait()
            while run.client.shown() != "partial text":
                await anyio.lowlevel.checkpoint()
            run.session.cancel()
        assert stops == ["cancelled"]
        assert model.closed_streams == 1
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]
        answer = (await run.log())[-2].body
        assert isinstance(answer, Assistant)
        assert (answer.text, answer.finish) == ("partial text", "interrupted")
        assert await run.session.prompt(text("Again")) == "end_turn"
        said = [message for message in model.requests[1].messages if isinstance(message, AssistantMessage)]
        assert said[0].text.startswith("partial text")


async def test_cancel_during_a_tool_ends_it_and_tells_client_and_model(tmp_path: Path) -> None:
    running = anyio.Event()
    ended: list[bool] = []

    async def long() -> str:
        try:
            running.set()
            await anyio.sleep_forever()
        finally:
            ended.append(True)
        return ""

    model = ScriptedModel(Say(calls=(call("long"),)), Say(text=["fine"]))
    async with opened(tmp_path, model, tools={"long": Tool("execute", long)}) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("Hi"))
            await running.wait()
            run.session.cancel()
        assert ended == [True]
        (end,) = [event for event in run.client.events if isinstance(event, CallEnded)]
        assert end.text == "Cancelled."
        assert await run.kinds() == ["User", "Assistant", "Started", "TurnEnd"]
        await run.session.prompt(text("Again"))
        (result,) = [message for message in model.requests[1].messages if isinstance(message, ToolMessage)]
        assert "effects are unknown" in result.text


async def test_cancel_while_the_user_is_asked_ends_the_turn(tmp_path: Path) -> None:
    client = NoteTaker()
    client.never_answers = True
    model = ScriptedModel(Say(calls=(call("act"),)))
    async with opened(tmp_path, model, tools={"act": Tool("write", quick)}, client=client) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("Hi"))
            await client.asked.wait()
            run.session.cancel()
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]


async def test_a_dismissed_question_ends_the_turn_as_cancelled(tmp_path: Path) -> None:
    client = NoteTaker("cancelled")
    model = ScriptedModel(Say(calls=(call("act", "1"), call("act", "2"))))
    async with opened(tmp_path, model, tools={"act": Tool("write", quick)}, client=client) as run:
        assert await run.session.prompt(text("Hi")) == "cancelled"
        assert run.tools.order == []
        assert len(client.questions) == 1
        assert sum(isinstance(event, CallEnded) for event in client.events) == 2


async def test_prompts_wait_in_order_and_a_cancel_ends_waiting_prompts_too(tmp_path: Path) -> None:
    hold = anyio.Event()
    first = Say(text=["1"], hold=hold)
    model = ScriptedModel(first, Say(text=["2"]), Say(text=["3"], hold=anyio.Event()))
    async with opened(tmp_path, model) as run:
        stops: dict[str, str] = {}

        async def prompt(words: str) -> None:
            stops[words] = await run.session.prompt(text(words))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt, "a")
            await first.reached.wait()
            tasks.start_soon(prompt, "b")
            await anyio.wait_all_tasks_blocked()
            hold.set()
        assert stops == {"a": "end_turn", "b": "end_turn"}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt, "c")
            while len(model.requests) < 3:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(prompt, "d")
            await anyio.wait_all_tasks_blocked()
            run.session.cancel()
        assert (stops["c"], stops["d"]) == ("cancelled", "cancelled")
        assert len(model.requests) == 3
        users = [entry.body.parts for entry in await run.log() if isinstance(entry.body, User)]
        assert users == [text("a"), text("b"), text("c"), text("d")]


async def test_a_cancel_when_idle_has_no_effect_on_the_next_prompt(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["ok"]))) as run:
        run.session.cancel()
        assert await run.session.prompt(text("Hi")) == "end_turn"


async def test_a_failed_request_fails_the_prompt_and_the_next_prompt_works(tmp_path: Path) -> None:
    model = ScriptedModel(Say(error=QuotaExceeded("No credit left.")), Say(text=["ok"]))
    async with opened(tmp_path, model) as run:
        with pytest.raises(QuotaExceeded, match="No credit left"):
            await run.session.prompt(text("Hi"))
        assert (await run.log())[-1].body == TurnEnd(stop="error", detail="No credit left.")
        assert (await run.store.session("s1")).state == "idle"
        assert await run.session.prompt(text("Again")) == "end_turn"


async def test_a_stream_that_breaks_after_text_is_continued_with_that_text_in_the_context(tmp_path: Path) -> None:
    broken = Say(text=["one two"], error=NetworkError("cut"))
    model = ScriptedModel(broken, Say(text=[" three"]))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("count")) == "end_turn"
        assert run.client.shown() == "one two three"
        assert await run.kinds() == ["User", "Assistant", "Reminder", "Assistant", "TurnEnd"]
        *_, partial, reminder = model.requests[1].messages
        assert isinstance(partial, AssistantMessage)
        assert partial.text.startswith("one two")
        assert isinstance(reminder, UserMessage)


async def test_a_stream_that_breaks_twice_fails_and_keeps_both_pieces(tmp_path: Path) -> None:
    model = ScriptedModel(
        Say(text=["one"], error=NetworkError("cut")), Say(text=["two"], error=NetworkError("cut again"))
    )
    async with opened(tmp_path, model) as run:
        with pytest.raises(NetworkError, match="cut again"):
            await run.session.prompt(text("count"))
        texts = [entry.body.text for entry in await run.log() if isinstance(entry.body, Assistant)]
        assert texts == ["one", "two"]


async def test_a_missing_key_fails_the_prompt_and_the_prompt_is_stored(tmp_path: Path) -> None:
    class Keyless(ScriptedModel):
        def check(self) -> None:
            raise AuthError("Set OPENAI_API_KEY.")

    async with opened(tmp_path, Keyless()) as run:
        with pytest.raises(AuthError, match="OPENAI_API_KEY"):
            await run.session.prompt(text("Hi"))
        assert await run.kinds() == ["User", "TurnEnd"]


class RemovedModel(ScriptedModel):
    """A model that the user has removed from the settings, once `is_removed` is set."""

    is_removed = False

    @property
    def info(self) -> ModelInfo:
        if self.is_removed:
            raise ConfigError('There is no model "scripted".')
        return super().info


async def test_a_queued_prompt_that_fails_since_its_model_is_gone_leaves_the_inbox(tmp_path: Path) -> None:
    first = Say(text=["one"], hold=anyio.Event())
    model = RemovedModel(first)
    async with opened(tmp_path, model) as run:

        async def fail() -> None:
            with pytest.raises(ConfigError):
                await run.session.prompt(text("x" * 3_000))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("begin"))
            await first.reached.wait()
            tasks.start_soon(fail)
            while not await run.store.queued("s1"):
                pass
            assert first.hold is not None
            first.hold.set()
            while run.session.runner.turn is not None:
                await anyio.lowlevel.checkpoint()
            model.is_removed = True
        assert await run.store.queued("s1") == ()


async def test_a_bug_in_a_tool_fails_the_turn_and_not_the_session(tmp_path: Path) -> None:
    async def broken() -> str:
        raise ZeroDivisionError

    model = ScriptedModel(Say(calls=(call("bad"),)), Say(text=["ok"]))
    async with opened(tmp_path, model, tools={"bad": Tool("read", broken)}) as run:
        with pytest.raises(ExceptionGroup):
            await run.session.prompt(text("Hi"))
        assert (await run.log())[-1].body == TurnEnd(stop="error", detail="Internal error")
        assert await run.session.prompt(text("Again")) == "end_turn"


async def test_an_endless_turn_stops_at_the_step_limit_with_a_remark(tmp_path: Path) -> None:
    model = ScriptedModel(*[Say(calls=(call("look"),)) for _ in range(3)])
    async with opened(tmp_path, model, tools={"look": Tool("read", quick)}, steps=3) as run:
        assert await run.session.prompt(text("loop")) == "max_turn_requests"
        (remark,) = run.client.stored(Remark)
        assert "3 steps" in remark.text


async def test_an_answer_cut_by_its_length_says_max_tokens(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["a"], finish="length"))) as run:
        assert await run.session.prompt(text("Hi")) == "max_tokens"


async def test_a_refused_prompt_leaves_the_context_and_stays_in_the_log(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["No."], finish="refusal"), Say(text=["ok"]))
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("bad")) == "refusal"
        assert await run.session.prompt(text("good")) == "end_turn"
        said = [message for message in model.requests[1].messages if isinstance(message, UserMessage)]
        assert [message.parts[0] for message in said] == list(text("good"))


async def test_a_refusal_after_a_call_ran_is_an_error_with_the_models_words(tmp_path: Path) -> None:
    model = ScriptedModel(Say(calls=(call("look"),)), Say(text=["I will not."], finish="refusal"))
    async with opened(tmp_path, model, tools={"look": Tool("read", quick)}) as run:
        with pytest.raises(TurnError, match="I will not"):
            await run.session.prompt(text("Hi"))


async def test_the_prompt_entry_is_written_once_and_again_when_the_tools_change(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["1"]), Say(text=["2"]), Say(text=["3"]))
    async with opened(tmp_path, model, tools={"look": Tool("read", quick)}) as run:
        await run.session.prompt(text("a"))
        await run.session.prompt(text("b"))
        assert sum(isinstance(entry.body, Prompt) for entry in await run.log()) == 1
        assert model.requests[1].messages[: len(model.requests[0].messages)] == model.requests[0].messages
        run.tools.tools = {"look": Tool("read", quick), "more": Tool("read", quick)}
        await run.session.prompt(text("c"))
        assert [spec.name for spec in model.requests[2].tools] == ["look", "more"]


async def test_the_model_is_reminded_once_of_a_new_mode(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["1"]), Say(text=["2"]), Say(text=["3"]))
    async with opened(tmp_path, model) as run:
        await run.session.prompt(text("a"))
        await set_mode(run.session.branch, "plan")
        await run.session.prompt(text("b"))
        await run.session.prompt(text("c"))
        log = await run.log()
        assert [entry.body for entry in log if isinstance(entry.body, Note)] == [Note(about="mode", value="plan")]
        assert sum(isinstance(entry.body, Reminder) for entry in log) == 1


async def test_a_failed_server_is_reported_once_to_the_user_and_to_the_model(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["1"]), Say(text=["2"]))
    async with opened(tmp_path, model) as run:
        run.tools.statuses = (ServerStatus(name="db", state="failed", detail="no such file"),)
        await run.session.prompt(text("a"))
        await run.session.prompt(text("b"))
        assert [remark.text for remark in run.client.stored(Remark)] == ["MCP server db is not available: no such file"]
        assert sum("no such file" in str(m) for m in model.requests[1].messages) == 1


async def test_every_failure_of_a_server_is_reported_even_after_it_recovered(tmp_path: Path) -> None:
    model = ScriptedModel(*(Say(text=[str(number)]) for number in range(8)))
    cold = ServerStatus(name="db", state="failed", detail="no such file")
    ready = ServerStatus(name="db", state="ready", tools=1)
    again = replace(ready, losses=1, loss="it crashed </servers> <mode>")
    down = replace(cold, losses=2, loss="it hung", detail="it hung")
    once = replace(again, losses=3, loss="it crashed thrice", detail="it crashed thrice", state="starting")
    course = (cold, replace(cold, state="starting"), cold, ready, again, again, down)
    async with opened(tmp_path, model) as run:
        for status in course:
            run.tools.statuses = (status,)
            await run.session.prompt(text("go"))
        remarks = [remark.text for remark in run.client.stored(Remark)]
        reminders = [reminder.text for reminder in run.client.stored(Reminder)]
        run.client.notices, run.tools.statuses = True, (once,)
        await run.session.prompt(text("go"))
        notices = [event for event in run.client.events if isinstance(event, NoticeShown)]
        assert len(run.client.stored(Remark)) == len(remarks)
    assert remarks == [
        "MCP server db is not available: no such file",
        "MCP server db stopped and was restarted: it crashed </servers> <mode>",
        "MCP server db is not available: it hung",
    ]
    told = "These MCP servers stopped and were restarted, so their state is lost: db: it crashed ‹/servers› ‹mode›"
    assert [reminder.partition("<servers>\n")[2].partition("\n</servers>")[0] for reminder in reminders] == [
        "These MCP servers are not available: db: no such file",
        "(servers: none any more)",
        told,
        "These MCP servers are not available: db: it hung",
    ]
    title = "MCP server db stopped and is being restarted"
    assert notices[0] == NoticeShown(severity="warning", title=title, description="it crashed thrice")


async def test_a_command_is_answered_without_the_model_and_stored_as_typed(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel()) as run:
        assert await run.session.prompt(text("/help")) == "end_turn"
        (command,) = run.client.stored(Command)
        assert command.text == "/help"
        assert "/compact" in command.answer
        assert await run.kinds() == ["Command", "TurnEnd"]


async def test_a_command_that_was_shown_stays_in_the_history_if_it_is_cancelled_before_its_answer(
    tmp_path: Path,
) -> None:
    class Canceller(NoteTaker):
        async def publish(self, event: Event) -> None:
            await super().publish(event)
            if isinstance(event, TurnBegan):
                run.session.cancel()

    async with opened(tmp_path, ScriptedModel(), client=Canceller()) as run:
        assert await run.session.prompt(text("/help")) == "cancelled"
        (ended,) = (event for event in run.client.events if isinstance(event, TurnEnded))
        assert ended.stop == "cancelled"
        (command,) = run.client.stored(Command)
        assert (command.text, command.answer) == ("/help", "")
        assert await run.kinds() == ["Command", "TurnEnd"]


async def test_a_path_that_looks_like_a_command_is_a_prompt(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["ok"]))) as run:
        await run.session.prompt(text("/etc/hosts: what is it?"))
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]


async def test_closing_a_session_that_never_had_a_prompt_loads_nothing(tmp_path: Path) -> None:
    loads: list[str] = []

    async def load() -> None:
        loads.append("load")

    async with opened(tmp_path, ScriptedModel()) as run:
        run.session.conversation.adapters = replace(run.session.conversation.adapters, load=load)
        await anyio.wait_all_tasks_blocked()
    assert loads == []


async def test_closing_a_session_cancels_its_turn_and_stores_what_was_shown(tmp_path: Path) -> None:
    say = Say(text=["some"], hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(say)) as run:
        stops: list[str] = []

        async def prompt() -> None:
            stops.append(await run.session.prompt(text("Hi")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await say.reached.wait()
            while not run.client.shown():
                await anyio.lowlevel.checkpoint()
            await run.session.close()
        assert stops == ["cancelled"]
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]


async def test_a_prompt_is_in_the_history_even_if_the_session_closes_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel()) as run:
        stops: list[str] = []

        async def prompt() -> None:
            stops.append(await run.session.prompt(text("Hi")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await anyio.lowlevel.checkpoint()
            await run.session.close()
        assert stops == ["cancelled"]
        assert await run.kinds() == ["User", "TurnEnd"]
        assert await run.store.queued("s1") == ()


async def test_a_request_cancelled_while_it_enqueues_its_prompt_leaves_nothing_in_the_inbox(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=["some"], hold=hold)
    async with opened(tmp_path, ScriptedModel(say, Say(text=["third"]))) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("first"))
            await say.reached.wait()
            dying = asyncio.create_task(run.session.prompt(text("second")))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            dying.cancel()
            hold.set()
        assert await run.session.prompt(text("third")) == "end_turn"
        assert dying.cancelled()
        assert await run.store.queued("s1") == ()
        assert not run.session.busy


async def test_messages_that_another_process_added_are_included_with_a_remark(tmp_path: Path) -> None:
    here, there = ScriptedModel(Say(text=["1"]), Say(text=["3"])), ScriptedModel(Say(text=["2"]))
    async with opened(tmp_path, here) as first:
        await first.session.prompt(text("a"))
        async with opened(tmp_path, there, session_id="s1") as second:
            await second.session.prompt(text("b"))
        await first.session.prompt(text("c"))
        said = [str(message) for message in here.requests[1].messages]
        assert any("'b'" in words for words in said)
        assert any("Another process added" in remark.text for remark in first.client.stored(Remark))


async def test_options_that_two_processes_set_undo_neither_each_other_nor_the_name_of_the_node(tmp_path: Path) -> None:
    here, there = ScriptedModel(Say(text=["1"]), Say(text=["2"])), ScriptedModel()
    async with opened(tmp_path, here) as first, opened(tmp_path, there, session_id="s1") as second:
        first.session.conversation.adapters = replace(first.session.conversation.adapters, node="one")
        await set_option(second.session.branch, "auto_compact", False)
        await set_option(first.session.branch, "thought_level", "high")
        assert (await first.store.session("s1")).config == {"auto_compact": False, "thought_level": "high"}
        await set_option(second.session.branch, "auto_compact", True)
        await first.session.prompt(text("a"))
        expected = {"auto_compact": True, "thought_level": "high", "node": "one"}
        assert (await first.store.session("s1")).config == expected
        await set_option(first.session.branch, "thought_level", "low")
        await first.session.prompt(text("b"))
        await set_option(second.session.branch, "auto_compact", False)
        await first.session.prompt(text("/undo"))  # restores the thought level
        await first.session.prompt(text("/undo"))
        assert (await first.store.session("s1")).config == expected | {"auto_compact": False}


async def test_every_announced_call_has_its_own_id(tmp_path: Path) -> None:
    model = ScriptedModel(
        Say(calls=(call("look", "same"), call("look", "same"))), Say(calls=(call("look", "same"),)), Say(text=["ok"])
    )
    async with opened(tmp_path, model, tools={"look": Tool("read", quick)}) as run:
        await run.session.prompt(text("Hi"))
        ids = [event.call.call_id for event in run.client.events if isinstance(event, CallAnnounced)]
        assert len(set(ids)) == len(ids) == 3
        assert [type(event) for event in run.client.events[-2:]] == [EntryStored, TurnEnded]
        assert all(not isinstance(event, TextShown) or event.text for event in run.client.events)


async def test_the_lease_is_renewed_while_a_silent_tool_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.agent.sessions.prompt_turn.RENEW_S", 0.001)
    model = ScriptedModel(Say(calls=(call("wait"),)), Say(text=["Done."]))

    async def lease() -> int:
        query = "SELECT lease_ms FROM sessions"
        return int((await run.store.database.read(lambda sql: sql.execute(query).fetchone()))[0])

    async def wait() -> str:
        since = await lease()
        while await lease() == since:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        return "waited"

    async with opened(tmp_path, model, tools={"wait": Tool("read", wait)}) as run:
        assert await run.session.prompt(text("Wait")) == "end_turn"
        assert await lease() == 0


async def test_the_user_is_warned_once_about_an_unsuitable_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_shared_memory(monkeypatch)
    async with opened(tmp_path, ScriptedModel(Say(text=["1"]), Say(text=["2"]))) as run:
        for prompt in ("one", "two"):
            await run.session.prompt(text(prompt))
        notices = [event for event in run.client.events if isinstance(event, NoticeShown)]
        assert notices == [NoticeShown(severity="warning", title=run.store.warning)]
        assert "Preferably, set CROW_HOME to a directory on a local disk." in run.store.warning


async def test_a_call_is_stored_as_started_before_it_runs_or_if_it_reads_only_when_it_is_slow(
    tmp_path: Path,
) -> None:
    stored: dict[str, str] = {}

    async def quick() -> str:
        stored["quick"] = (await run.kinds())[-1]
        return "seen"

    async def slow() -> str:
        while (await run.kinds())[-1] != "Started":
            await anyio.lowlevel.checkpoint()
        stored["slow"] = "Started"
        return "seen"

    async def change() -> str:
        stored["change"] = (await run.kinds())[-1]
        return "changed"

    tools = {"quick": Tool("read", quick), "slow": Tool("read", slow), "change": Tool("write", change)}
    model = ScriptedModel(*(Say(calls=(call(name, name),)) for name in tools), Say(text=["Done."]))
    async with opened(tmp_path, model, tools=tools, mode="auto") as run:
        await run.session.prompt(text("Go"))
        step = ["Assistant", "Started", "ToolResult"]
        assert (await run.kinds())[-11:] == [*step, *step, *step, "Assistant", "TurnEnd"]
    assert stored == {"quick": "Assistant", "slow": "Started", "change": "Started"}


async def test_tools_that_could_not_be_opened_are_opened_by_the_next_prompt(tmp_path: Path) -> None:
    model, failures = ScriptedModel(Say(text=["Now."])), [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    @asynccontextmanager
    async def open_tools(*given: Any, **more: Any) -> AsyncIterator[Any]:
        if failures:
            raise failures.pop()
        async with open_toolbox(*given, **more) as toolbox:
            yield toolbox

    async with opened(tmp_path, model, open_tools=open_tools) as run:
        with pytest.raises(CrowError, match=r"The tools of this session could not be opened: .*Too many open files"):
            await run.session.prompt(text("Hi"))
        assert await run.session.prompt(text("Hi again")) == "end_turn"


@pytest.mark.parametrize("missing", [ImportError, OSError])
async def test_a_failed_import_fails_one_call_and_not_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: type[Exception]
) -> None:
    class Finder(MetaPathFinder):
        """Fails to read a module, as a process without file descriptors does."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "crow.tools.builtin.server":
                raise missing("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        patch.delitem(sys.modules, "crow.tools.builtin.server", raising=False)
        model = ScriptedModel(
            Say(calls=(call("list_files", path="."),)),
            Say(text=["It failed."]),
            Say(calls=(call("list_files", path="."),)),
            Say(text=["It works."]),
        )
        (tmp_path / "nest.txt").touch()
        async with opened(tmp_path, model, open_tools=open_toolbox) as run:
            assert await run.session.prompt(text("List")) == "end_turn"
            patch.undo()
            assert await run.session.prompt(text("List again")) == "end_turn"
            failed, listed = run.client.stored(ToolResult)
    assert "cannot import the MCP SDK: Too many open files" in failed.text
    assert "nest.txt" in listed.text


async def test_the_first_prompt_of_a_long_session_that_was_never_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "TAIL_BYTES", 1_000_000)
    store = await SqliteStore.open(tmp_path / "crow.db")
    await store.create_session(new_session(cwd=str(tmp_path)))
    first, *_ = await converse(store, "s1", "the oldest prompt")
    prompt = await begin(store, "s1", "look at everything")
    for number in range(40):
        (answer,) = await add(store, "s1", said(f"look {number}", calls=1), turn=prompt.turn)
        await add(store, "s1", result(answer.id, f"{number} twigs ".ljust(50_000, "x")), turn=prompt.turn)
    await add(store, "s1", said("all seen"), TurnEnd(stop="end_turn"), turn=prompt.turn, release=True)
    await store.close()
    model = ScriptedModel(Say(text=["The nest is fine."]), Say(text=["## Goal\nLook at all twigs."]))
    async with opened(tmp_path, model, session_id="s1") as run:
        assert await run.session.prompt(text("And now?")) == "end_turn"
        request = model.requests[0]
        assert sum(map(estimate_message, request.messages)) < 128_000
        assert "and everything before it was left out" in str(request.messages[1])
        assert "look at everything" in str(request.messages[1])  # the prompt of the turn that was left out
        assert await run.session.prompt(text("/compact")) == "end_turn"
        (checkpoint,) = [entry.body for entry in await run.log() if isinstance(entry.body, Checkpoint)]
        assert checkpoint.first_covered == first.id
        assert checkpoint.method != "unread"
        assert not any(
            isinstance(entry.body, Checkpoint) and entry.body.method == "unread" for entry in await run.log()
        )


async def test_prompts_of_a_session_that_fails_are_answered_with_an_error(tmp_path: Path) -> None:
    say = Say(text=["shown"], hold=anyio.Event())
    answers: list[asyncio.Task[str]] = []

    async def fail() -> None:
        raise ZeroDivisionError

    async def run_until_failure() -> None:
        async with opened(tmp_path, ScriptedModel(say)) as run:
            answers.extend(asyncio.create_task(run.session.prompt(text(words))) for words in ("first", "second"))
            await say.reached.wait()
            run.session.runner.tasks.start_soon(fail)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup):
        await run_until_failure()
    for answer in answers:
        with pytest.raises(TurnError, match="Session s1 failed"):
            await answer

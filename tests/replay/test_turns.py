"""Turns that run again from the log, and the words about a turn that does something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from crow.agent.compaction import budget
from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.history.options import set_mode
from crow.agent.turns import calls as calls_module
from crow.agent.turns import news, prompt
from crow.domain.entries import Assistant, Checkpoint, Mask, Prompt, TurnEnd
from crow.domain.errors import ContextOverflow, ModelError, NetworkError
from crow.domain.messages import SentRequest, ToolCall, Usage
from crow.llm import Request
from crow.replay.requests import Replayed
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker, Tool, opened, text
from tests.replay.harness import INFO, RecordingModel, replayed
from tests.store.scenes import add, begin, new_session, result
from tests.support.hooks import python_hooks
from tests.support.scripted_model import Say, call

SPARE = replace(INFO, name="spare", endpoint="http://127.0.0.1:1/v1 spare")
WORDS = "Twigs and string. " * 60


async def slow(path: str) -> str:
    await anyio.sleep(0.02)
    return f"slow {path}"


async def quick(path: str) -> str:
    return f"quick {path}"


async def long(path: str) -> str:
    return f"{path} {WORDS}" * 8


TOOLS = {
    "slow": Tool("read", slow),
    "quick": Tool("external", quick),
    "long": Tool("read", long),
    "write_file": Tool("write", quick, is_barrier=True),
    "faulty": Tool("read", quick, fault="faulty: it never works"),
}


def identical(found: Sequence[Replayed]) -> int:
    """How many requests there are, all of which are identical."""
    assert [(each.outcome, each.words) for each in found] == [("identical", "")] * len(found)
    return len(found)


def differences(found: Sequence[Replayed]) -> list[str]:
    """The words of the differences."""
    return [each.words for each in found if each.outcome == "different"]


def files_in(folder: Path) -> set[Path]:
    """All files and folders below a folder."""
    return set(folder.rglob("*"))


async def test_results_that_came_in_another_order_come_in_it_again(tmp_path: Path) -> None:
    model = RecordingModel(
        Say(
            text=("I look.",),
            calls=(
                call("slow", "c0", path="a"),
                call("quick", "c1", path="b"),
                call("write_file", "c2", path="c"),
                call("faulty", "c3", path="d"),
                call("unknown", "c4"),
                call("quick", "c5", path="e"),
            ),
        ),
        Say(text=("Done.",)),
    )
    async with opened(tmp_path, model, tools=TOOLS, mode="auto") as one:
        await one.session.prompt(text("Build a nest."))
    assert identical(await replayed(tmp_path)) == 2


async def test_prompts_in_a_turn_come_where_they_came(tmp_path: Path) -> None:
    held = anyio.Event()
    first = Say(text=("I look.",), calls=(call("quick", path="a"),), hold=held)
    model = RecordingModel(first, Say(text=("Now in blue.",)), Say(text=("Bye.",)))
    async with opened(tmp_path, model, tools=TOOLS, mode="auto") as one, anyio.create_task_group() as tasks:
        tasks.start_soon(one.session.prompt, text("Build a nest."))
        await first.reached.wait()
        await one.session.steer(text("In blue."))
        held.set()
        await one.session.prompt(text("Thank you."))
    assert identical(await replayed(tmp_path)) == 3


async def test_a_broken_stream_is_continued_again(tmp_path: Path) -> None:
    broken = NetworkError("gone")
    model = RecordingModel(
        Say(text=("The nest is", " built of"), error=broken),
        Say(text=("built of twigs.",)),
        Say(text=("Half",), error=broken),
        Say(text=("an ",), error=broken),
    )
    async with opened(tmp_path, model, tools=TOOLS) as one:
        await one.session.prompt(text("What is it?"))
        with pytest.raises(NetworkError):
            await one.session.prompt(text("And now?"))
    assert identical(await replayed(tmp_path)) == 4


async def test_failures_and_cancels_end_turns_where_they_ended(tmp_path: Path) -> None:
    held, client = anyio.Event(), NoteTaker("reject_once", "cancelled")
    cut = Say(text=("It is ",), hold=held)
    model = RecordingModel(
        cut,
        Say(error=ModelError("refused")),
        Say(text=("Half a wo",), error=ModelError("too long")),
        Say(calls=(call("quick", "c0", path="a"), call("slow", "c1", path="b"))),
        Say(calls=(call("quick", "c0", path="a"), call("slow", "c1", path="b"))),
        Say(text=("Bye.",)),
    )
    async with opened(tmp_path, model, tools=TOOLS, client=client) as one, anyio.create_task_group() as tasks:
        tasks.start_soon(one.session.prompt, text("What is it?"))
        await cut.reached.wait()
        one.session.cancel()
        for _ in range(2):
            with pytest.raises(ModelError):
                await one.session.prompt(text("And now?"))
        assert await one.session.prompt(text("Look.")) == "cancelled"
        await one.session.prompt(text("Bye."))
    assert identical(await replayed(tmp_path)) >= 5


async def compacting(tmp_path: Path, prompts: int = 8) -> None:
    """Run a session that is compacted, with a summary or hidden outputs."""
    model = RecordingModel(otherwise=_long_turns())
    async with opened(tmp_path, model, tools=TOOLS, mode="auto", compaction=CompactionPolicy()) as one:
        for number in range(prompts):
            await one.session.prompt(text(f"Part {number}. {WORDS}"))
        await one.session.prompt(text("/compact the nest"))
        await one.session.prompt(text("Go on."))
        assert {"Checkpoint"} <= set(await one.kinds())


def _long_turns() -> Callable[[Request], Say]:
    turns = iter(range(1_000))

    def reply(request: Request) -> Say:
        if request.tool_choice == "none" or "working notes" in str(request.messages[0]):
            return Say(text=("## Goal\nA nest.",))
        number = next(turns)
        if number % 3 == 2:
            return Say(text=(f"Done {number}.",))
        return Say(calls=(call("long", "c0", path=f"a{number}"), call("long", "c1", path=f"b{number}")))

    return reply


async def test_compactions_are_decided_again(tmp_path: Path) -> None:
    await compacting(tmp_path)
    assert identical(await replayed(tmp_path)) > 20


async def test_another_threshold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await compacting(tmp_path)
    monkeypatch.setattr(budget, "_THRESHOLD", 0.5)
    found = differences(await replayed(tmp_path))
    assert re.fullmatch(
        r"today a compaction \(summary\) comes where the log has an answer \(entry \d+\)",
        found[1],
    )
    monkeypatch.setattr(budget, "_THRESHOLD", 0.95)
    monkeypatch.setattr(budget, "_RESERVE", 0)
    assert re.fullmatch(
        r"today a request comes where the log has a compaction \(hidden outputs\) \(entry \d+\)",
        differences(await replayed(tmp_path))[0],
    )


async def stopped(tmp_path: Path, tool: str, last: Say) -> None:
    """Run a session with three turns of 4,500 tokens, another one with calls that is cancelled during the answer or
    summary `last`, and a short one."""
    calls = tuple(call(tool, f"c{number}", path=str(number)) for number in range(3))
    model = RecordingModel(
        *[Say(text=("w " * 4_500,))] * 3, Say(calls=calls), last, otherwise=lambda _: Say(text=("Done.",))
    )
    async with opened(tmp_path, model, tools=TOOLS, mode="auto") as one, anyio.create_task_group() as tasks:
        for _ in range(3):
            await one.session.prompt(text("q w " * 2_200))
        tasks.start_soon(one.session.prompt, text("Look."))
        await last.reached.wait()
        one.session.cancel()
        await one.session.prompt(text("Go on."))
        assert [end.stop for end in one.client.stored(TurnEnd)][3:] == ["cancelled", "end_turn"]
        assert len(one.client.stored(Checkpoint)) == (tool == "long")


async def test_a_compaction_that_was_stopped_is_no_difference(tmp_path: Path) -> None:
    """Nothing of it is in the log, and the next turn compacts with the same numbers."""
    await stopped(tmp_path, "long", Say(text=("## Goal",), hold=anyio.Event()))
    assert identical(await replayed(tmp_path)) == 5


@pytest.mark.parametrize(("answer", "logged"), [("", "a request without an answer"), ("It is ", "an answer")])
async def test_a_compaction_in_place_of_a_request_that_was_stopped_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, logged: str
) -> None:
    await stopped(tmp_path, "quick", Say(text=(answer,), hold=anyio.Event()))
    assert identical(await replayed(tmp_path)) == 6
    monkeypatch.setattr(budget, "_THRESHOLD", 0.59)
    found = differences(await replayed(tmp_path))
    assert re.fullmatch(rf"today a compaction \(summary\) comes where the log has {logged} \(entry \d+\)", found[0])


async def test_a_compaction_in_place_of_a_request_that_failed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RecordingModel(*[Say(text=("w " * 4_500,))] * 3, Say(error=ModelError("refused")))
    async with opened(tmp_path, model) as one:
        for _ in range(3):
            await one.session.prompt(text("q w " * 2_200))
        with pytest.raises(ModelError):
            await one.session.prompt(text("Look."))
    assert identical(await replayed(tmp_path)) == 4
    monkeypatch.setattr(budget, "_THRESHOLD", 0.55)
    found = differences(await replayed(tmp_path))
    assert found[0].endswith("comes where the log has a request without an answer (entry 12)")


@pytest.mark.parametrize("records_refused", [False, True])
async def test_a_compaction_after_a_new_start_has_the_window_of_the_settings(
    tmp_path: Path, *, records_refused: bool
) -> None:
    """The process that ended had learned a smaller window, and the next one learns it only after a compaction."""
    long, summary = Say(text=("w " * 4_500,)), Say(text=("## Goal\nA nest.",))
    longer = Say(text=("w " * 30_000,), usage=Usage(input_tokens=1_000, output_tokens=15_000))
    refused = Say(error=ContextOverflow("too long", limit=12_000, size=12_500))
    starts = ((None, 3, (long, long, refused, summary, longer)), ("s1", 1, (summary, refused, summary, long)))
    compactions = []
    for session, prompts, answers in starts:
        model = RecordingModel(*answers, records_refused=records_refused)
        async with opened(tmp_path, model, session_id=session) as one:
            for _ in range(prompts):
                await one.session.prompt(text("q w " * 2_200))
            compactions += [(body.reason, body.window) for body in one.client.stored(Checkpoint)]
    # The first window depends on the length of the directory, which is in the system message.
    assert [reason for reason, _ in compactions] == ["overflow", "threshold", "overflow"]
    assert compactions[0][1] < 12_000
    assert [window for _, window in compactions[1:]] == [20_000, 11_250]
    assert identical(await replayed(tmp_path)) == 4 + 2 * records_refused


async def test_another_shortening_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def huge(path: str) -> str:
        return f"{path} {WORDS}" * 100

    model = RecordingModel(Say(calls=(call("huge", path="a"),)), Say(text=("Done.",)))
    async with opened(tmp_path, model, tools={"huge": Tool("read", huge)}) as one:
        await one.session.prompt(text("Look."))
    assert identical(await replayed(tmp_path)) == 2
    monkeypatch.setattr(calls_module, "_CUT_CHARS", 5_000)
    (found,) = differences(await replayed(tmp_path))
    assert re.fullmatch(
        r"the result of huge \(entry \d+\) is made differently today: message 4 of 4 differs: the shortened result of "
        r"huge \(entry \d+\) \([\d,]+ bytes today, [\d,]+ then; sent by this version of crow\)",
        found,
    )


async def test_another_reminder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecordingModel(*[Say(text=("Done.",))] * 3)
    async with opened(tmp_path, model, mode="auto") as one:
        await one.session.prompt(text("Look."))
        await set_mode(one.session.branch, "plan")
        await one.session.prompt(text("Plan."))
        await set_mode(one.session.branch, "ask")
        await one.session.prompt(text("Go on."))
    assert identical(await replayed(tmp_path)) == 3
    monkeypatch.setitem(prompt.MODES, "plan", "Mode plan: look, and change nothing.")
    (found,) = differences(await replayed(tmp_path))
    assert re.fullmatch(
        r"a reminder \(entry \d+\) is made differently today: message 4 of 4 differs: a prompt, with the text that "
        r"crow joined to it \(entry \d+\) \([\d,]+ bytes today, [\d,]+ then; sent by this version of crow\)",
        found,
    )


async def test_another_rule_about_repetition_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecordingModel(*[Say(calls=(call("quick", path="a"),))] * 30)
    async with opened(tmp_path, model, tools=TOOLS, mode="auto") as one:
        assert await one.session.prompt(text("Look.")) == "max_turn_requests"
    assert identical(await replayed(tmp_path)) == 30
    monkeypatch.setattr(news, "_POINT_OUT", frozenset({10, 20}))
    assert differences(await replayed(tmp_path)) == ["today a request comes where the log has a reminder (entry 14)"]
    monkeypatch.setattr(news, "_POINT_OUT", frozenset({3, 10, 20}))
    monkeypatch.setattr(news, "_GIVE_UP", 31)
    assert differences(await replayed(tmp_path)) == [
        "today a request comes where the log has the end of the turn (max_turn_requests) (entry 99)"
    ]


async def test_a_turn_that_ends_before_its_last_request_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Say(hold=anyio.Event())
    model = RecordingModel(*[Say(calls=(call("quick", path="a"),))] * 9, cut)
    async with opened(tmp_path, model, tools=TOOLS, mode="auto") as one, anyio.create_task_group() as tasks:
        tasks.start_soon(one.session.prompt, text("Look."))
        await cut.reached.wait()
        one.session.cancel()
    assert identical(await replayed(tmp_path)) == 10
    monkeypatch.setattr(news, "_GIVE_UP", 9)
    (found,) = differences(await replayed(tmp_path))
    assert re.fullmatch(
        r"today the end of the turn \(max_turn_requests\) comes where the log has a request without an answer "
        r"\(entry \d+\)",
        found,
    )


async def test_results_across_an_edit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run at once in the log, and one after the other today."""
    written = anyio.Event()

    async def write(path: str) -> str:
        written.set()
        return path

    async def read(path: str) -> str:
        await written.wait()
        return path

    calls = (call("slow", "c0", path="a"), call("write_file", "c1", path="b"))
    model = RecordingModel(Say(calls=calls), Say(text=("Done.",)))
    tools = {"slow": Tool("read", read), "write_file": Tool("write", write)}
    async with opened(tmp_path, model, tools=tools, mode="auto") as one:
        await one.session.prompt(text("Look."))
    (found,) = differences(await replayed(tmp_path))
    assert re.fullmatch(
        r"today the result of slow \(entry \d+\) comes earlier than in the log",
        found,
    )


async def test_limits_hooks_and_another_model_take_part_as_in_the_log(tmp_path: Path) -> None:
    again = iter(["Check it."])

    def ask_again(event: dict[str, Any]) -> object:
        return {"prompt": text} if (text := next(again, "")) else None

    def change(event: dict[str, Any]) -> object:
        return {"arguments": {"path": "other"}} if event["tool"] == "slow" else {"deny": "Not now."}

    hooks = python_hooks(
        {"turn_end": [ask_again], "before_tool": [change], "before_request": [lambda _: {"context": "It rains."}]}
    )
    spare = RecordingModel(otherwise=lambda _: Say(text=("Here is the spare.",)), info=SPARE)
    model = RecordingModel(
        Say(calls=(call("quick", "c0", path="a"), call("slow", "c1", path="b"))),
        Say(text=("Done.",)),
        Say(text=("Checked.",)),
        Say(error=NetworkError("down")),
        *[Say(calls=(call("quick", path=str(number)),)) for number in range(9)],
    )
    async with opened(
        tmp_path, model, tools=TOOLS, mode="auto", hooks=hooks, others={"spare": spare}, fallback="spare", steps=4
    ) as one:
        await one.session.prompt(text("Build a nest."))
        await one.session.prompt(text("Is it there?"))
        assert await one.session.prompt(text("And now?")) == "max_turn_requests"
    assert identical(await replayed(tmp_path)) == 9


async def test_a_request_that_was_too_long_is_compacted_again(tmp_path: Path) -> None:
    reply, errors = _long_turns(), iter([ContextOverflow("too long", limit=9_000, size=9_500)])
    model = RecordingModel(
        otherwise=lambda request: (
            Say(error=next(errors)) if len(model.requests) == 7 and request.tool_choice != "none" else reply(request)
        )
    )
    async with opened(tmp_path, model, tools=TOOLS, mode="auto") as one:
        for number in range(5):
            await one.session.prompt(text(f"Part {number}. {WORDS}"))
        reasons = [body.reason for body in (*one.client.stored(Checkpoint), *one.client.stored(Mask))]
        assert "overflow" in reasons
    assert identical(await replayed(tmp_path)) >= 14


async def test_a_summary_that_was_written_early_is_used_again(tmp_path: Path) -> None:
    long = [Say(text=("a" * 6_000,))] * 4
    model = RecordingModel(*long, Say(text=("## Goal\nA nest.",)), Say(text=("Done.",)), Say(text=("Bye.",)))
    async with opened(tmp_path, model, compaction=CompactionPolicy(early=0.6)) as one:
        one.session.conversation.rest_s = 0.0
        for _ in long:
            await one.session.prompt(text("q" * 6_000))
        while "ModelRequest" not in await one.kinds():
            await anyio.lowlevel.checkpoint()
        await one.session.prompt(text("Go on."))
        await one.session.prompt(text("Bye."))
        assert [checkpoint.reason for checkpoint in one.client.stored(Checkpoint)] == ["early"]
    assert identical(await replayed(tmp_path)) == 6


@pytest.mark.parametrize(
    "limits",
    [
        {"window": 10**30, "calibration": 1.0},
        {"window": "20000", "calibration": 1.0},
        {"window": 20_000, "calibration": -1},
        {"window": 1, "calibration": 1.0, "threshold": 5.0, "target": -1.0, "keep_tokens": 0, "output": -5},
        {"window": 20_000, "calibration": 0.02, "threshold": 10**9, "cautious": [], "configured": 3, "manual": "no"},
    ],
)
async def test_a_hostile_record_does_not_stop_the_replay(tmp_path: Path, limits: dict[str, Any]) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    await store.create_session(new_session("s1"))
    await begin(store, "s1", "Look.")
    sent = SentRequest(digest="0" * 32, size=9, endpoint=INFO.endpoint, limits=limits)
    prompt = Prompt(system="s", tools=(), cwd="/repo", model="m1", recorded_here=True)
    calls = (ToolCall(id="c0", name="read_file", arguments="{}"),)
    (_, answer) = await add(store, "s1", prompt, Assistant(text="", message_id="a1", calls=calls, sent=sent))
    done = Assistant(text="Done.", message_id="a2", sent=sent)
    await add(store, "s1", result(answer.id, WORDS * 100), done, TurnEnd(stop="end_turn"), release=True)
    await store.close()
    assert [each.outcome for each in await replayed(tmp_path)] == ["different"] * 2


async def test_a_compaction_in_place_of_an_answer_that_a_kill_broke_off_is_no_difference(tmp_path: Path) -> None:
    """Its entry has no record, so nobody knows which window counted."""
    store = await SqliteStore.open(tmp_path / "crow.db")
    await store.create_session(new_session("s1"))
    limits = {"window": 18_000, "calibration": 1.0}
    sent = SentRequest(digest="0" * 32, size=9, endpoint=INFO.endpoint, limits=limits)
    prompt = Prompt(system="s", tools=(), cwd="/repo", model="m1", recorded_here=True)
    for number in range(3):
        await begin(store, "s1", f"{number} " + "q w " * 2_200)
        said = Assistant(text="w " * 4_500, message_id=f"a{number}", sent=sent)
        await add(
            store,
            "s1",
            *([prompt] if number == 0 else []),
            said,
            TurnEnd(stop="end_turn"),
            turn=number + 1,
            release=True,
        )
    await begin(store, "s1", "Look.")
    calls = (ToolCall(id="c0", name="read_file", arguments="{}"),)
    (answer,) = await add(store, "s1", Assistant(text="", message_id="a3", calls=calls, sent=sent), turn=4)
    half = Assistant(text="It is", message_id="a4", finish="interrupted")
    rest = (result(answer.id, "t " * 6_000), half, TurnEnd(stop="interrupted"))
    await add(store, "s1", *rest, turn=4, release=True)
    await store.close()
    *before, last = await replayed(tmp_path)
    assert [each.words.startswith("today") for each in before] == [False] * 4
    assert (last.outcome, "crow was stopped" in last.words) == ("unproven", True)


async def test_a_replay_writes_and_runs_nothing(tmp_path: Path) -> None:
    """Whatever the calls in the log are: their results come from the log."""
    victim = tmp_path / "victim.txt"
    victim.write_text("safe\n")
    calls = [
        call("write_file", "c0", path=str(victim), content="gone"),
        call("shell", "c1", command=f"rm {victim}", access="full"),
        call("../../etc/passwd\x00", "c2", path=f"{'../' * 30}{victim}"),
        ToolCall(id="c" * 100_000, name="x" * 100_000, arguments="{" * 100_000),
    ]

    async def done(**_: str) -> str:
        return "done " * 500_000

    model = RecordingModel(Say(calls=tuple(calls)), Say(text=("Done.",)), info=replace(INFO, context_window=10**6))
    tools = {each.name: Tool("external", done, is_barrier=each.name == "write_file") for each in calls[:3]}
    async with opened(tmp_path, model, tools=tools, mode="auto") as one:
        await one.session.prompt(text("Do it."))
    before = files_in(tmp_path)
    assert identical(await replayed(tmp_path)) == 2
    assert victim.read_text() == "safe\n"
    assert files_in(tmp_path) - before <= {tmp_path / "scratch"}

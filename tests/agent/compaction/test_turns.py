"""Tests compaction within whole turns on a real store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from crow.agent.compaction.budget import CompactionPolicy, limits_for
from crow.agent.compaction.summary import DATA
from crow.agent.history.options import set_option
from crow.domain.entries import Assistant, Checkpoint, Command, ModelRequest, Remark, ToolResult, User
from crow.domain.errors import BadRequest, ContextOverflow
from crow.domain.events import ContextMeasured
from crow.domain.messages import Text, Usage, UserMessage
from crow.domain.tokens import estimate_text
from crow.llm import ModelInfo, Request
from crow.llm.facts import LearnedWindow, learned_window
from tests.agent.harness import Opened, Tool, opened, text
from tests.support.compaction import SUMMARY, AnsweringModel
from tests.support.scripted_model import Say, ScriptedModel, call

TINY = ModelInfo(name="tiny", endpoint="test tiny", context_window=16_000)
ROOMY = replace(TINY, context_window=64_000)
LONG = Say(text=["a" * 8_000])
GOOD = Say(text=[SUMMARY])


async def checkpoints(run: Opened) -> list[Checkpoint]:
    return [entry.body for entry in await run.log() if isinstance(entry.body, Checkpoint)]


async def talked(run: Opened, exchanges: int) -> None:
    for _ in range(exchanges):
        await run.session.prompt(text("q" * 8_000))


async def test_prompt_that_does_not_fit_is_stored_before_the_context_is_compacted(
    tmp_path: Path,
) -> None:
    model = ScriptedModel(LONG, LONG, LONG, GOOD, Say(text=["done"]), info=TINY)
    async with opened(tmp_path, model) as run:
        await talked(run, 4)
        kinds = [kind for kind in await run.kinds() if kind != "Reminder"]
        assert kinds[-5:] == ["User", "ModelRequest", "Checkpoint", "Assistant", "TurnEnd"]
        (checkpoint,) = await checkpoints(run)
        assert (checkpoint.summary, checkpoint.reason) == (SUMMARY, "threshold")
        measured = [event.used for event in run.client.events if isinstance(event, ContextMeasured)]
        assert len(measured) == 5  # after each answer, and after the compaction
        assert measured[3] == checkpoint.tokens_after < measured[2]


async def test_later_step_of_a_turn_makes_room_for_itself(tmp_path: Path) -> None:
    async def read(**_: object) -> str:
        return "x" * 8_000

    asked = Say(text=["a" * 4_000], calls=(call("read"),))
    model = ScriptedModel(*[asked] * 5, GOOD, Say(text=["done"]), info=TINY)
    async with opened(tmp_path, model, tools={"read": Tool("read", read)}) as run:
        assert await run.session.prompt(text("q" * 20_000)) == "end_turn"
        kinds = await run.kinds()
        assert {"Mask", "Checkpoint"} & set(kinds)
        assert kinds[-2:] == ["Assistant", "TurnEnd"]


async def learned(run: Opened, base_url: str, model: str) -> LearnedWindow | None:
    return learned_window(await run.store.learned(base_url, model))


async def test_refused_request_is_compacted_and_sent_again_and_the_window_learned(tmp_path: Path) -> None:
    refused = Say(error=ContextOverflow("too long", limit=6_000))
    model = ScriptedModel(LONG, refused, GOOD, Say(text=["done"]), info=TINY)
    async with opened(tmp_path, model) as run:
        await talked(run, 2)
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["overflow"]
        known = await learned(run, "test", "tiny")
        assert known is not None
        assert (known.tokens, known.times, known.session) == (6_000, 1, "s1")
        await run.session.prompt(text("/context"))
        shown = run.client.stored(Command)[-1].answer
        assert "Crow learned a window of 6,000 tokens on " in shown
        assert "from a refused request of about 6," in shown
        assert ': "too long". Crow uses it only to decide when to compact.' in shown
        await run.session.prompt(text("/context forget"))
        assert run.client.stored(Command)[-1].answer.startswith(
            f"Dropped the window of 6,000 tokens that crow learned on {known.learned_on}."
        )
        assert await learned(run, "test", "tiny") is None
        await run.session.prompt(text("/context forget"))
        assert run.client.stored(Command)[-1].answer.startswith(
            "Crow has learned nothing about the context window of tiny."
        )
        await run.session.prompt(text("/context drop"))
        assert run.client.stored(Command)[-1].answer == "`/context drop`: expected no argument, or `forget`."


async def test_overflow_in_the_middle_of_an_answer_keeps_the_shown_text_and_continues(
    tmp_path: Path,
) -> None:
    broken = Say(text=["The first half"], error=ContextOverflow("the window is full"))
    model = ScriptedModel(LONG, broken, GOOD, Say(text=[" and the second."]), info=TINY)
    async with opened(tmp_path, model) as run:
        await talked(run, 2)
        said = [(entry.body.text, entry.body.finish) for entry in await run.log() if isinstance(entry.body, Assistant)]
        assert said[1:] == [("The first half", "interrupted"), (" and the second.", "stop")]
        assert run.client.shown().endswith("The first half and the second.")
        assert len(await checkpoints(run)) == 1


async def test_without_auto_compaction_a_refused_request_fails_the_prompt(tmp_path: Path) -> None:
    refused = Say(error=ContextOverflow("The request is too long.", limit=9_000))
    model = ScriptedModel(*[LONG] * 4, refused, info=TINY)
    async with opened(tmp_path, model, compaction=CompactionPolicy(auto=False)) as run:
        await talked(run, 4)
        with pytest.raises(ContextOverflow, match="too long"):
            await talked(run, 1)
        assert len(model.requests) == 5
        assert await checkpoints(run) == []


async def test_switch_to_a_smaller_window_compacts_the_context_to_fit(tmp_path: Path) -> None:
    large = ModelInfo(name="large", endpoint="test large", context_window=64_000)
    async with opened(tmp_path, ScriptedModel(*[LONG] * 5, info=large)) as run:
        await talked(run, 5)
        assert await checkpoints(run) == []
    async with opened(tmp_path, ScriptedModel(GOOD, Say(text=["done"]), info=TINY), session_id="s1") as run:
        await run.session.prompt(text("go on"))
        (checkpoint,) = await checkpoints(run)
        assert (checkpoint.reason, checkpoint.summary) == ("model", SUMMARY)
        assert checkpoint.tokens_before > 12_800 > checkpoint.tokens_after


async def test_silent_truncation_is_detected_and_the_window_respected(tmp_path: Path) -> None:
    unknown = ModelInfo(name="m", endpoint="http://localhost m")
    says = [Say(text=["a" * 8_000], usage=Usage(input_tokens=tokens)) for tokens in (2_000, 6_000, 8_192, 8_192, 8_192)]
    model = ScriptedModel(*says, GOOD, Say(text=["done"], usage=Usage(input_tokens=3_000)), info=unknown)
    async with opened(tmp_path, model) as run:
        await talked(run, 5)
        assert await checkpoints(run) == []
        await run.session.prompt(text("go on"))
        assert len(await checkpoints(run)) == 1
        known = await learned(run, "http://localhost", "m")
        assert known is not None
        assert (known.tokens, known.is_silent, known.session) == (8_192, True, "s1")
        measured = [event for event in run.client.events if isinstance(event, ContextMeasured)]
        assert measured[-1].size == 8_192
        assert measured[-1].used < 0.85 * 8_192


async def test_huge_prompt_is_stored_whole_and_the_model_sees_head_and_tail(tmp_path: Path) -> None:
    pasted = "值" * 60_000
    model = ScriptedModel(Say(text=["I see."]), Say(text=["Yes."]), info=TINY)
    async with opened(tmp_path, model) as run:
        await run.session.prompt(text(f"Look at this:\n{pasted}"))
        (body,) = [entry.body for entry in await run.log() if isinstance(entry.body, User)]
        assert isinstance(body.parts[0], Text)
        assert body.parts[0].text == f"Look at this:\n{pasted}"
        assert body.cut is not None
        sent = repr(model.requests[0].messages[1])
        assert sent.count("值") <= body.cut < 4_000
        assert "recall with entry" in sent
        (remark,) = [entry.body for entry in await run.log() if isinstance(entry.body, Remark)]
        assert remark.text.startswith(
            "This prompt has 60,014 characters, which is too much for the model's context window of 16,000 tokens. The "
            f"model sees about {body.cut:,} of them"
        )
        await run.session.prompt(text("Again, briefly."))
        assert [entry.body for entry in await run.log() if isinstance(entry.body, Remark)] == [remark]


async def test_results_of_one_step_share_the_room_whatever_their_script(tmp_path: Path) -> None:
    async def read(**_: object) -> str:
        return "值" * 20_000

    calls = tuple(call("read", f"c{number}") for number in range(4))
    model = ScriptedModel(Say(calls=calls), Say(text=["done"]), info=TINY)
    async with opened(tmp_path, model, tools={"read": Tool("read", read)}) as run:
        await run.session.prompt(text("read"))
        results = [entry.body for entry in await run.log() if isinstance(entry.body, ToolResult)]
        assert [len(body.text) for body in results] == [20_000] * 4
        assert sum(body.cut or 20_000 for body in results) * estimate_text("值") <= 12_800 // 2


async def test_cancel_while_the_summary_is_written_answers_cancelled_and_keeps_the_prompt(tmp_path: Path) -> None:
    held = Say(hold=anyio.Event())
    model = ScriptedModel(LONG, LONG, LONG, held, GOOD, Say(text=["done"]), info=TINY)
    stops: list[str] = []
    async with opened(tmp_path, model) as run:
        await talked(run, 3)

        async def prompt() -> None:
            stops.append(await run.session.prompt(text("q" * 8_000)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await held.reached.wait()
            run.session.cancel()
        assert stops == ["cancelled"]
        assert await checkpoints(run) == []
        users = [entry.body for entry in await run.log() if isinstance(entry.body, User)]
        assert len(users) == 4
        assert await run.session.prompt(text("again")) == "end_turn"
        assert len(await checkpoints(run)) == 1


async def test_prompt_that_arrives_during_a_compaction_is_answered_after_it(tmp_path: Path) -> None:
    released = anyio.Event()
    held = Say(text=[SUMMARY], hold=released)
    model = ScriptedModel(LONG, LONG, LONG, held, Say(text=["one"]), Say(text=["two"]), info=TINY)
    async with opened(tmp_path, model) as run:
        await talked(run, 3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("q" * 8_000))
            await held.reached.wait()
            tasks.start_soon(run.session.prompt, text("And another thing."))
            while len(await run.store.queued("s1")) != 1:
                await anyio.lowlevel.checkpoint()
            released.set()
        said = [entry.body.text for entry in await run.log() if isinstance(entry.body, Assistant)]
        assert said[-2:] == ["one", "two"]
        assert "And another thing." in repr(model.requests[-1].messages[-1])


async def test_finishing_a_turn_never_compacts(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["a" * 60_000]), info=TINY)
    async with opened(tmp_path, model) as run:
        assert await run.session.prompt(text("write much")) == "end_turn"
        assert await checkpoints(run) == []


async def test_compact_and_its_undo_are_commands_and_context_shows_what_fills_the_window(tmp_path: Path) -> None:
    model = ScriptedModel(LONG, LONG, GOOD, info=TINY)
    async with opened(tmp_path, model) as run:
        await talked(run, 2)
        before = run.session.branch.context().messages
        await run.session.prompt(text("/compact the parser"))
        await run.session.prompt(text("/context"))
        await run.session.prompt(text("/compact undo"))
        assert run.session.branch.context().messages[1:] == before[1:]
        compacted, shown, undone = [entry.body for entry in await run.log() if isinstance(entry.body, Command)]
        assert compacted.answer.startswith("Compacted to a summary: ")
        assert undone.answer.startswith("Undone: ")
        lines = shown.answer.splitlines()
        assert lines[0].startswith("Context of tiny: about ")
        assert [line.split()[-1] for line in lines if "%" in line] == [
            "it", "system", "tools", "summary", "user", "assistant", "output", "│)",
        ]  # fmt: skip


async def test_configured_instruction_replaces_the_summary_prompt(tmp_path: Path) -> None:
    settings = CompactionPolicy(instruction="Summarise in {words} words.")
    model = ScriptedModel(LONG, LONG, LONG, GOOD, Say(text=["done"]), info=TINY)
    async with opened(tmp_path, model, compaction=settings) as run:
        await talked(run, 4)
        (asked,) = model.requests[3].messages[-1:]
        # The system message names the working directory, so its length is not always the same.
        fixed, window = run.session.branch.context().fixed_estimate, TINY.context_window
        assert window is not None
        words = limits_for(window, TINY.max_output_tokens, fixed, settings).summary // 2
        assert asked == UserMessage(parts=(Text(text=f"Summarise in {words} words.\n\n{DATA}"),))


@pytest.mark.long
@pytest.mark.parametrize("window", [16_000, 32_000, 128_000])
async def test_a_turn_whose_every_call_has_huge_arguments_goes_on(tmp_path: Path, window: int) -> None:
    written: list[str] = []

    async def write(*, content: str) -> str:
        written.append(content)
        return "Written."

    contents = [f"{number} " * 300_000 for number in range(6)]
    script = iter([*(Say(calls=(call("write", content=content),)) for content in contents), Say(text=["done"])])
    info = ModelInfo(name="tiny", endpoint="test tiny", context_window=window, is_window_configured=True)

    def answered(request: Request) -> Say:
        return (
            GOOD if isinstance(asked := request.messages[-1], UserMessage) and "[crow]" in str(asked) else next(script)
        )

    model = AnsweringModel(answered, info)
    async with opened(tmp_path, model, tools={"write": Tool("write", write)}, mode="auto") as run:
        assert await run.session.prompt(text("Write them.")) == "end_turn"
        assert written == contents
        stored = [entry.body.calls for entry in await run.log() if isinstance(entry.body, Assistant)]
        assert [json.loads(one.arguments)["content"] for calls in stored for one in calls] == contents


async def test_summary_is_asked_for_with_the_thought_level_of_the_session(tmp_path: Path) -> None:
    model = ScriptedModel(LONG, LONG, LONG, GOOD, Say(text=["done"]), info=TINY)
    async with opened(tmp_path, model) as run:
        await set_option(run.session.branch, "thought_level", "high")
        await talked(run, 4)
        assert len(await checkpoints(run)) == 1
        assert [request.thought_level for request in model.requests] == ["high"] * 5


async def test_large_request_refused_without_a_reason_is_compacted_and_sent_again_once(tmp_path: Path) -> None:
    refused = Say(error=BadRequest("The endpoint does not accept the request: HTTP 400.", is_unclear=True))
    model = ScriptedModel(*[LONG] * 3, refused, GOOD, Say(text=["done"]), info=ROOMY)
    async with opened(tmp_path, model) as run:
        await talked(run, 3)
        assert await run.session.prompt(text("q" * 16_000)) == "end_turn"
        assert len(await checkpoints(run)) == 1
    small = ScriptedModel(refused, info=ROOMY)
    (tmp_path / "small").mkdir()
    async with opened(tmp_path / "small", small) as run:
        with pytest.raises(BadRequest, match="HTTP 400"):
            await run.session.prompt(text("hi"))


async def test_attempts_before_a_refusal_without_a_reason_count(tmp_path: Path) -> None:
    spent = Usage(input_tokens=5_000, output_tokens=7)
    error = BadRequest("The endpoint does not accept the request: HTTP 400.", is_unclear=True)
    model = ScriptedModel(*[LONG] * 3, Say(error=error, usage=spent), GOOD, Say(text=["done"]), info=ROOMY)
    async with opened(tmp_path, model) as run:
        await talked(run, 3)
        assert await run.session.prompt(text("q" * 16_000)) == "end_turn"
        requests = [entry for entry in await run.log() if entry.body == ModelRequest(purpose="answer")]
        assert [entry.usage for entry in requests] == [spent]


async def test_request_refused_twice_without_a_reason_fails_with_the_words(tmp_path: Path) -> None:
    refused = Say(error=BadRequest("The endpoint does not accept the request: HTTP 400.", is_unclear=True))
    model = ScriptedModel(*[LONG] * 3, refused, GOOD, refused, info=ROOMY)
    async with opened(tmp_path, model) as run:
        await talked(run, 3)
        with pytest.raises(BadRequest, match="HTTP 400"):
            await run.session.prompt(text("q" * 40_000))
        assert len(await checkpoints(run)) == 1


async def test_answer_that_ends_with_an_unclear_error_keeps_the_shown_text(tmp_path: Path) -> None:
    error = BadRequest("The endpoint does not accept the request: HTTP 400.", is_unclear=True)
    model = ScriptedModel(*[LONG] * 3, Say(text=["shown"], error=error), GOOD, Say(text=["done"]), info=ROOMY)
    async with opened(tmp_path, model) as run:
        await talked(run, 3)
        with pytest.raises(BadRequest, match="HTTP 400"):
            await run.session.prompt(text("q" * 16_000))
        answers = [entry.body for entry in await run.log() if isinstance(entry.body, Assistant)]
        assert (answers[-1].text, answers[-1].finish) == ("shown", "interrupted")

"""MCP servers use the session's model: only if the user allows it, and within limits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_types import CreateMessageRequestParams

from crow.agent import PermissionAnswer
from crow.domain.entries import Announcement, CallRef, ModelRequest, ToolResult
from crow.domain.errors import ArgumentError, NetworkError
from crow.domain.events import EntryStored
from crow.domain.messages import AssistantMessage, Image, SystemMessage, Text, Usage, UserMessage
from crow.store import SessionChanges
from crow.tools.mcp.client import open_toolbox
from crow.tools.mcp.sampling import RunningCall, sampling_request
from crow.tools.process import HiddenKeys
from crow.tools.servers import ServerOptions
from tests.agent.harness import NoteTaker, Opened, opened, text
from tests.support.scripted_model import Say, ScriptedModel, call
from tests.tools.conftest import stdio

ERAS = pytest.mark.parametrize("era", ["classic", "modern"])
USED = Usage(input_tokens=30, output_tokens=4)
QUESTION = {"role": "user", "content": {"type": "text", "text": "What is it?"}}
REJECTED = {"code": -1, "message": "The user did not allow this request."}


async def ask(
    tmp_path: Path,
    *says: Say,
    answers: tuple[PermissionAnswer, ...] = (),
    tool: str = "ask_model",
    era: str = "classic",
    mode: str = "ask",
    options: ServerOptions | None = None,
    rule: dict[str, object] | None = None,
    **arguments: Any,
) -> tuple[Opened, ScriptedModel, Any]:
    """Let a server ask the model. Returns the session, the model and what the server was told. `answers` are those
    about the server's requests."""
    model = ScriptedModel(Say(calls=(call(f"docs__{tool}", **arguments),)), *says, Say(text=["Done."]))
    server = stdio("library.py", era, name="docs", options=options or ServerOptions())
    client = NoteTaker("allow_once", *answers)
    async with opened(tmp_path, model, client=client, mode=mode, servers=[server], open_tools=open_toolbox) as run:
        if rule is not None:
            await run.session.branch.change(SessionChanges(permissions=(rule,)))
        await run.session.prompt(text("go"))
    (result,) = client.stored(ToolResult)
    try:
        return run, model, json.loads(result.text)
    except ValueError:
        return run, model, result.text


def answered(told: Any) -> Any:
    return told.get("answer", told)


@ERAS
async def test_the_model_answers_a_server_that_the_user_allows(tmp_path: Path, era: str) -> None:
    run, model, told = await ask(
        tmp_path,
        Say(text=["A ", "crow."], usage=USED),
        era=era,
        messages=[
            QUESTION,
            {"role": "user", "content": {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}},
            {"role": "assistant", "content": {"type": "text", "text": "A bird."}},
            {"role": "user", "content": {"type": "text", "text": "Which?"}},
        ],
        systemPrompt="Be brief.",
        includeContext="allServers",
    )
    content = {"type": "text", "text": "A crow."}
    assert answered(told) == {"role": "assistant", "content": content, "model": "scripted", "stopReason": "endTurn"}
    request = model.requests[1]
    picture = Image(data="iVBORw0KGgo=", mime_type="image/png")
    assert request.messages == (
        SystemMessage(text="Be brief."),
        UserMessage(parts=(Text(text="What is it?"), picture)),
        AssistantMessage(text="A bird."),
        UserMessage(parts=(Text(text="Which?"),)),
    )
    assert (request.tools, request.max_output_tokens) == ((), 100)
    about_tool, about_model = run.client.questions
    assert (about_model.call, about_model.name) == (about_tool.call, "docs__ask_model")
    assert about_model.plan.announcement == about_tool.plan.announcement
    assert about_model.plan.review_text == (
        "At most 100 tokens.\nsystem: Be brief.\nuser: What is it?\n[a picture]\nassistant: A bird.\nuser: Which?"
    )
    assert about_model.always == "requests of `docs` to your model in this directory and session"
    counted = [
        (event.entry.usage, event.entry.model)
        for event in run.client.events
        if isinstance(event, EntryStored) and event.entry.body == ModelRequest(purpose="sampling")
    ]
    assert counted == [(USED, "scripted")]
    assert model.requests[2].messages[: len(model.requests[0].messages)] == model.requests[0].messages


async def test_a_server_of_the_older_protocol_gets_the_progress_that_it_asked_for(tmp_path: Path) -> None:
    _, _, told = await ask(tmp_path, Say(text=["A crow."]))
    assert told["progress"] == [{"progressToken": "p", "progress": 7.0}]


@pytest.mark.long
@ERAS
async def test_a_rejected_request_never_reaches_the_model(tmp_path: Path, era: str) -> None:
    answers: tuple[PermissionAnswer, ...] = ("reject_once", "cannot_ask", "unanswered", "reject_always")
    says = [Say(calls=(call("docs__ask_model", f"c{number}"),)) for number, _ in enumerate(answers)]
    model = ScriptedModel(*(each for say in says for each in (say, Say(text=["Done."]))))
    client = NoteTaker(*(each for answer in answers for each in ("allow_once", answer)))  # first about the tool
    server = stdio("library.py", era, name="docs")
    async with opened(tmp_path, model, client=client, servers=[server], open_tools=open_toolbox) as run:
        for number, answer in enumerate(answers, 1):
            await run.session.prompt(text("go"))
            told = client.stored(ToolResult)[-1].text
            if era == "classic":
                assert answered(json.loads(told)) == REJECTED, answer
            else:
                assert told == "MCP server docs refused ask_model: The user did not allow this request.", answer
            assert (len(model.requests), len(client.questions)) == (2 * number, 2 * number), answer
            rules = [rule["tool"] for rule in run.session.branch.row.permissions]
            assert rules == (["sampling"] if answer == "reject_always" else [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "read_only", "rule", "asked", "is_answered"),
    [
        ("plan", ("ask_model",), None, ["docs__ask_model"], False),
        ("plan", ("*",), None, ["docs__ask_model", "sampling"], True),
        ("plan", ("ask_*", "sampling"), None, ["docs__ask_model", "sampling"], True),
        ("auto", (), {"tool": "sampling", "argument": "docs", "allow": False}, ["docs__ask_model"], False),
        ("auto", (), {"tool": "sampling", "argument": None, "allow": False}, ["docs__ask_model"], False),
        ("auto", (), {"tool": "sampling", "argument": "docs", "allow": True}, ["docs__ask_model"], True),
        ("auto", (), {"tool": "docs__*", "argument": None, "allow": True}, ["sampling"], True),
    ],
)
async def test_modes_and_rules_hold_and_rules_about_tools_do_not_cover_requests(
    tmp_path: Path,
    mode: str,
    read_only: tuple[str, ...],
    rule: dict[str, object] | None,
    asked: list[str],
    is_answered: bool,
) -> None:
    says = (Say(text=["Yes."]),) if is_answered else ()
    run, _, told = await ask(tmp_path, *says, mode=mode, options=ServerOptions(read_only=read_only), rule=rule)
    assert ("content" in answered(told)) == is_answered
    assert [question.plan.coverage.rule_tool or question.name for question in run.client.questions] == asked


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"maxTokens": 0}, "maxTokens is 0; expected at least 1"),
    ({"messages": []}, "the request has 0 messages; expected 1 to 200"),
    ({"messages": [QUESTION] * 201}, "the request has 201 messages; expected 1 to 200"),
    ({"systemPrompt": "x" * 100_000}, "the messages have 100,011 characters; expected at most 100,000"),
    (
        {"tools": [{"name": "a", "inputSchema": {"type": "object"}}]},
        "crow does not offer the capability sampling.tools; send the request without tools",
    ),
    ({"stopSequences": ["x"] * 17}, "stopSequences: expected at most 16 texts of 1 to 200 characters"),
    ({"stopSequences": [""]}, "stopSequences: expected at most 16 texts of 1 to 200 characters"),
    (
        {"messages": [{"role": "user", "content": {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}}]},
        "the messages contain audio content that crow cannot use; expected text",
    ),
    (
        {"messages": [{"role": "user", "content": {"type": "image", "data": "?", "mimeType": "image/png"}}]},
        "the messages contain image content that crow cannot use; expected text",
    ),
)
"""Arguments of a request, and what the server is told."""


async def test_a_bad_request_is_refused_without_asking(tmp_path: Path) -> None:
    says = [
        Say(calls=(call("docs__ask_model", f"c{number}", **arguments),)) for number, (arguments, _) in enumerate(BAD)
    ]
    model, client = ScriptedModel(*says, Say(text=["Done."])), NoteTaker()
    server = stdio("library.py", "classic", name="docs")
    async with opened(tmp_path, model, client=client, servers=[server], open_tools=open_toolbox) as run:
        await run.session.prompt(text("go"))
    told = [answered(json.loads(result.text)) for result in client.stored(ToolResult)]
    assert told == [{"code": -32602, "message": message} for _, message in BAD]
    assert (len(client.questions), len(model.requests)) == (len(BAD), len(BAD) + 1)


async def test_a_refusal_with_a_stop_sequence_in_its_text_stays_a_refusal(tmp_path: Path) -> None:
    says = Say(text=["I cannot. END"], finish="refusal")
    _, _, told = await ask(tmp_path, says, stopSequences=["END"])
    assert answered(told) == {"code": -32603, "message": "The model refused to answer."}


async def test_answers_are_cut_at_stop_sequences_and_limits(tmp_path: Path) -> None:
    _, _, told = await ask(tmp_path, Say(text=["one END two STOP"]), stopSequences=["STOP", "END"])
    assert (told["answer"]["content"]["text"], told["answer"]["stopReason"]) == ("one ", "stopSequence")
    (tmp_path / "b").mkdir()
    _, model, told = await ask(tmp_path / "b", Say(text=["long"], finish="length"), maxTokens=1_000_000)
    assert (told["answer"]["stopReason"], model.requests[1].max_output_tokens) == ("maxTokens", 8_192)


async def test_a_failure_of_the_endpoint_tells_the_server_nothing_about_it(tmp_path: Path) -> None:
    _, _, told = await ask(tmp_path, Say(error=NetworkError("https://key@endpoint.example refused")))
    assert told["answer"] == {"code": -32603, "message": "The model did not answer."}


async def test_a_loop_of_requests_ends(tmp_path: Path) -> None:
    rule: dict[str, object] = {"tool": "sampling", "argument": "docs", "allow": True}
    _, model, told = await ask(tmp_path, *[Say(text=["x"])] * 50, tool="ask_often", times=80, rule=rule)
    assert told == {"answered": 50, "A server gets at most 50 answers from the model in one turn.": 30}
    assert len(model.requests) == 52


async def test_after_a_rejection_the_user_is_not_asked_again_in_the_turn(tmp_path: Path) -> None:
    run, _, told = await ask(tmp_path, tool="ask_often", times=20, answers=("reject_once",))
    assert told == {REJECTED["message"]: 20}
    assert len(run.client.questions) == 2


async def test_a_call_about_which_nobody_can_be_asked_does_not_refuse_the_next_one(tmp_path: Path) -> None:
    _, _, told = await ask(
        tmp_path, Say(text=["Twigs."]), tool="ask_often", times=2, answers=("cannot_ask", "allow_once")
    )
    assert told == {REJECTED["message"]: 1, "answered": 1}


async def test_requests_that_wait_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule: dict[str, object] = {"tool": "sampling", "argument": "docs", "allow": True}
    caplog.set_level(logging.INFO, "crow")
    release = anyio.Event()
    hold = Say(text=["x"], hold=release)
    model = ScriptedModel(Say(calls=(call("docs__ask_together", times=300),)), hold, *[Say(text=["x"])] * 16)
    server = stdio("library.py", "classic", name="docs")
    async with opened(tmp_path, model, servers=[server], open_tools=open_toolbox) as run:
        await run.session.branch.change(SessionChanges(permissions=(rule,)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("go"))
            await hold.reached.wait()
            while (caplog.text.count("16 requests wait already")) < 284:  # noqa: ASYNC110 - asked by another process
                await anyio.sleep(0.005)
            release.set()
    (result,) = run.client.stored(ToolResult)
    assert json.loads(result.text) == {"answered": 16, "16 requests wait already": 284}


async def test_a_cancelled_turn_ends_a_request_of_a_server(tmp_path: Path) -> None:
    hold, stops = Say(text=["begun"], hold=anyio.Event(), usage=USED), []
    model = ScriptedModel(Say(calls=(call("docs__ask_model"),)), hold)
    server = stdio("library.py", "classic", name="docs")
    async with opened(tmp_path, model, servers=[server], open_tools=open_toolbox) as run:

        async def prompt() -> None:
            stops.append(await run.session.prompt(text("go")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await hold.reached.wait()
            run.session.cancel()
        assert stops == ["cancelled"]
    assert run.client.stored(ModelRequest) == [ModelRequest(purpose="sampling")]
    assert run.client.questions[1].call == CallRef(assistant=run.client.questions[0].call.assistant, index=0)


async def test_a_server_can_take_back_its_request(tmp_path: Path) -> None:
    never = Say(text=["begun"], hold=anyio.Event(), usage=USED)
    run, model, told = await ask(tmp_path, never, tool="take_back")
    assert told == "taken back"
    assert run.client.stored(ModelRequest) == [ModelRequest(purpose="sampling")]
    assert len(model.requests) == 3


@pytest.mark.parametrize("call_id", [None, "", "call_x"])
def test_a_request_without_a_running_call_is_refused(call_id: str | None) -> None:
    announcement = Announcement(title="docs: a")
    running = None if call_id is None else RunningCall.of(call_id, "docs__a", {}, announcement)
    params = CreateMessageRequestParams.model_validate({"messages": [QUESTION], "maxTokens": 1})
    with pytest.raises(ArgumentError, match="only while it calls a tool of this server"):
        sampling_request(params, running, "docs", "docs", ServerOptions(), HiddenKeys().mask)


def test_secrets_of_the_user_do_not_reach_the_model() -> None:
    mask = HiddenKeys(values=("sk-secret-0123456789",)).mask
    running = RunningCall.of("call_1_0", "docs__a", {}, Announcement(title="docs: a"))
    said = {"role": "user", "content": {"type": "text", "text": "It is sk-secret-0123456789."}}
    raw = {"messages": [said], "maxTokens": 1, "systemPrompt": "sk-secret-0123456789"}
    request = sampling_request(
        CreateMessageRequestParams.model_validate(raw), running, "docs", "docs", ServerOptions(), mask
    )
    hidden = "[secret hidden by crow]"
    assert request.system == hidden
    assert request.messages == (UserMessage(parts=(Text(text=f"It is {hidden}."),)),)


async def test_a_call_of_a_subagent_may_use_the_model_too(tmp_path: Path) -> None:
    model = ScriptedModel(
        Say(calls=(call("task", description="Ask", prompt="Ask the docs."),)),
        Say(calls=(call("docs__ask_model"),)),
        Say(text=["A crow."], usage=USED),
        Say(text=["It is a crow."]),
        Say(text=["Done."]),
    )
    server = stdio("library.py", "classic", name="docs")
    async with opened(tmp_path, model, servers=[server], open_tools=open_toolbox) as run:
        await run.session.prompt(text("go"))
        requests = [entry.usage for entry in await run.log() if isinstance(entry.body, ModelRequest)]
    about_tool, about_model = run.client.questions
    assert (about_tool.name, about_model.plan.coverage.rule_tool) == ("docs__ask_model", "sampling")
    assert about_model.call == about_tool.call
    assert requests == [USED]
    assert [result.text for result in run.client.stored(ToolResult)][-1].startswith("It is a crow.")

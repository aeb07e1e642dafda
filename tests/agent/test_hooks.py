"""Hooks in a session: what they get, refuse, change and add."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.agent.hooks import Effect, Hook, Hooks, effects
from crow.domain.entries import Announcement, Custom, Remark, Started, ToolResult
from crow.domain.errors import TurnError
from crow.domain.events import NoticeShown
from crow.domain.messages import ToolCall
from crow.domain.rendering import parts_text
from crow.llm import Request
from crow.tools import Coverage, PlannedCall, Touched
from tests.agent.harness import NoteTaker, Tool, opened, text
from tests.agent.subagents.test_subagents import Casting, running, task
from tests.support.hooks import python_hooks
from tests.support.scripted_model import Say, ScriptedModel, call

WRITES: tuple[ToolCall, ...] = (
    call("write_file", path="a.txt", content="new"),
    call("edit_file", path="a.txt", old_text="old", new_text="new"),
    call("shell", command="echo new >a.txt", access="write"),
    call("shell", command="echo new >a.txt", access="read"),  # nothing confines commands here
)


def plan(access: Any, **fields: Any) -> PlannedCall:
    return PlannedCall(announcement=Announcement(title="t", kind=fields.pop("kind", "other")), access=access, **fields)


def program(directory: Path, source: str, **fields: Any) -> Hook:
    """A hook that is a Python program, which has the event as `event`."""
    script = directory / f"hook{len(list(directory.glob('hook*.py')))}.py"
    script.write_text(f"import json, os, sys\nevent = json.load(sys.stdin)\n{source}\n")
    return Hook(**{"name": "mine", "command": (sys.executable, "-I", str(script)), **fields})


def configured(*hooks: Hook) -> Hooks:
    return Hooks(configured=lambda: hooks)


def said_to(request: Request) -> str:
    return "\n".join(parts_text(message.parts) for message in request.messages if hasattr(message, "parts"))


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("planned", "network", "does"),
    [
        (plan("none"), True, set()),
        (plan("read"), True, {"read"}),
        (plan("write"), True, {"write"}),
        (plan("fetch"), True, {"fetch"}),
        (plan("execute", command_access="read"), True, {"execute", "read"}),
        (plan("execute", command_access="write"), False, {"execute", "read", "write"}),
        (plan("execute", command_access="write"), True, {"execute", "read", "write", "fetch"}),
        (plan("execute", command_access="full"), False, {"execute", "read", "write", "fetch"}),
        (plan("execute"), False, {"execute", "read", "write", "fetch"}),
        (plan("external"), False, {"external", "execute", "read", "write", "fetch"}),
        (plan("external", coverage=Coverage(is_read_only=True)), False, {"external", "read", "fetch"}),
    ],
)
def test_the_effects_of_a_call(planned: PlannedCall, network: bool, does: set[Effect]) -> None:
    assert effects(planned, has_network=network) == does


@pytest.mark.parametrize(
    ("limits", "called", "planned", "matches"),
    [
        ({}, "x", plan("none"), True),
        ({"tools": ("write_*",)}, "write_file", plan("write"), True),
        ({"tools": ("write_*",)}, "edit_file", plan("write"), False),
        ({"tools": ("git_*",)}, "call_tool", plan("external", coverage=Coverage(rule_tool="git_push")), True),
        ({"does": ("write",)}, "git_push", plan("external"), True),
        ({"does": ("write",)}, "git_log", plan("external", coverage=Coverage(is_read_only=True)), False),
        (
            {"paths": ("*.py",)},
            "write_file",
            plan("write", touched=Touched(rule_paths=("/w/src/A.PY", "src/A.PY"))),
            True,
        ),
        ({"paths": ("*.py",)}, "write_file", plan("write", touched=Touched(rule_paths=("/w/a.md", "a.md"))), False),
        (
            {"paths": ("*.py",)},
            "write_file",
            plan("write", touched=Touched(rule_paths=("/w/b",), other_paths=("link.py",))),
            True,
        ),
        (
            {"paths": ("*.py",)},
            "write_file",
            plan("write", touched=Touched(rule_paths=("/w/b",), has_hard_links=True)),
            True,
        ),
        ({"paths": ("*.py",)}, "grep", plan("read", touched=Touched(rule_paths=("/w", ".")), kind="search"), True),
        ({"paths": ("*.py",)}, "shell", plan("execute"), True),
        ({"paths": ("*.py",)}, "git_push", plan("external"), True),
        ({"paths": ("*.py",)}, "fetch", plan("fetch"), False),
        (
            {"does": ("write",), "paths": ("*.py",)},
            "read_file",
            plan("read", touched=Touched(rule_paths=("/w/a.py",))),
            False,
        ),
    ],
)
def test_which_calls_a_hook_gets(limits: Any, called: str, planned: PlannedCall, matches: bool) -> None:
    hook = Hook(name="h", event="before_tool", **limits)
    assert hook.matches(call(called), planned, effects(planned, has_network=False)) is matches


def test_a_hook_runs_only_in_its_workspaces() -> None:
    hook = Hook(name="h", event="turn_end", workspaces=("/home/user/repos/**",))
    assert [hook.covers(cwd) for cwd in ("/home/user/repos", "/home/user/repos/a/b", "/home/user/other")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("write", WRITES, ids=lambda each: f"{each.name} {each.arguments}"[:60])
async def test_no_way_to_write_a_file_escapes_a_hook_on_writing(tmp_path: Path, write: ToolCall) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("old\n")
    source = "sys.stderr.write(f'Not {event[\"tool\"]}.'); sys.exit(2)"
    hooks = configured(program(tmp_path, source, event="before_tool", does=("write",), paths=("*.txt",)))
    model = Casting(go=[Say(calls=(call("read_file", "c0", path="a.txt"), write)), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", allow=("shell",), hooks=hooks) as run:
        await run.session.prompt(text("go"))
        read, written = sorted(run.client.stored(ToolResult), key=lambda result: result.call.index)
    assert (read.is_error, written.is_error) == (False, True)
    assert written.text == f"The before_tool hook mine denied this: Not {write.name}."
    assert (tmp_path / "work" / "a.txt").read_text() == "old\n"
    assert run.client.questions == []


async def test_a_hook_learns_what_a_call_is_and_what_it_gave(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    hooks = python_hooks({"before_tool": [seen.append], "after_tool": [seen.append]})
    model = Casting(go=[Say(calls=(call("write_file", path="a.txt", content="x"),)), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", hooks=hooks) as run:
        await run.session.prompt(text("go"))
        (result,) = run.client.stored(ToolResult)
    before, after = seen
    about = {
        "session_id": "s1",
        "parent_id": None,
        "cwd": str(tmp_path / "work"),
        "model": "m",
        "mode": "auto",
        "call_id": result.call.call_id,
        "tool": "write_file",
        "rule_tool": "write_file",
        "arguments": {"path": "a.txt", "content": "x"},
        "title": "Write a.txt",
        "does": ["write"],
        "paths": [str(tmp_path / "work" / "a.txt")],
    }
    assert before == {"event": "before_tool", **about}
    told = {"result": result.text, "is_error": False, "duration_ms": result.duration_ms}
    assert after == {"event": "after_tool", **about, **told}


async def test_changed_arguments_are_planned_permitted_and_told_to_the_model(tmp_path: Path) -> None:
    hooks = python_hooks({"before_tool": [lambda event: {"arguments": {**event["arguments"], "path": "b.txt"}}]})
    model = Casting(go=[Say(calls=(call("write_file", path="a.txt", content="x"),)), Say(text=["ok"])])
    async with running(tmp_path, model, hooks=hooks) as run:
        await run.session.prompt(text("go"))
        (question,) = run.client.questions
        (started,), (result,), (told, _receipt) = (run.client.stored(kind) for kind in (Started, ToolResult, Custom))
    assert question.plan.announcement.title == started.announcement.title == result.announcement.title == "Write b.txt"
    assert json.loads(question.arguments) == {"path": "b.txt", "content": "x"}
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["b.txt"]
    words = "The before_tool hook <lambda> changed the arguments of this write_file call to: "
    assert (told.namespace, told.for_model, told.is_shown) == ("_lambda_", True, False)
    assert told.text == words + question.arguments
    assert told.text in said_to(model.requests["go"][1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"path": "secret/key", "content": "x"}, "write_file(secret/**)"),
        ({"path": 5, "content": "x"}, "path"),
    ],
)
async def test_changed_arguments_are_no_way_around_permissions(tmp_path: Path, arguments: Any, words: str) -> None:
    hooks = python_hooks({"before_tool": [lambda _: {"arguments": arguments}]})
    model = Casting(go=[Say(calls=(call("write_file", path="a.txt", content="x"),)), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", deny=("write_file(secret/**)",), hooks=hooks) as run:
        await run.session.prompt(text("go"))
        (result,) = run.client.stored(ToolResult)
    assert result.is_error
    assert words in result.text
    assert list((tmp_path / "work").iterdir()) == []


async def test_a_change_of_arguments_meets_the_hooks_that_now_match(tmp_path: Path) -> None:
    """The hook on `secret` comes first and does not match at first."""
    guard = Hook(name="guard", event="before_tool", paths=("secret",), load=lambda: lambda _: {"deny": "Secret."})
    move = Hook(name="move", event="before_tool", load=lambda: lambda _: {"arguments": {"path": "secret"}})
    model = Casting(go=[Say(calls=(call("read_file", path="a.txt"),)), Say(text=["ok"])])
    async with running(tmp_path, model, hooks=configured(guard, move)) as run:
        await run.session.prompt(text("go"))
        (result,) = run.client.stored(ToolResult)
    assert result.text == "The before_tool hook guard denied this: Secret."


async def test_a_call_that_a_hook_turns_into_a_write_runs_alone(tmp_path: Path) -> None:
    """The command only asked to read, so it would run beside the other call."""
    hooks = python_hooks({"before_tool": [lambda event: {"arguments": {}} if event["tool"] == "turned" else None]})
    model = ScriptedModel(Say(calls=(call("look", "c0"), call("turned", "c1", reads=True))), Say(text=["ok"]))

    async def work(**_: object) -> str:
        return "done"

    # The start of `look` is stored first, so the other call would begin before it.
    tools = {"look": Tool("write", work), "turned": Tool("read", work)}
    async with opened(tmp_path, model, tools=tools, mode="auto", hooks=hooks) as at:
        make_plan = at.tools.plan

        async def plan_by_arguments(call: ToolCall) -> PlannedCall:
            return replace(await make_plan(call), is_barrier=call.name == "turned" and call.arguments == "{}")

        at.tools.plan = plan_by_arguments  # type: ignore[method-assign]
        assert await at.session.prompt(text("go")) == "end_turn"
        assert at.tools.order == ["look begins", "look ends", "turned begins", "turned ends"]


async def test_a_denied_prompt_never_reaches_the_model(tmp_path: Path) -> None:
    hooks = python_hooks(
        {"before_prompt": [lambda event: {"deny": "It has a key."} if "sk-" in event["prompt"] else None]}
    )
    model = ScriptedModel(Say(text=["Hello."]))
    async with opened(tmp_path, model, hooks=hooks) as at:
        assert await at.session.prompt(text("use sk-123")) == "refusal"
        assert [remark.text for remark in at.client.stored(Remark)] == [
            "The before_prompt hook <lambda> denied this: It has a key."
        ]
        assert await at.session.prompt(text("hello")) == "end_turn"
    assert "sk-123" not in said_to(model.requests[0])


async def test_a_denial_without_words_is_a_denial(tmp_path: Path) -> None:
    reasons = iter([True, " \n"])
    hooks = python_hooks({"before_prompt": [lambda _: {"deny": next(reasons)}]})
    async with opened(tmp_path, ScriptedModel(), hooks=hooks) as at:
        for _ in range(2):
            assert await at.session.prompt(text("go")) == "refusal"
            assert at.client.stored(Remark)[-1].text.endswith("denied this: it gave no reason")


async def test_a_denied_request_ends_the_turn_with_the_words_of_the_hook(tmp_path: Path) -> None:
    hooks = python_hooks({"before_request": [lambda event: {"deny": "Too much."} if event["step"] == 2 else None]})

    async def look() -> str:
        return "seen"

    model = ScriptedModel(Say(calls=(call("look"),)))
    async with opened(tmp_path, model, tools={"look": Tool("read", look)}, hooks=hooks) as at:
        with pytest.raises(TurnError, match=r"The before_request hook <lambda> denied this: Too much\."):
            await at.session.prompt(text("go"))


async def test_what_hooks_add_is_stored_as_theirs_and_reaches_the_model(tmp_path: Path) -> None:
    def ticket(event: dict[str, Any]) -> dict[str, Any]:
        shown = {"namespace": "example.org:t", "text": "Ticket 17.", "show": True, "data": {"id": 17}}
        return {"context": f"Ship it ({event['source']}).", "entries": [shown], "metadata": {"ticket": 17}}

    hooks = python_hooks({"session_start": [ticket], "before_prompt": [lambda _: {"context": "Be brief."}]})
    model = ScriptedModel(Say(text=["Yes."]), Say(text=["Yes."]))
    async with opened(tmp_path, model, hooks=hooks) as at:
        await at.session.prompt(text("go"))
        await at.session.prompt(text("again"))
        context, shown, brief, _ = at.client.stored(Custom)
        assert (await at.store.session("s1")).metadata == {"ticket": 17}
    assert (context.namespace, context.text, context.for_model) == ("ticket", "Ship it (new).", True)
    assert (shown.namespace, shown.data, shown.is_shown, shown.for_model) == ("example.org:t", {"id": 17}, True, False)
    first = said_to(model.requests[0])
    assert '<context from="ticket">\nShip it (new).\n</context>' in first
    assert brief.text in first
    assert "Ticket 17." not in first
    assert said_to(model.requests[1]).count("Ship it") == 1
    async with opened(tmp_path, ScriptedModel(Say(text=["Yes."])), session_id="s1", hooks=hooks) as at:
        await at.session.prompt(text("go on"))
        assert at.client.stored(Custom)[0].text == "Ship it (resumed)."


async def test_a_hook_at_the_end_sends_at_most_three_prompts(tmp_path: Path) -> None:
    sent: list[int] = []

    def again(event: dict[str, Any]) -> dict[str, str]:
        sent.append(event["prompts_sent"])
        return {"prompt": f"Once more after {event['text']}"}

    model = ScriptedModel(*(Say(text=[f"answer {number}"]) for number in range(4)))
    async with opened(tmp_path, model, hooks=python_hooks({"turn_end": [again]})) as at:
        assert await at.session.prompt(text("go")) == "end_turn"
        prompts = at.client.stored(Custom)
        (remark,) = at.client.stored(Remark)
        assert (await at.kinds()).count("TurnEnd") == 1
    assert sent == [0, 1, 2, 3]
    assert [(each.text, each.is_shown) for each in prompts] == [(f"Once more after answer {n}", True) for n in range(3)]
    assert "Once more after answer 2" in said_to(model.requests[3])
    assert remark.text == "The turn_end hook again sent another prompt; crow takes at most 3 in a turn."


async def test_a_hook_at_the_end_cannot_exceed_the_steps_of_the_turn(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["one"]), Say(text=["two"]))
    hooks = python_hooks({"turn_end": [lambda _: {"prompt": "Again."}]})
    async with opened(tmp_path, model, hooks=hooks, steps=2) as at:
        assert await at.session.prompt(text("go")) == "max_turn_requests"


async def test_a_prompt_that_arrives_during_the_last_hook_is_answered(
    tmp_path: Path, released: threading.Event
) -> None:
    reached = anyio.Event()
    token = anyio.lowlevel.current_token()

    def wait(event: dict[str, Any]) -> None:
        anyio.from_thread.run_sync(reached.set, token=token)
        released.wait()

    model = ScriptedModel(Say(text=["one"]), Say(text=["two"]))
    async with (
        opened(tmp_path, model, hooks=python_hooks({"turn_end": [wait]})) as at,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(at.session.prompt, text("go"))
        await reached.wait()
        assert await at.session.steer(text("and this"))
        released.set()
    assert "and this" in said_to(model.requests[1])


async def test_subagents_run_the_hooks_too(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def note(event: dict[str, Any]) -> None:
        seen.append((event["event"], event["parent_id"] == "s1"))

    def deny(event: dict[str, Any]) -> dict[str, str] | None:
        return {"deny": "No writes."} if event["tool"] == "write_file" else None

    names: Any = ("session_start", "before_prompt", "before_request", "after_tool", "turn_end")
    hooks = python_hooks({**{name: [note] for name in names}, "before_tool": [deny]})
    model = Casting(
        parent=[Say(calls=(task(prompt="child write a.txt"),)), Say(text=["Done."])],
        child=[Say(calls=(call("write_file", path="a.txt", content="x"),)), Say(text=["I could not."])],
    )
    async with running(tmp_path, model, mode="auto", hooks=hooks) as run:
        assert await run.session.prompt(text("parent go")) == "end_turn"
        written = next(result for result in run.client.stored(ToolResult) if result.name == "write_file")
    assert written.text == "The before_tool hook deny denied this: No writes."
    assert [each for each in seen if each[1]] == [
        (name, True) for name in ("session_start", "before_prompt", "before_request", "before_request", "turn_end")
    ]
    assert [name for name, is_child in seen if not is_child][-2:] == ["before_request", "turn_end"]


async def test_a_failing_command_is_skipped_and_named_to_the_user(tmp_path: Path) -> None:
    def named(name: str, source: str, **fields: Any) -> Hook:
        return program(tmp_path, source, event="before_prompt", **{"name": name, **fields})

    hooks = configured(
        named("fails", "print('{\"deny\": \"x\"}'); print('first'); print('no disk', file=sys.stderr); sys.exit(1)"),
        named("hangs", "import time; time.sleep(600)", timeout_s=0.3),
        named("invalid", "print('{\"context\": ')"),
        named("endless", "print('{' + ' ' * 2_000_000)"),
        named("missing", "", command=("no-such-program",)),
        named("deep", "print('{\"metadata\":' * 900 + '1' + '}' * 900)"),
        named("split", r"print('{\"context\": \"Half \\ud800.\"}')"),
        named("deaf", "", command=("true",)),
        named("chatty", "print('1 file left unchanged')"),
        named("good", "print(json.dumps({'context': 'Still heard.'}))"),
    )
    client = NoteTaker()
    client.notices = True
    model = ScriptedModel(Say(text=["ok"]))
    async with opened(tmp_path, model, hooks=hooks, client=client) as at:
        assert await at.session.prompt(text("go " * 100_000)) == "end_turn"
    missing = "program no-such-program is not on PATH (programs in the workspace do not count)"
    told = [event.title for event in client.events if isinstance(event, NoticeShown)]
    assert [title.removeprefix("The before_prompt hook ") for title in told] == [
        "fails failed (exit code 1: no disk) and is skipped.",
        "hangs took longer than 0.3 s and is skipped.",
        "invalid answered with invalid JSON (Expecting value: line 1 column 12 (char 11)) and is skipped.",
        "endless answered with more than 1,000,000 bytes and is skipped.",
        f"missing could not be started ({missing}) and is skipped.",
        "deep answered with more than 64 levels of objects and lists and is skipped.",
    ]
    assert "Half ?." in said_to(model.requests[0])
    assert "Still heard." in said_to(model.requests[0])


async def test_a_command_runs_in_the_workspace_without_keys_and_finds_no_program_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil").write_text('#!/bin/sh\necho \'{"context": "evil"}\'\n')
    (tmp_path / "evil").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-0123456789")
    told = "f\"{os.getcwd()} {'OPENAI_API_KEY' in os.environ} {os.environ['PATH']}\""
    source = f"print(json.dumps({{'context': {told}}}))"
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    hooks = configured(
        program(scripts, source, event="before_prompt"),
        Hook(name="evil", event="before_prompt", command=("evil",)),
    )
    async with opened(tmp_path, ScriptedModel(Say(text=["ok"])), hooks=hooks) as at:
        await at.session.prompt(text("go"))
        (context,) = at.client.stored(Custom)
    assert context.text == f"{tmp_path} False /usr/bin:/bin"


@pytest.mark.parametrize("event", ["before_prompt", "before_tool", "after_tool", "turn_end"])
async def test_a_turn_is_cancelled_while_a_function_hangs(
    tmp_path: Path, released: threading.Event, event: Any
) -> None:
    reached = anyio.Event()
    token = anyio.lowlevel.current_token()

    def hang(_: object) -> None:
        anyio.from_thread.run_sync(reached.set, token=token)
        released.wait()

    async def look() -> str:
        return "seen"

    model = ScriptedModel(Say(calls=(call("look"),)), Say(text=["ok"]))
    hooks = python_hooks({event: [hang]})
    async with opened(tmp_path, model, tools={"look": Tool("read", look)}, hooks=hooks) as at:
        stops: list[str] = []

        async def prompt() -> None:
            stops.append(await at.session.prompt(text("go")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await reached.wait()
            at.session.cancel()
        assert stops == ["cancelled"]
        assert not released.is_set()


async def test_undo_restores_the_file_from_before_a_call_and_its_hook(tmp_path: Path) -> None:
    source = "path = event['paths'][0]; text = open(path).read(); open(path, 'w').write(text.upper())"
    hooks = configured(program(tmp_path, source, event="after_tool", does=("write",)))
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "a.txt"
    path.write_text("one\n")
    calls = (
        call("edit_file", path="a.txt", old_text="one", new_text="two"),
        call("read_file", path="a.txt"),
        call("edit_file", path="a.txt", old_text="TWO", new_text="three"),
    )
    model = Casting(go=[*(Say(calls=(each,)) for each in calls), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", hooks=hooks) as run:
        await run.session.prompt(text("go"))
        assert path.read_text() == "THREE\n"
        await run.session.prompt(text("/undo files"))
    assert path.read_text() == "one\n"


async def test_nothing_is_planned_twice_without_hooks(tmp_path: Path) -> None:
    plans: list[str] = []
    model = ScriptedModel(Say(calls=(call("look", "c0"), call("look", "c1"))), Say(text=["ok"]))

    async def look() -> str:
        return "seen"

    async with opened(tmp_path, model, tools={"look": Tool("read", look)}, hooks=Hooks()) as at:
        make_plan = at.tools.plan

        async def counting(call: ToolCall) -> PlannedCall:
            plans.append(call.name)
            return await make_plan(call)

        at.tools.plan = counting  # type: ignore[method-assign]
        await at.session.prompt(text("go"))
    assert plans == ["look", "look"]

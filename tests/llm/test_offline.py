"""Tests of the built-in model."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from crow.domain.messages import (
    Answer,
    AssistantMessage,
    Message,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from crow.llm import Delta, Request, TextDelta, ThoughtDelta
from crow.llm.offline import OfflineModel

NAMES = ("read_file", "write_file", "edit_file", "list_files", "grep", "shell", "update_plan", "recall", "srv_echo")
TOOLS = tuple(ToolSpec(name=name, description="", input_schema={"type": "object"}) for name in NAMES)
SYSTEM = SystemMessage(text="You are crow.")


def user(*texts: str) -> UserMessage:
    return UserMessage(parts=tuple(Text(text=text) for text in texts))


async def no_pause(_seconds: float) -> None:
    """Take no time."""


async def reply(*messages: Message, **more: Any) -> tuple[list[Delta], Answer]:
    model = OfflineModel(sleep=no_pause)
    async with model.stream(Request(messages=(SYSTEM, *messages), tools=TOOLS, **more)) as stream:
        deltas = [delta async for delta in stream]
        return deltas, stream.answer


def called(answer: Answer) -> tuple[str, Any] | None:
    return (answer.calls[0].name, json.loads(answer.calls[0].arguments)) if answer.calls else None


@pytest.mark.parametrize(
    ("prompt", "name", "arguments"),
    [
        ("read README.md", "read_file", {"path": "README.md"}),
        ("Please read the file `src/a.py`.", "read_file", {"path": "src/a.py"}),
        ("write notes.txt: some text", "write_file", {"path": "notes.txt", "content": "some text\n"}),
        ("write a.txt: now then some", "write_file", {"path": "a.txt", "content": "now then some\n"}),
        ("edit a.py: x = 1 -> x = 2", "edit_file", {"path": "a.py", "old_text": "x = 1", "new_text": "x = 2"}),
        ("run ls", "shell", {"command": "ls"}),
        ("run `git status`", "shell", {"command": "git status"}),
        ("list files", "list_files", {}),
        ("list files in src", "list_files", {"path": "src"}),
        (
            "plan: a; b",
            "update_plan",
            {
                "items": [
                    {"content": "a", "status": "in_progress", "priority": "medium"},
                    {"content": "b", "status": "pending", "priority": "medium"},
                ]
            },
        ),
        ('call srv_echo {"a": 1}', "srv_echo", {"a": 1}),
    ],
)
async def test_a_plain_request_becomes_one_call(prompt: str, name: str, arguments: dict[str, object]) -> None:
    deltas, answer = await reply(user(prompt, "<reminder>\nThe date changed.\n</reminder>"))
    assert called(answer) == (name, arguments)
    assert answer.finish == "tool_calls"
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == answer.text != ""


async def test_arguments_that_nest_too_deeply_are_not_valid_json() -> None:
    _, answer = await reply(user('call srv_echo {"a":' + "[" * 5_000 + "]" * 5_000 + "}"))
    assert (answer.calls, answer.text.endswith("is not valid JSON.")) == ((), True)


async def test_a_reply_after_a_call_repeats_the_result() -> None:
    _, first = await reply(user("read README.md"))
    history = (
        user("read README.md"),
        AssistantMessage(text=first.text, calls=first.calls),
        ToolMessage(call_id=first.calls[0].id, text="# Tea timer\n\nTimes tea."),
    )
    deltas, answer = await reply(*history)
    assert (answer.text, answer.calls) == ("The tool returned:\n\n# Tea timer\n\nTimes tea.", ())
    assert len(deltas) > 3
    again = await reply(*history)
    assert (deltas, answer) == again


async def test_steps_joined_by_then_run_in_order() -> None:
    history: list[Message] = [user("write a.txt: hello then read a.txt then say done")]
    seen: list[Any] = []
    answer = Answer()
    for _ in range(5):
        _, answer = await reply(*history)
        if not answer.calls:
            break
        seen.append(called(answer))
        history.append(AssistantMessage(text=answer.text, calls=answer.calls))
        history.append(ToolMessage(call_id=answer.calls[0].id, text="fine"))
        history.append(user("<reminder>\nMode changed.\n</reminder>"))
    assert seen == [("write_file", {"path": "a.txt", "content": "hello\n"}), ("read_file", {"path": "a.txt"})]
    assert answer.text == "The tool returned:\n\nfine\n\ndone"
    assert len({call.id for message in history if isinstance(message, AssistantMessage) for call in message.calls}) == 2


async def test_only_offered_tools_are_called() -> None:
    model = OfflineModel(sleep=no_pause)
    async with model.stream(Request(messages=(SYSTEM, user("run ls")), tools=TOOLS[:2])) as stream:
        async for _ in stream:
            pass
        assert stream.answer.calls == ()
        assert "The tool shell is not offered" in stream.answer.text
    _, answer = await reply(user("run ls"), tool_choice="none")
    assert answer.calls == ()


async def test_an_unknown_request_is_answered_with_the_list_of_rules() -> None:
    _, answer = await reply(user("What is the meaning of life?"))
    assert 'I have no rule for "What is the meaning of life?"' in answer.text
    assert "am not a language model" in answer.text


async def test_a_count_streams_each_number_and_stops_at_the_output_limit() -> None:
    deltas, answer = await reply(user("count to 30"))
    assert len(deltas) == 30
    assert answer.text.split() == [str(number) for number in range(1, 31)]
    _, cut = await reply(user("count to 30"), max_output_tokens=3)
    assert (cut.text.split(), cut.finish) == (["1", "2", "3"], "length")


async def test_a_cancelled_count_keeps_its_partial_text() -> None:
    waited = anyio.Event()

    async def sleep(seconds: float) -> None:
        waited.set()
        await anyio.sleep_forever()

    model = OfflineModel(sleep=sleep)
    partial: list[Answer] = []

    async def follow() -> None:
        async with model.stream(Request(messages=(SYSTEM, user("count to 9")))) as stream:
            try:
                async for _ in stream:
                    pass
            finally:
                partial.append(stream.partial())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await waited.wait()
            group.cancel_scope.cancel()
    assert partial == [Answer(text="1\n", finish="interrupted")]


async def test_a_thought_is_streamed_apart_from_the_text() -> None:
    deltas, answer = await reply(user("think about tea"))
    assert "".join(delta.text for delta in deltas if isinstance(delta, ThoughtDelta)) == answer.thought
    assert (answer.thought, answer.text) == ("A rule says: think about tea.", "I have thought about it.")


INSTRUCTION = "[crow] Summarise, in at most {} words, under:\n## Goal\nWhat?\n## Next\nWhat?\n## Facts\nWhat?"


def worked(count: int) -> list[Message]:
    history: list[Message] = []
    for number in range(count):
        call = ToolCall(id=f"c{number}", name="read_file", arguments=json.dumps({"path": f"file{number}.py"}))
        history += [user(f"read file{number}.py"), AssistantMessage(text="", calls=(call,))]
        history += [ToolMessage(call_id=call.id, text=f"content {number}"), AssistantMessage(text="Done.")]
    return history


async def test_a_compaction_gets_a_summary_under_headings_and_no_calls() -> None:
    _, answer = await reply(*worked(3), user(INSTRUCTION.format(300)), tool_choice="none")
    assert answer.calls == ()
    assert answer.text == (
        "## Goal\nread file0.py\n"
        "## Done\n"
        'read_file {"path": "file0.py"}: content 0\n'
        'read_file {"path": "file1.py"}: content 1\n'
        'read_file {"path": "file2.py"}: content 2\n'
        "## Next\nAnswer the newest request: read file2.py"
    )


async def test_a_summary_stays_within_its_word_limit_and_keeps_the_earlier_goal() -> None:
    earlier = user("[The conversation up to here was compacted.]\n## Goal\nmake tea\n## Facts\n- tea.py\n[Files]\n- x")
    _, answer = await reply(earlier, *worked(40), user(INSTRUCTION.format(60)), tool_choice="none")
    assert len(answer.text.split()) <= 60
    assert answer.text.startswith("## Goal\nmake tea\n")
    assert "file39.py" in answer.text


async def test_a_summary_for_the_user_lists_requests_and_calls() -> None:
    _, answer = await reply(*worked(1), user("summarise"))
    assert answer.text.startswith('## Goal\nread file0.py\n## Done\nread_file {"path": "file0.py"}: content 0')
    _, answer = await reply(user("summarise"))
    assert answer.text == "Nothing has happened in this session yet."


async def test_usage_grows_with_the_request_and_the_answer() -> None:
    _, small = await reply(user("say a"))
    _, large = await reply(user("say " + "word " * 500))
    assert small.usage is not None
    assert large.usage is not None
    assert (large.usage.input_tokens or 0) > (small.usage.input_tokens or 0) + 400
    assert (large.usage.output_tokens or 0) > (small.usage.output_tokens or 0) + 400

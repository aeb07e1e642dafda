"""Commands in an editor's terminals."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from acp_check.schema import SchemaChecker
from crow.frontend.workspace import EditorRequests, EditorTerminals, exit_code
from crow.protocol.frames import RequestError


class Editor:
    """Answers requests from `answers`, and never those without an answer; every request must be valid."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"create": {"terminalId": "t1"}, "release": None, "kill": {}} | answers
        self.asked: list[str] = []
        self.variables: list[dict[str, str]] = []
        self.waiting = anyio.Event()

    async def ask(self, method: str, params: dict[str, Any]) -> Any:
        SchemaChecker().check("agent", {"jsonrpc": "2.0", "id": 0, "method": method, "params": params})
        name = method.removeprefix("terminal/")
        self.asked.append(name)
        self.variables += params.get("env", ())
        if name not in self.answers:
            self.waiting.set()
            await anyio.sleep_forever()
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def ignore(_: str) -> None:
    """Ignores the output."""


async def run(editor: Editor, timeout_s: float = 20) -> tuple[int | None, str]:
    terminals = EditorTerminals(EditorRequests("s", editor.ask, answer_s=30))
    return await terminals.run("echo hi", cwd="/w", timeout_s=timeout_s, on_output=ignore)


async def test_a_command_is_run_read_and_released() -> None:
    editor = Editor(wait_for_exit={"exitCode": 3, "signal": None}, output={"output": "hi\n", "truncated": False})
    assert await run(editor) == (3, "hi\n")
    assert editor.asked == ["create", "wait_for_exit", "output", "release"]


async def test_hidden_variables_are_set_to_nothing() -> None:
    editor = Editor(wait_for_exit={"exitCode": 0}, output={"output": "", "truncated": False})
    terminals = EditorTerminals(EditorRequests("s", editor.ask, answer_s=30), ("NEST_KEY", "WORK_KEY"))
    await terminals.run("env", cwd="/w", timeout_s=20, on_output=ignore)
    hidden = [variable for variable in editor.variables if variable["name"].endswith("_KEY")]
    assert hidden == [{"name": "NEST_KEY", "value": ""}, {"name": "WORK_KEY", "value": ""}]


async def test_a_command_that_takes_too_long_is_killed_if_the_editor_can() -> None:
    editor = Editor(output={"output": "part", "truncated": True}, kill=RequestError(-32603, "no"))
    cut = "[the beginning is missing, because the editor keeps only 1 MB]"
    assert await run(editor, timeout_s=0) == (None, f"{cut}\npart")
    assert editor.asked[-3:] == ["kill", "output", "release"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            RequestError(-32603, "Internal error", {"details": "Permission denied"}),
            "run the command: Permission denied",
        ),
        ({"terminalId": None}, "did not open a terminal"),
        (ConnectionError("gone"), "gone"),
    ],
)
async def test_a_refusal_says_why_and_the_command_is_not_run(answer: Any, words: str) -> None:
    editor = Editor(create=answer)
    with pytest.raises(PermissionError, match=words):
        await run(editor)
    assert editor.asked == ["create"]


async def test_reap_kills_and_releases_a_cancelled_command() -> None:
    editor = Editor(output={"output": "", "truncated": False})
    terminals = EditorTerminals(EditorRequests("s", editor.ask, answer_s=30))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await editor.waiting.wait()
                scope.cancel()

            tasks.start_soon(cancel)
            await terminals.run("sleep 9", cwd="/w", timeout_s=20, on_output=ignore)
    assert "release" not in editor.asked
    await terminals.reap()
    assert editor.asked[-2:] == ["kill", "release"]


@pytest.mark.parametrize(
    ("status", "code"),
    [({"exitCode": 0}, 0), ({"signal": "SIGTERM"}, -15), ({"signal": "KILL"}, -9), ({"signal": "x"}, -1), (None, -1)],
)
def test_exit_statuses_become_exit_codes(status: Any, code: int) -> None:
    assert exit_code(status) == code

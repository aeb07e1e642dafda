"""Commands in an editor's terminals: every one released, refusals told, exit codes read."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from acp import RequestError

from crow.frontend.terminal import EditorTerminals, exit_code
from crow.trace.schema import SchemaChecker


class Editor:
    """Answers the five requests from `answers` (a method without one never answers); every request is judged."""

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


async def unheard(_: str) -> None:
    """Output goes nowhere."""


async def run(editor: Editor, timeout_s: float = 20) -> tuple[int | None, str]:
    terminals = EditorTerminals("s", editor.ask, answer_s=30)
    return await terminals.run("echo hi", cwd="/w", timeout_s=timeout_s, on_output=unheard)


async def test_a_command_runs_is_read_and_released() -> None:
    editor = Editor(wait_for_exit={"exitCode": 3, "signal": None}, output={"output": "hi\n", "truncated": False})
    assert await run(editor) == (3, "hi\n")
    assert editor.asked == ["create", "wait_for_exit", "output", "release"]


async def test_a_command_does_not_see_the_variables_that_are_hidden_from_it() -> None:
    editor = Editor(wait_for_exit={"exitCode": 0}, output={"output": "", "truncated": False})
    terminals = EditorTerminals("s", editor.ask, answer_s=30, hidden=("NEST_KEY", "WORK_KEY"))
    await terminals.run("env", cwd="/w", timeout_s=20, on_output=unheard)
    hidden = [variable for variable in editor.variables if variable["name"].endswith("_KEY")]
    assert hidden == [{"name": "NEST_KEY", "value": ""}, {"name": "WORK_KEY", "value": ""}]


async def test_a_command_that_takes_too_long_is_killed_even_by_an_editor_that_cannot() -> None:
    editor = Editor(output={"output": "part", "truncated": True}, kill=RequestError(-32603, "no"))
    assert await run(editor, timeout_s=0) == (None, "[the beginning is cut: the editor keeps 1 MB]\npart")
    assert editor.asked[-3:] == ["kill", "output", "release"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            RequestError(-32603, "Internal error", {"details": "Permission denied"}),
            "run the command: Permission denied",
        ),
        ({"terminalId": None}, "opened no terminal"),
        (ConnectionError("gone"), "gone"),
    ],
)
async def test_a_refusal_says_why_and_nothing_is_run_in_another_way(answer: Any, words: str) -> None:
    editor = Editor(create=answer)
    with pytest.raises(PermissionError, match=words):
        await run(editor)
    assert editor.asked == ["create"]


async def test_a_cancelled_command_is_killed_and_released_by_the_reaping_that_follows() -> None:
    editor = Editor(output={"output": "", "truncated": False})
    terminals = EditorTerminals("s", editor.ask, answer_s=30)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await editor.waiting.wait()
                scope.cancel()

            tasks.start_soon(cancel)
            await terminals.run("sleep 9", cwd="/w", timeout_s=20, on_output=unheard)
    assert "release" not in editor.asked
    await terminals.reap()
    assert editor.asked[-2:] == ["kill", "release"]


@pytest.mark.parametrize(
    ("status", "code"),
    [({"exitCode": 0}, 0), ({"signal": "SIGTERM"}, -15), ({"signal": "KILL"}, -9), ({"signal": "x"}, -1), (None, -1)],
)
def test_an_exit_is_read_as_a_code(status: Any, code: int) -> None:
    assert exit_code(status) == code

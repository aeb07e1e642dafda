"""Keys and commands of the user in `crow chat`: pasted text, modes, `!` commands, and ways to leave."""

from __future__ import annotations

import asyncio
import json
import re
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.posix_pipe import PosixPipeInput
from prompt_toolkit.output import DummyOutput

from crow.terminal.completion import Choices
from crow.terminal.keyboard import LineEditor, Pastes
from crow.terminal.shell import user_shell
from tests.support.fake_endpoint import Gate, Reply, calls, chunk, sse, text, usage
from tests.support.terminal import Shell

ENTER, CTRL_C, CTRL_D, ESCAPE, SHIFT_TAB, UP = "\r", "\x03", "\x04", "\x1b", "\x1b[Z", "\x1b[A"
READY = "\x1b[?2004h"
"""The line editor asks for marked pastes when it begins to read keys."""

PASTED = "".join(f"line {number}\n" for number in range(200))


def pasted(text: str) -> str:
    """What a terminal sends for a paste."""
    return f"\x1b[200~{text}\x1b[201~"


def is_running(pid: int) -> bool:
    """Whether a process runs, and has not ended without being reaped."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return not found.strip().startswith(("Z", "X")) and bool(found.strip())


def test_a_command_after_an_exclamation_mark_is_run_and_shown_and_goes_along(shell: Shell) -> None:
    shell.endpoint.script(text("I see."), text("Nothing more."))
    (shell.place / "x.py").write_text("1")
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"!echo a; printf '\\033]0;owned\\007 %s' *.py; exit 3{ENTER}")
        terminal.wait_for("\\x1b]0;owned\\x07 x.py")
        terminal.wait_for("Exit code 3. Your next prompt includes its output (2 lines).")
        terminal.wait_for(READY)
        terminal.type(f"why?{ENTER}")
        terminal.wait_for("I see.")
        terminal.wait_for(READY)
        terminal.type(f"and?{ENTER}")
        terminal.wait_for("Nothing more.")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert "\x1b]0;" not in terminal.shown
    first, second = (shell.endpoint.asked[at].body["messages"] for at in (0, 1))
    assert "I ran this command myself (exit code 3): echo a;" in json.dumps(first[-1])
    assert "x.py" in json.dumps(first[-1])
    assert "I ran" not in json.dumps(second[-1])


@pytest.mark.parametrize("key", [ESCAPE, CTRL_C], ids=["Esc", "Ctrl-C"])
def test_a_command_of_the_user_is_stopped_with_all_that_it_started(shell: Shell, key: str) -> None:
    shell.endpoint.script(text("I see."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        begin = "sh -c 'echo $$ > pid; exec sleep 300' & until test -s pid; do sleep 0.01; done; echo $((1 + 1)) begun"
        terminal.type(f"!{begin}; wait{ENTER}")
        terminal.wait_for("2 begun")
        terminal.type(key)
        terminal.wait_for("Stopped by the user.")
        terminal.wait_for(READY)
        assert not is_running(int((shell.place / "pid").read_text()))
        terminal.type(f"!sleep 400{ENTER}")
        terminal.wait_for("$ sleep 400 · ")
        terminal.type(key)  # the command is perhaps only about to start
        terminal.wait_for("Stopped by the user.")
        terminal.wait_for(READY)
        terminal.type(CTRL_C + CTRL_C)  # at an empty prompt, the second one leaves
        assert terminal.wait() == 0


def test_the_shell_of_the_user_is_taken_only_by_its_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, wanted in (("bash", "/bin/sh"), ("/no/such/shell", "/bin/sh"), (sys.executable, sys.executable)):
        monkeypatch.setenv("SHELL", shell)
        assert user_shell() == [wanted, "-c"]


def test_a_long_paste_is_a_mark_on_the_screen_and_whole_in_prompt_and_history(shell: Shell) -> None:
    shell.endpoint.script(text("All read."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(pasted(PASTED) + " and " + pasted("one\r\ntwo"))
        terminal.wait_for("[paste #1: 200 lines] and one")
        terminal.type(ENTER)
        terminal.wait_for("All read.")
        terminal.wait_for(READY)
        assert "line 150" not in terminal.shown
        terminal.type(UP)
        terminal.wait_for("line 199")
        terminal.type(CTRL_C + CTRL_D)
        assert terminal.wait() == 0
    assert json.dumps(f"{PASTED} and one\ntwo") in shell.asked()
    assert "+line 199\n+ and one\n+two\n" in (shell.home / "chat_history").read_text()


def test_only_the_marks_of_real_pastes_are_replaced() -> None:
    pastes = Pastes()
    assert pastes.shown("short\rtext") == "short\ntext"
    first, second = pastes.shown("[paste #2: 2,500 characters]\n" * 11), pastes.shown("x" * 2_500)
    assert (first, second) == ("[paste #1: 11 lines]", "[paste #2: 2,500 characters]")
    assert pastes.expanded(f"{second} [paste #3: 11 lines] {first}{first}") == (
        "x" * 2_500 + " [paste #3: 11 lines] " + "[paste #2: 2,500 characters]\n" * 22
    )


def test_shift_tab_changes_the_mode_at_the_prompt_and_during_a_turn(shell: Shell) -> None:
    gate = Gate()
    begun, rest = chunk({"role": "assistant", "content": "half \n"}), (chunk({"content": "rest"}), chunk(finish="stop"))
    shell.endpoint.script(Reply(steps=(sse(begun, done=False), gate, sse(*rest, usage()))))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for("fake-model · ask")
        terminal.wait_for(READY)
        terminal.type(f"{SHIFT_TAB}go{ENTER}")
        terminal.wait_for("half")
        terminal.wait_for("accept-edits · Esc")
        terminal.type(SHIFT_TAB)
        terminal.wait_for("plan · Esc")
        gate.open()
        terminal.wait_for("rest")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_ctrl_c_twice_at_an_empty_prompt_leaves(shell: Shell) -> None:
    shell.endpoint.script(text("Still here."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"x{CTRL_C}{CTRL_C}y{CTRL_C}{CTRL_C}go on{ENTER}")  # never twice at an empty prompt
        terminal.wait_for("Still here.")
        terminal.wait_for(READY)
        terminal.type(CTRL_C + CTRL_C)
        assert terminal.wait() == 0
    assert '"go on"' in shell.asked()


@pytest.mark.parametrize("is_known", ["1", ""], ids=["the line editor does not ask", "the terminal does not answer"])
def test_a_terminal_that_does_not_say_where_the_cursor_is_shows_the_status_above_the_prompt(
    shell: Shell, is_known: str
) -> None:
    shell.endpoint.script(text("Still here."))
    with shell.in_terminal("chat", PROMPT_TOOLKIT_NO_CPR=is_known) as terminal:
        terminal.wait_for(READY)
        terminal.wait_for("fake-model")
        terminal.type(CTRL_C)
        terminal.wait_for("is kept.")
        terminal.type(f"go on{ENTER}")
        terminal.wait_for("Still here.")
        terminal.wait_for(READY)
        terminal.type(CTRL_C)
        terminal.wait_for("is kept.")
        terminal.type(CTRL_C)
        assert terminal.wait() == 0
    assert "WARNING" not in terminal.shown


@asynccontextmanager
async def line_editor() -> AsyncIterator[tuple[Callable[[str], Awaitable[None]], asyncio.Task[str]]]:
    """A function that types at the prompt of a line editor, and the task that ends with the prompt."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()) as session:
        history = InMemoryHistory()
        history.append_string("older")
        editor = LineEditor(Choices(cwd=None), history, lambda: "", lambda: None)
        prompted = asyncio.ensure_future(editor.prompt("> "))
        while session.app is None or not session.app.is_running:
            await anyio.lowlevel.checkpoint()
        session.app.ttimeoutlen = session.app.timeoutlen = 3_600  # nothing happens because time has passed

        async def type_keys(keys_typed: str) -> None:
            assert isinstance(keys, PosixPipeInput)
            keys.send_text(keys_typed)
            while select.select([keys.fileno()], [], [], 0)[0]:
                await anyio.lowlevel.checkpoint()

        with anyio.fail_after(60):
            yield type_keys, prompted


@pytest.mark.parametrize(
    ("pause_s", "pieces", "expected"),
    [
        (0, (ESCAPE, "/help", ENTER), "/help"),
        (0, (ESCAPE, "b", "c", ENTER), "bc"),
        (0, (ESCAPE, ESCAPE, "/x", ENTER), "/x"),
        (0, ("a b", f"{ESCAPE}b", "c", ENTER), "a cb"),  # Alt-B: back one word
        (0, (f"{ESCAPE}", "[A", ENTER), "older"),  # the code of the arrow in two pieces
        (0, (f"{ESCAPE}", "OA", ENTER), "older"),
        (3_600, (ESCAPE, "<", ENTER), "older"),  # Alt-<: the first line of the history, in two pieces
        (0, (f"{ESCAPE}<", ENTER), "older"),
        (0, ("a b", ESCAPE, "b", "c", ENTER), "a cb"),  # in a text, Esc and a key are still Alt and that key
    ],
)
async def test_esc_at_an_empty_prompt_is_a_key_and_the_codes_of_other_keys_still_work(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, pieces: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("crow.terminal.keyboard._ESCAPE_S", pause_s)
    async with line_editor() as (type_keys, prompted):
        for piece in pieces:
            await type_keys(piece)
        assert await prompted == expected


def test_the_output_of_a_command_is_shown_while_it_runs(shell: Shell) -> None:
    command = "for i in 1 2 3 4 5 6 7; do echo row $i; done; until test -e go; do sleep 0.05; done"
    shell.endpoint.script(calls(("shell", {"command": command, "access": "full"})), text("Done."))
    with shell.in_terminal("chat", "--mode", "auto") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"run it{ENTER}")
        terminal.wait_for("stop the turn")
        terminal.type("y")
        terminal.wait_for("row 3")
        terminal.wait_for("row 7")
        (shell.place / "go").touch()
        terminal.wait_for("Done.")


def test_lines_below_a_turn_fit_a_terminal_that_becomes_narrower(shell: Shell) -> None:
    gate = Gate()
    begun = sse(chunk({"role": "assistant", "content": "half \n"}), done=False)
    shell.endpoint.script(Reply(steps=(begun, gate, sse(chunk({"content": "rest"}), chunk(finish="stop"), usage()))))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"go{ENTER}")
        terminal.wait_for("half")
        terminal.type(f"next{ENTER}")
        terminal.wait_for("Esc takes it back")
        terminal.resize(60, 20)
        terminal.wait_for("sends it into this turn · Esc …\x1b8")  # the line is cut, and the cursor goes back
        gate.open()
        terminal.wait_for("rest")


def test_options_without_a_command_are_those_of_the_chat(shell: Shell) -> None:
    with shell.in_terminal("--mode", "plan") as terminal:
        terminal.wait_for("crow · fake-model · plan")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    code, _, told = shell.crow("--mode", "plan")
    assert (code, "invalid choice" in told) == (2, True)


def test_the_lines_of_doctor_are_broken_between_words_in_a_terminal(shell: Shell) -> None:
    with shell.in_terminal("doctor", CROW_MODEL="offline") as terminal:
        terminal.wait()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown).split("\r\n")
    assert [line for line in lines if len(line) > 80 and " " in line[25:].strip()] == []
    assert any(line.startswith(" " * 25) for line in lines)

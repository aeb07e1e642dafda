"""`crow chat` in a pseudo terminal, against an endpoint on loopback."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from crow.cli import main
from crow.terminal.completion import Choices, ChoicesCompleter, find_files, mentioned_files
from crow.terminal.form import fields_of
from crow.terminal.keyboard import HISTORY_BYTES, open_history
from crow.terminal.question import QUESTION_LINES, keys_of, question_of
from crow.terminal.render import Look
from tests.support import fork_server
from tests.support.fake_endpoint import HANG, Gate, Reply, calls, chunk, sse, text, usage
from tests.support.terminal import Shell, Terminal

ENTER, CTRL_C, CTRL_D, ALT_ENTER, ESCAPE = "\r", "\x03", "\x04", "\x1b\r", "\x1b"
READY = "\x1b[?2004h"
"""The line editor asks for marked pastes when it begins to read keys."""

PLAIN = Look(has_styles=False, has_colors=False)


def test_a_chat_streams_markdown_asks_in_place_and_continues_tomorrow(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}), say="I write **it**.")
    shell.endpoint.script(write, text("\x1b]0;owned\x07Do", "ne\u202e."), text("Good morning."))
    with shell.in_terminal("chat", "--session", "work") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"write{ALT_ENTER}a.txt{ENTER}")
        terminal.wait_for("I write \x1b[1mit\x1b[0m.")
        question = terminal.wait_for("stop the turn")
        assert "\x1b[32m+hello\x1b[0m" in question
        assert "\x1b[1my\x1b[0m  Allow" in question
        terminal.type("y")
        terminal.wait_for("\\x1b]0;owned\\x07Done\\u202e.")
        assert (shell.place / "a.txt").read_text() == "hello\n"
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        terminal.wait_for("crow chat --session 'work'")
        assert terminal.wait() == 0
    assert "\x1b]0;" not in terminal.shown
    assert '"write\\na.txt"' in shell.asked(0)
    with shell.in_terminal("chat", "--session", "work", "--mode", "auto") as terminal:
        again = terminal.wait_for(READY)
        assert "crow · fake-model · auto · " in again
        assert "write … (+1 lines)" in again
        assert "(1 tool call)" in again
        terminal.type(f"hello again{ENTER}")
        terminal.wait_for("Good morning.")
        terminal.wait_for(READY)
        terminal.type(f"/exit{ENTER}")
        assert terminal.wait() == 0
    assert "Done" in shell.asked()


@pytest.mark.parametrize("look", [(), ("--plain",)], ids=["styled", "plain"])
def test_escape_stops_the_turn_but_an_arrow_key_does_not(shell: Shell, look: tuple[str, ...]) -> None:
    slow, gate = held("half of it \n", "and the rest.")
    begun = sse(chunk({"role": "assistant", "content": "again \n"}), done=False)
    shell.endpoint.script(slow, Reply(steps=(begun, HANG)))
    with shell.in_terminal("chat", *look) as terminal:
        ready, end = ("You: ", ENTER) if look else (READY, "")
        terminal.wait_for(ready)
        terminal.type(f"go{ENTER}")
        terminal.wait_for("half of it")
        terminal.type("" if look else "\x1b[A\x1bOB")
        terminal.type(f"x{ENTER}")
        terminal.wait_for("Queued for after this turn: x" if look else "queued: x")
        terminal.type(f"{ESCAPE}{end}")  # takes it back
        terminal.wait_for("Nothing is queued" if look else "x▏")
        if not look:
            terminal.type("\x15")
        gate.open()
        terminal.wait_for("rest.")  # the line of keys may be drawn before this word
        terminal.wait_for(ready)
        terminal.type(f"go on{ENTER}")
        terminal.wait_for("again")
        terminal.type(f"{ESCAPE}{end}")
        terminal.wait_for("Cancelled.")
        terminal.wait_for(ready)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_ctrl_c_cancels_the_turn_and_the_chat_goes_on(shell: Shell) -> None:
    begun = sse(chunk({"role": "assistant", "content": "half of it \n"}), done=False)
    shell.endpoint.script(Reply(steps=(begun, HANG)), text("More."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"not this{CTRL_C}say it{ENTER}")
        terminal.wait_for("half of it")
        terminal.type(CTRL_C)
        terminal.wait_for("Cancelled.")
        terminal.wait_for(READY)
        terminal.type(f"go on{ENTER}")
        terminal.wait_for("More.")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 130
    assert "half of it" in shell.asked()
    assert "not this" not in shell.asked()


def test_sigterm_during_a_turn_leaves_and_says_how_to_come_back(shell: Shell) -> None:
    shell.endpoint.script(Reply(steps=(sse(chunk({"role": "assistant", "content": "half \n"}), done=False), HANG)))
    with shell.in_terminal("chat", "--plain") as terminal:
        terminal.wait_for("You: ")
        terminal.type("say it\n")
        terminal.wait_for("half")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 130
    assert "crow chat --session crow-" in terminal.shown


def test_crow_alone_opens_the_chat_and_keeps_what_is_typed_while_it_starts(shell: Shell) -> None:
    with shell.in_terminal() as terminal:
        terminal.type(f"the first{ENTER}the sec")
        terminal.wait_for("crow · fake-model")
        terminal.wait_for("Hello there.")
        terminal.wait_for(READY)
        terminal.type(f"ond{ENTER}")
        terminal.wait_for("Hello there.")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert [request.body["messages"][-1]["content"] for request in shell.endpoint.asked] == ["the first", "the second"]


COMPARES_MODES = """
import subprocess, sys, termios
before = termios.tcgetattr(0)
code = subprocess.run(sys.argv[1:]).returncode
print("exit", code, "unchanged", before == termios.tcgetattr(0), flush=True)
"""


@pytest.mark.parametrize("arguments", [["--mode", "none"], ["--no-such-option"]])
def test_a_chat_that_cannot_start_leaves_the_terminal_as_it_was(shell: Shell, arguments: list[str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-I", "-S", "-c", COMPARES_MODES, *fork_server.command(), "chat", *arguments]
    with subprocess.Popen(
        command, cwd=shell.place, env=shell.env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        Terminal(ours, process).wait_for("exit 2 unchanged True")
    os.close(ours)


def held(*pieces: str) -> tuple[Reply, Gate]:
    """An answer whose last piece waits until the gate is open."""
    gate, *first = Gate(), *(sse(chunk({"role": "assistant", "content": piece}), done=False) for piece in pieces[:-1])
    return Reply(steps=(*first, gate, sse(chunk({"content": pieces[-1]}), chunk(finish="stop"), usage()))), gate


def test_text_typed_during_a_turn_is_shown_queued_taken_back_and_sent_afterwards(shell: Shell) -> None:
    slow, gate = held("half of it ", "and the rest.")
    shell.endpoint.script(slow, text("Second."), text("Third."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"begin{ENTER}")
        terminal.wait_for("half of it")
        terminal.type("and then")
        terminal.wait_for("> and then▏")
        terminal.wait_for("Enter queues this for after the turn")
        terminal.type(ENTER)
        terminal.wait_for("queued: and then")
        terminal.type(ESCAPE)
        terminal.wait_for("> and then▏")
        terminal.type(f" go on{ENTER}")
        terminal.wait_for("queued: and then go on")
        terminal.type("left over")
        terminal.wait_for("> left over▏")
        gate.open()
        terminal.wait_for("> and then go on\r\n")
        terminal.wait_for("Second.")
        terminal.wait_for(READY)
        terminal.wait_for("left over")
        terminal.type(ENTER)
        terminal.wait_for("Third.")
    assert [request.body["messages"][-1]["content"] for request in shell.endpoint.asked] == [
        "begin",
        "and then go on",
        "left over",
    ]


def test_a_second_enter_sends_the_text_into_the_running_turn(shell: Shell) -> None:
    slow, gate = held("I think ", "about it.")
    shell.endpoint.script(slow, text("I saw it."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"begin{ENTER}")
        terminal.wait_for("I think")
        terminal.type("use tabs")
        terminal.type(ENTER)
        terminal.wait_for("Enter sends it into this turn")
        terminal.type(ENTER)
        terminal.wait_for("Sent into this turn: use tabs")
        gate.open()
        terminal.wait_for("I saw it.")
        terminal.wait_for(READY)
    assert len(shell.endpoint.asked) == 2
    assert "use tabs" in shell.asked(1)


def test_a_status_is_shown_in_a_pause_and_a_long_turn_calls_the_user(shell: Shell) -> None:
    (shell.home / "config.toml").write_text("[chat]\nnotify_after_s = 0.000001\n")
    slow, gate = held("half of it ", "and the rest.")
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}))
    shell.endpoint.script(slow, write, text("Done."), write)
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"begin{ENTER}")
        terminal.wait_for("half of it")
        terminal.wait_for(" tokens · ask · Esc stops · type to queue or steer\x1b8")
        gate.open()
        terminal.wait_for("\x1b]9;crow has finished\x07\a")
        terminal.wait_for(READY)
        terminal.type(f"write{ENTER}")
        terminal.wait_for("\x1b]9;crow asks for permission\x07\a")
        terminal.wait_for("stop the turn")
        terminal.type("y")
        terminal.wait_for("Done.")
    with shell.in_terminal("chat", "--plain") as terminal:
        terminal.wait_for("You: ")
        terminal.type("again\n")
        terminal.wait_for("\a")
        terminal.wait_for("stop the turn")
    assert "\x1b" not in terminal.shown


def test_a_cancelled_turn_puts_queued_text_into_the_next_prompt(shell: Shell) -> None:
    slow, _ = held("half of it \n", "never")
    shell.endpoint.script(slow, text("More."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"begin{ENTER}")
        terminal.wait_for("half of it")
        terminal.type(f"next one{ENTER}")
        terminal.wait_for("queued: next one")
        terminal.type(CTRL_C)
        terminal.wait_for("Cancelled.")
        terminal.wait_for(READY)
        terminal.wait_for("next one")
        assert len(shell.endpoint.asked) == 1
        terminal.type(ENTER)
        terminal.wait_for("More.")
    assert "next one" in shell.asked(1)


def test_keys_of_an_unfinished_line_do_not_answer_a_question(shell: Shell) -> None:
    slow, gate = held("I write it. ", "")
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}))
    shell.endpoint.script(Reply(steps=(*tuple(slow.steps)[:-1], *write.steps)), text("Done."))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"begin{ENTER}")
        terminal.wait_for("I write it.")
        terminal.type("ma")
        terminal.wait_for("> ma▏")
        gate.open()
        terminal.wait_for("You were typing. Enter: answer this question")
        terminal.type("yyy")
        terminal.type(ENTER)
        terminal.wait_for("stop the turn")
        assert not (shell.place / "a.txt").exists()
        terminal.type("y")
        terminal.wait_for("Done.")
        terminal.wait_for(READY)
        terminal.wait_for("ma")
    assert (shell.place / "a.txt").exists()


def test_in_plain_mode_whole_lines_are_queued_and_sent_into_the_turn(shell: Shell) -> None:
    slow, gate = held("half of it\n\n", "rest.")
    shell.endpoint.script(slow, text("I saw it."), text("Last."))
    with shell.in_terminal("chat", "--plain") as terminal:
        terminal.wait_for("You: ")
        terminal.type("begin\n")
        terminal.wait_for("half of it")
        for line in ("one\n", "two\n"):
            terminal.type(line)
            terminal.wait_for(f"Queued for after this turn: {line.strip()}")
        terminal.type("\n")
        terminal.wait_for("Sent into this turn: one")
        gate.open()
        terminal.wait_for("I saw it.")
        terminal.wait_for("You: two")
        terminal.wait_for("Last.")
    assert "one" in shell.asked(1)
    assert shell.endpoint.asked[2].body["messages"][-1]["content"] == "two"


def test_escape_at_a_question_stops_the_turn(shell: Shell) -> None:
    shell.endpoint.script(calls(("write_file", {"path": "a.txt", "content": "hello\n"})))
    with shell.in_terminal("chat") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"write it{ENTER}")
        terminal.wait_for("stop the turn")
        terminal.type("\x1b")
        terminal.wait_for("Cancelled.")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert not (shell.place / "a.txt").exists()
    assert len(shell.endpoint.asked) == 1


def test_plain_mode_moves_no_cursor_and_uses_words(shell: Shell) -> None:
    (shell.home / "config.toml").write_text(f"""
        [permissions]
        allow = ["s__ask"]
        [mcp_servers.s]
        command = {json.dumps(sys.executable)}
        args = [{json.dumps(str(Path(__file__).parents[1] / "tools" / "servers" / "various.py"))}, "asks"]
        start_timeout_s = 300
    """)
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}))
    shell.endpoint.script(write, calls(("s__ask", {})), text("# Written\n", "**Well** done."))
    with shell.in_terminal("chat", "--plain") as terminal:
        terminal.wait_for("You: ")
        terminal.type("write\\\nit\n")
        terminal.wait_for("Type y, a, n, d, then Enter: ")
        terminal.type("y\n")
        terminal.wait_for("Done: Write a.txt")
        terminal.wait_for("Type y, n, then Enter: ")
        terminal.type("y\n")
        terminal.wait_for("name: ")
        terminal.type("\n")
        terminal.wait_for("This field is required.")
        terminal.wait_for("name: ")
        terminal.type("Ada\n")
        terminal.wait_for("Heading: Written\r\nWell done.")
        terminal.wait_for("You: ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert "added: hello" in terminal.shown
    assert "\x1b" not in terminal.shown
    assert '"write\\nit"' in shell.asked(0)
    assert '\\"name\\": \\"Ada\\"' in shell.asked(2).replace("\\\\", "\\")


def test_the_first_chat_without_a_model_offers_one_and_names_what_can_be_imported(shell: Shell) -> None:
    theirs = shell.home.parent / ".claude" / "projects" / "-repo"
    theirs.mkdir(parents=True)
    (theirs / "11111111-2222-4333-8444-555555555555.jsonl").write_text("{}\n")
    unset = {"CROW_MODEL": "", "OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""}
    for is_first in (True, False):
        with shell.in_terminal("chat", **unset) as terminal:
            terminal.wait_for("1) crow login")
            terminal.wait_for("1, 2 or 3: ")
            terminal.type("2\n")
            start = terminal.wait_for(READY)
            assert ("1 session of claude-code" in start) is is_first
            terminal.type(f"count to 3{ENTER}")
            terminal.wait_for("2\r\n")
            terminal.wait_for(READY)
            terminal.type(CTRL_D)
            assert terminal.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize("look", [(), ("--plain",)])
def test_a_session_a_model_and_a_prompt_are_picked_from_a_list(shell: Shell, look: tuple[str, ...]) -> None:
    ready, question = ("You: " if look else READY), "Enter changes nothing:"
    with shell.in_terminal("chat", "--session", "one", *look) as terminal:
        terminal.wait_for(ready)
        for prompt in ("paint the door", "paint the window"):
            terminal.type(f"{prompt}\r")
            terminal.wait_for("Hello there.")
            terminal.wait_for(ready)
        terminal.type("/model\r")
        terminal.wait_for("1) fake-model (now)")
        terminal.wait_for(question)
        terminal.type("\r")
        terminal.wait_for(ready)
        terminal.type("/rewind\r")
        terminal.wait_for("1) paint the door")
        terminal.wait_for("2) paint the window")
        terminal.wait_for(question)
        terminal.type("paint\r")
        terminal.wait_for("2) paint the window")
        terminal.wait_for(question)
        terminal.type("window\r")
        terminal.wait_for("The model sees nothing")
        terminal.wait_for(ready)
        terminal.type("/session two\r")
        terminal.wait_for(ready)
        terminal.type("/session\r")
        assert "two" in terminal.wait_for("1) ")
        assert " · one · " in terminal.wait_for(question)
        terminal.type("none of it\r")
        terminal.wait_for("Nothing in the list has the words none of it.")
        terminal.wait_for(question)
        terminal.type("1\r")
        terminal.wait_for("> paint the door" if not look else "You: paint the door")
        terminal.wait_for(ready)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_new_goes_on_in_the_session_that_has_the_name_now(shell: Shell) -> None:
    with shell.in_terminal("chat", "--session", "work") as terminal:
        terminal.wait_for(READY)
        terminal.type(f"the old words{ENTER}")
        terminal.wait_for("Hello there.")
        terminal.wait_for(READY)
        terminal.type(f"/new{ENTER}")
        terminal.wait_for("is now the alias of a new session")
        terminal.wait_for(READY)
        terminal.type(f"/session crow-ffff{ENTER}")
        terminal.wait_for('No session "crow-ffff".')
        terminal.wait_for(READY)
        terminal.type(f"the new words{ENTER}")
        terminal.wait_for("Hello there.")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert "the old words" not in shell.asked()


def test_without_a_terminal_the_sentence_names_crow_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat"]) == 2
    assert 'crow run "PROMPT"' in capsys.readouterr().err


def completions(choices: Choices, typed: str) -> list[str]:
    return [each.text for each in ChoicesCompleter(choices).get_completions(Document(typed), CompleteEvent())]


def test_commands_their_arguments_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("src/main.py", "src/deep/Remain.md", "my notes.txt", ".git/main", "evil\u202e.py"):
        (tmp_path / name).touch()
    commands = {"model": "Choose", "mode": "Permissions", "exit": "Leave"}
    choices = Choices(tmp_path, commands, {"model": {"gpt-big": "", "small": ""}, "session": {"crow-1": "Fix bug"}})
    assert completions(choices, "/mo") == ["model", "mode"]
    assert completions(choices, "/model g") == ["gpt-big"]
    assert completions(choices, "/session bug") == ["crow-1"]
    assert completions(choices, "see @src/") == ["src/deep/", "src/main.py"]
    assert completions(choices, "see @main") == ["src/main.py", "src/deep/Remain.md"]
    assert completions(choices, "see @my") == ['"my notes.txt"']
    assert completions(choices, "@ev") == completions(choices, "me@src") == completions(choices, "/model x\n/") == []
    assert list(find_files(tmp_path, "../")) == list(find_files(tmp_path, "/etc/")) == []


def test_only_existing_files_of_the_workspace_are_mentioned(tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    for path in (tmp_path / "secret", place / "a.txt", place / "my notes.txt"):
        path.touch()
    (place / "link").symlink_to(tmp_path / "secret")
    prompt = 'compare @a.txt, @"my notes.txt" and @a.txt with @link, @../secret, @none and me@a.txt'
    assert mentioned_files(prompt, place) == [str(place / "a.txt"), str(place / "my notes.txt")]


def test_the_history_is_private_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chat_history"
    history, is_new = open_history(path)
    history.append_string("one\ntwo")
    assert (is_new, stat.S_IMODE(path.stat().st_mode)) == (True, 0o600)
    path.write_text("\n# time\n+" + "x" * HISTORY_BYTES + "\n\n# time\n+last\n")
    path.chmod(0o644)
    history, is_new = open_history(path)
    assert (is_new, stat.S_IMODE(path.stat().st_mode)) == (False, 0o600)
    assert list(history.load_history_strings()) == ["last"]
    (tmp_path / "link").symlink_to(path)
    assert open_history(tmp_path / "link")[1] is False
    assert os.listdir(tmp_path / "new") == ["chat_history"]


def permission_request(lines: int) -> dict[str, Any]:
    options = ("allow_once", "allow_always", "allow_always", "reject_once", "reject_always")
    command = "\n".join(f"echo {number}" for number in range(lines))
    shown = f"```sh\n{command}\n```\n\nIt is confined."
    return {
        "toolCall": {"title": "`echo`", "content": [{"type": "content", "content": {"type": "text", "text": shown}}]},
        "options": [{"optionId": str(at), "kind": kind, "name": kind} for at, kind in enumerate(options)],
    }


def test_a_question_shows_the_whole_command_with_a_key_for_each_option() -> None:
    words, options = question_of(PLAIN, permission_request(3))
    assert words.splitlines() == ["Allow this? echo", "  | echo 0", "  | echo 1", "  | echo 2", "  It is confined."]
    assert list(keys_of(options)) == ["y", "a", "w", "n", "d"]


def test_a_question_that_is_not_shown_whole_can_only_be_answered_once() -> None:
    words, options = question_of(PLAIN, permission_request(QUESTION_LINES + 1))
    assert words.endswith("2 lines are not shown.\n")
    assert list(keys_of(options)) == ["y", "n"]


@pytest.mark.parametrize(
    "hidden",
    [
        {"anyOf": [{"pattern": "^(a+)+$"}]},
        {"oneOf": [{"anyOf": [{"pattern": "^(a+)+$"}]}]},
        {"items": {"pattern": "^(a+)+$", "oneOf": [{"pattern": "^(a+)+$"}]}},
    ],
)
def test_no_pattern_of_a_server_is_evaluated_for_a_form(hidden: dict[str, Any]) -> None:
    kind = "array" if "items" in hidden else "string"
    typed = "a" * 60 + "!"
    default = [typed] if kind == "array" else typed
    (field,) = fields_of({"properties": {"a": {"type": kind, "default": default, **hidden}}})
    assert field.default_text == typed
    assert field.value_of(typed) == default


def test_the_fields_of_a_form_take_what_their_schema_takes() -> None:
    properties: dict[str, Any] = {
        "name": {"type": "string", "minLength": 2, "pattern": "(a+)+$"},
        "count": {"type": "integer", "minimum": 1, "default": 3},
        "ratio": {"type": "number", "default": "half"},
        "sure": {"type": "boolean", "default": False},
        "level": {"type": "string", "enum": ["l", "h"], "enumNames": ["low", "high"]},
        "parts": {"type": "array", "items": {"anyOf": [{"const": "a", "title": "Ay"}, {"const": "b"}]}},
        "odd": {"type": "object"},
    }
    fields = {field.name: field for field in fields_of({"properties": properties, "required": ["name"]})}
    assert [(name, field.default_text) for name, field in fields.items()] == [
        ("name", ""),
        ("count", "3"),
        ("ratio", ""),
        ("sure", "n"),
        ("level", ""),
        ("parts", ""),
    ]
    typed = {"name": "aa!", "count": " 2 ", "ratio": "0.5", "sure": "Yes", "level": "high", "parts": "1, b"}
    values = {"name": "aa!", "count": 2, "ratio": 0.5, "sure": True, "level": "h", "parts": ["a", "b"]}
    assert {name: fields[name].value_of(text) for name, text in typed.items()} == values
    assert fields["count"].value_of(" ") is None
    bad = {"properties": {"a": {"type": "string", "minLength": "x", "default": "y"}}}
    assert [(field.default_text, field.value_of("z")) for field in fields_of(bad)] == [("y", "z")]
    wrong = {"name": "", "count": "0", "ratio": "x", "sure": "maybe", "level": "3", "parts": "c"}
    assert [name for name, text in wrong.items() if fields[name].takes(text)] == []
    assert [text for text in ("nan", "-inf", "1e999") if fields["ratio"].takes(text)] == [], "JSON has no such number"

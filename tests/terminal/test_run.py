"""`crow run` as a process, against an endpoint on loopback."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from acp_check.recording import read_recording
from acp_check.report import check
from acp_check.schema import SchemaChecker
from crow.cli import main
from crow.domain.entries import NewEntry, TurnEnd
from crow.store import NewSession
from crow.store.importers import TOOLS
from crow.store.importers.parts import stable_id
from crow.store.sqlite.store import SqliteStore
from crow.terminal.answer import json_in
from crow.terminal.numbered import NUMBERED_LINES, numbered_question
from crow.terminal.sessions import _LOOKS_LIKE_ID
from tests.store.scenes import begin
from tests.support.fake_endpoint import HANG, Reply, calls, chunk, failing, sse, text
from tests.support.terminal import Shell


def test_the_answer_is_on_stdout_and_everything_else_on_stderr(shell: Shell) -> None:
    (shell.place / "notes.txt").write_text("crows cache")
    (shell.place / "more.md").write_text("attached words")
    shell.endpoint.script(calls(("read_file", {"path": "notes.txt"}), say="Let me look."), text("They ", "do."))
    code, out, err = shell.crow("run", "do crows cache?", "--file", "more.md", stdin=b"piped words\n")
    assert (code, out) == (0, "Let me look.\n\nThey do.\n")
    assert "• " in err
    assert "notes.txt" in err
    assert all(words in shell.asked(0) for words in ("do crows cache?", "piped words", "attached words"))
    assert "crows cache" in shell.asked(1)


def test_without_a_terminal_a_call_is_refused_with_the_rule_that_allows_it_in_one_run(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.txt", "content": "hello"}))
    shell.endpoint.script(write, text("I could not."), write, text("Done."), write, text("I could not."))
    code, _, err = shell.crow("run", "--session", "work", "write a.txt")
    assert (code, (shell.place / "a.txt").exists()) == (4, False)
    assert "--allow 'write_file(a.txt)'" in err
    code, out, _ = shell.crow("run", "--session", "work", "--allow", "write_file(a.txt)", "--json", "again")
    assert (code, (shell.place / "a.txt").read_text()) == (0, "hello")
    assert json.loads(out.splitlines()[-1])["result"]["files"] == [str(shell.place / "a.txt")]
    (shell.place / "a.txt").unlink()
    code, _, _ = shell.crow("run", "--session", "work", "and again")
    assert (code, (shell.place / "a.txt").exists()) == (4, False)


def test_a_command_whose_change_was_refused_does_not_count_as_done(shell: Shell) -> None:
    """It has run in a layer, so its call ends as completed."""
    shell.endpoint.script(calls(("shell", {"command": "echo hello > a.txt"})), text("Done."))
    code, out, _ = shell.crow("run", "--json", "write a.txt")
    result = json.loads(out.splitlines()[-1])["result"]
    assert (code, result["refused"], result["files"]) == (4, ["shell"], [])
    assert not (shell.place / "a.txt").exists()


@pytest.mark.long
def test_a_run_that_must_be_verified_fails_until_a_check_passes_after_the_last_change(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.py", "content": "x = 1\n"}))
    check = calls(("shell", {"command": "python3 -m py_compile a.py", "access": "full"}))
    allowed = ("--mode", "auto", "--allow", "shell(python3 *)", "--require-verified", "--json")
    shell.endpoint.script(write, text("All tests pass."), write, check, text("Done."), text("Hello."))
    code, out, _ = shell.crow("run", *allowed, "write a.py")
    receipt = json.loads(out.splitlines()[-1])["result"]["receipt"]
    assert (code, receipt["state"], receipt["why"]) == (5, "not verified", "no check ran")
    assert receipt["files"] == ["a.py"]
    assert '"\\n\\nReceipt: not verified' in out
    code, out, _ = shell.crow("run", *allowed, "write a.py again")
    receipt = json.loads(out.splitlines()[-1])["result"]["receipt"]
    assert (code, receipt["state"], [each["exitCode"] for each in receipt["checks"]]) == (0, "verified", [0])
    assert all("Receipt: " not in shell.asked(index) for index in range(5))
    code, out, _ = shell.crow("run", *allowed, "say hello")
    assert (code, json.loads(out.splitlines()[-1])["result"]["receipt"]) == (0, None)
    (listed, *_) = map(json.loads, shell.crow("sessions", "list", "--receipts", "--json")[1].splitlines())
    assert "receipt" in listed
    assert "\t[verified] " in shell.crow("sessions", "list", "--receipts")[1]
    pages = [
        shell.crow("sessions", "export", each.split("\t")[0], "--format", "html")[1]
        for each in shell.crow("sessions", "list", "--receipts")[1].splitlines()
        if "verified]" in each
    ]
    assert all("Receipt: " in page for page in pages)


def test_receipts_can_be_turned_off_and_are_stored_all_the_same(shell: Shell) -> None:
    shell.endpoint.script(calls(("write_file", {"path": "a.py", "content": "x = 1\n"})), text("Done."))
    (shell.home / "config.toml").write_text("[receipts]\nshow = false\n")
    code, out, _ = shell.crow("run", "--mode", "auto", "--json", "write a.py")
    assert (code, json.loads(out.splitlines()[-1])["result"]["receipt"]["state"]) == (0, "not verified")
    assert "Receipt: " not in out


def test_json_lines_are_updates_of_the_protocol_and_one_result(shell: Shell) -> None:
    code, out, _ = shell.crow("run", "hi", "--json")
    *lines, last = map(json.loads, out.splitlines())
    checker = SchemaChecker()
    for line in lines:
        checker.check("agent", line)
    chunks = [line["params"]["update"] for line in lines if line["method"] == "session/update"]
    shown = [each["content"]["text"] for each in chunks if each["sessionUpdate"] == "agent_message_chunk"]
    result = last["result"]
    assert (code, "".join(shown), result["text"]) == (0, "Hello there.", "Hello there.")
    assert (result["stopReason"], result["usage"]) == ("end_turn", {"inputTokens": 10, "outputTokens": 5})
    assert {line["params"]["sessionId"] for line in lines} == {result["sessionId"]}


def test_a_trace_has_every_message_of_the_connection_and_no_secret(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.txt", "content": "sk-abcdefgh12345"}))
    shell.endpoint.script(write, text("No."))
    trace = shell.place / "trace.jsonl"
    shell.env["CROW_TRACE"] = str(trace)
    assert shell.crow("run", "write a.txt")[0] == 4
    assert [verdict.rule.id for verdict in check(read_recording(trace)).verdicts if verdict.findings] == []
    _, shown, _ = shell.crow("trace", "show", "trace.jsonl")
    for words in ("-> initialize", "-> session/prompt", "session/prompt #3 answered", "<- session/request_permission"):
        assert words in shown
    assert "sk-abcdefgh" not in trace.read_text()


def test_a_schema_asks_again_until_it_accepts_the_answer(shell: Shell) -> None:
    (shell.place / "schema.json").write_text('{"type": "object", "required": ["a"]}')
    shell.endpoint.script(text("It is one."), text('{"b": 1}'), text('Here:\n```json\n{"a": [1]}\n```'))
    code, out, _ = shell.crow("run", "--schema", "schema.json", "what is a?")
    assert (code, json.loads(out), len(shell.endpoint.asked)) == (0, {"a": [1]}, 3)
    assert "'a' is a required property" in shell.asked(2)
    code, out, err = shell.crow("run", "--schema", "schema.json", "what is a?")
    assert (code, out, len(shell.endpoint.asked)) == (1, "", 7)
    assert "the answer contains no JSON" in err


def stored(shell: Shell, *ids_and_titles: tuple[str, str]) -> None:
    """Store sessions with one answered prompt each."""

    async def store_them() -> None:
        store = await SqliteStore.open(shell.home / "crow.db")
        try:
            for name, title in ids_and_titles:
                new = NewSession(id=name, cwd=str(shell.place), model="fake-model", mode="ask", title=title)
                await store.create_session(new)
                user = await begin(store, name, f"asked in {name}")
                await store.append(
                    name, leaf=user.id, turn=1, entries=[NewEntry(body=TurnEnd(stop="end_turn"))], release=True
                )
        finally:
            await store.close()

    anyio.run(store_them)


@pytest.mark.long
def test_every_id_start_of_an_id_and_title_opens_its_session(shell: Shell) -> None:
    codex, task, editor = "codex-0198aa11-22bb-7cc3-8dd4-5566778899aa", "task-00ff11ee22dd33cc", "old-editor-id"
    stored(shell, (codex, "Imported once"), (task, "A task"), (editor, "From an editor"))
    for argument, session in (
        *((codex, codex), ("codex-0198aa", codex), ("Imported once", codex)),
        *((task, task), ("task-00f", task), (editor, editor), ("old-ed", editor)),
    ):
        code, _, err = shell.crow("run", "--session", argument, "and now?")
        assert (code, f"asked in {session}" in shell.asked()) == (0, True), argument
        assert "begins" not in err
    assert len(shell.crow("sessions")[1].splitlines()) == 3


def test_what_looks_like_an_id_never_starts_a_session(shell: Shell) -> None:
    stored(shell, ("codex-0198aa11-22bb-7cc3-8dd4-5566778899aa", "Imported once"))
    for argument in ("task-0123", "codex-0198ffff", "opencode-ses_zz", "0198aa11-22bb-7cc3", "crow-f"):
        code, _, err = shell.crow("run", "--session", argument, "hi")
        assert (code, err) == (2, f'crow: No session "{argument}". Run "crow sessions" to list them.\n')
    assert len(shell.crow("sessions")[1].splitlines()) == 1


def test_an_ambiguous_session_is_refused_with_the_candidates(shell: Shell) -> None:
    stored(shell, ("codex-01aa", "Retry policy"), ("codex-01bb", "Something"), ("other-1", "Retry policy"))
    code, _, err = shell.crow("run", "--session", "codex-01", "hi")
    assert code == 2
    assert err == (
        'crow: "codex-01" may mean 2 sessions: codex-01bb ("Something"), codex-01aa ("Retry policy").'
        " Give more of the id.\n"
    )
    for arguments in (["run", "--session", "Retry policy", "hi"], ["sessions", "show", "Retry policy"]):
        code, _, err = shell.crow(*arguments)
        assert (code, "codex-01aa" in err, "other-1" in err) == (2, True, True)
    assert shell.endpoint.asked == []


@pytest.mark.long
def test_a_new_alias_says_that_a_new_session_begins_and_an_empty_one_is_refused(shell: Shell) -> None:
    for name in ("task-list", "pi-hole", "release-2026-11"):
        code, out, err = shell.crow("run", "--session", name, "hi")
        assert (code, out) == (0, "Hello there.\n")
        assert f'crow: No session "{name}" exists, so a new one with this alias begins.\n' in err
        assert "begins" not in shell.crow("run", "--session", name, "hi")[2]
    code, _, err = shell.crow("run", "--session", "", "hi")
    assert (code, err) == (2, "crow: --session is empty; expected the id, alias or title of a session.\n")


def test_a_limit_of_the_command_line_is_named_as_such(shell: Shell) -> None:
    shell.endpoint.script(calls(("read_file", {"path": "a"})), calls(("read_file", {"path": "b"})))
    code, out, err = shell.crow("run", "--max-steps", "1", "hi")
    assert (code, "(--max-steps)" in out + err, "limits.steps_per_turn" in out + err) == (3, True, False)


def test_ids_of_every_imported_tool_look_like_ids() -> None:
    for tool in TOOLS:
        assert _LOOKS_LIKE_ID.fullmatch(stable_id(tool, "one", "two\n"))


def test_a_session_is_continued_by_name_by_id_and_as_the_newest(shell: Shell) -> None:
    for words, arguments in (
        ("first prompt", ("--session", "work")),
        ("second prompt", ("--session", "work")),
        ("third prompt", ("--continue",)),
    ):
        assert shell.crow("run", *arguments, words)[0] == 0
    code, newest, _ = shell.crow("sessions", "--continue")
    assert code == 0
    assert shell.crow("run", "--session", newest.strip(), "--fork", "in a copy")[0] == 0
    assert all(words in shell.asked() for words in ("first prompt", "second prompt", "third prompt", "in a copy"))
    shell.crow("run", "--session", "work", "the last")
    assert "third prompt" in shell.asked()
    assert "in a copy" not in shell.asked()
    code, _, err = shell.crow("run", "--session", "crow-ffff", "hi")
    assert (code, err.strip()) == (2, 'crow: No session "crow-ffff". Run "crow sessions" to list them.')


def test_limits_and_failures_have_exit_codes_of_their_own(shell: Shell) -> None:
    (shell.home / "config.toml").write_text("[model]\ninput_price = 1000000\noutput_price = 1000000\n")
    look = calls(("list_files", {"path": "."}))
    shell.endpoint.script(look, look, failing(400, "no such thing"))
    code, out, err = shell.crow("run", "--max-steps", "1", "hi")
    assert (code, out) == (3, "")
    assert "Stopped after 1 step" in err
    code, _, err = shell.crow("run", "--max-cost", "3", "hi")
    assert (code, len(shell.endpoint.asked)) == (3, 2)
    assert "--max-cost is 3" in err
    code, _, err = shell.crow("run", "hi")
    assert code == 1
    assert "no such thing" in err


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_cancels_and_keeps_what_was_said(shell: Shell, times: int) -> None:
    begun = sse(chunk({"role": "assistant", "content": "half of "}), chunk({"content": "it"}), done=False)
    shell.endpoint.script(Reply(steps=(begun, HANG)))
    with shell.start("run", "--session", "work", "say it") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = b""
        while said != b"half of it":
            said += os.read(process.stdout.fileno(), 100)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        err = process.stderr.read().decode()
        assert process.wait(60) == 130
    assert "continue with: crow run --session crow-" in err
    assert shell.crow("run", "--session", "work", "go on")[0] == 0
    assert "half of it" in shell.asked()


def test_a_terminal_is_asked_and_gets_no_escape_sequences(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}))
    shell.endpoint.script(write, text("\x1b]0;owned\x07done\u202e"))
    with shell.in_terminal("run", "write it") as terminal:
        terminal.wait_for("Number, or y / n: ")
        terminal.type("1\n")
        assert terminal.wait() == 0
    shown = terminal.shown
    assert (shell.place / "a.txt").read_text() == "hello\n"
    assert "+hello" in shown
    assert "1) Allow" in shown
    assert "\x1b]0;" not in shown
    assert "\\x1b]0;owned\\x07done\\u202e" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fork", "hi"], "--fork needs a session to copy"),
        (["--max-steps", "0", "hi"], "--max-steps is 0; expected 1 or more."),
        (["--max-cost", "nan", "hi"], "--max-cost is nan; expected US dollars above 0"),
        (["--mode", "yolo", "hi"], '--mode is "yolo"; expected one of ask, accept-edits, plan, auto.'),
        (["--allow", "shell(a; b)", "hi"], "would allow nothing"),
        (["--cwd", "/nowhere", "hi"], "not an existing directory"),
        (["--schema", "/nowhere", "hi"], "--schema /nowhere: No such file or directory"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere: No such file or directory"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_sent(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (" [1, 2]\n", [1, 2]),
        ('Sure! {"a": {"b": [1]}} is it, not {}.', {"a": {"b": [1]}}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ("{not} [json] {} ", {}),
        ("7", 7),
    ],
)
def test_json_is_found_in_an_answer(answer: str, value: object) -> None:
    assert json_in(answer) == value


def test_deep_and_endless_brackets_in_an_answer_are_no_json() -> None:
    for answer in ("[" * 3_000, '{"a":' * 3_000, "{ [" * 200_000):
        with pytest.raises(ValueError, match="no JSON"):
            json_in(answer)


def permission_request(lines: int) -> dict[str, object]:
    """A request as the front end sends it, about a command of that many lines."""
    kinds = {
        "allow_once": "allow_once",
        "allow_always": "allow_always",
        "allow_writes": "allow_always",
        "reject_once": "reject_once",
        "reject_always": "reject_always",
    }
    text = "\n".join(f"line {number}" for number in range(lines))
    return {
        "toolCall": {"title": "shell", "content": [{"type": "content", "content": {"type": "text", "text": text}}]},
        "options": [{"optionId": name, "kind": kind, "name": name} for name, kind in kinds.items()],
    }


@pytest.mark.parametrize(
    ("typed", "option_id"),
    [
        ("1", "allow_once"),
        ("2", "allow_always"),
        ("3", "allow_writes"),
        ("5", "reject_always"),
        ("y", "allow_once"),
        ("yes", "allow_once"),
        ("n", "reject_once"),
        ("", "reject_once"),
        ("0", "reject_once"),
        ("6", "reject_once"),
        ("9" * 5_000, "reject_once"),
    ],
)
def test_the_numbered_option_is_chosen_and_an_unclear_answer_rejects(typed: str, option_id: str) -> None:
    assert numbered_question(permission_request(3)).option_for(typed) == option_id


def test_a_question_that_is_not_shown_whole_is_not_answered_for_good() -> None:
    question = numbered_question(permission_request(NUMBERED_LINES + 1))
    assert "always" not in question.text
    assert "... (2 more lines)" in question.text
    assert [question.option_for(typed) for typed in ("1", "2", "3")] == ["allow_once", "reject_once", "reject_once"]


def test_a_question_shows_a_diff_with_its_path() -> None:
    request = permission_request(0)
    diff = {"type": "diff", "path": "/repo/a.txt", "oldText": "one\ntwo\n", "newText": "one\n2\n"}
    call = {"title": "Edit a.txt", "content": [diff]}
    lines = numbered_question(request | {"toolCall": call}).text.splitlines()
    assert lines[0] == "Allow this? Edit a.txt"
    assert lines[1] == "/repo/a.txt"
    assert {"-two", "+2"} <= set(lines)


def test_a_run_waits_for_slow_servers_and_names_those_that_do_not_come(shell: Shell) -> None:
    program = str(Path(__file__).parents[1] / "tools" / "servers" / "slow.py")
    tables = [
        f"[mcp_servers.{name}]\ncommand = {json.dumps(sys.executable)}\n"
        f"args = {json.dumps(['-I', '-S', program, when])}\nstart_timeout_s = {seconds}\n"
        for name, when, seconds in (("slow", "2", 300), ("never", str(shell.place / "no-such-file"), 0.5))
    ]
    (shell.home / "config.toml").write_text('[permissions]\nallow = ["slow__*"]\n' + "".join(tables))
    shell.endpoint.script(calls(("slow__ping", {})), text("It answered."))
    code, out, err = shell.crow("run", "ping it")
    assert (code, out) == (0, "It answered.\n")
    offered = [[tool["function"]["name"] for tool in request.body["tools"]] for request in shell.endpoint.asked]
    assert all("slow__ping" in names for names in offered)
    assert "pong" in shell.asked(1)
    assert "MCP server never is not available" in err
    assert "MCP server slow" not in err

"""Hostile text is processed in linear time; quadratic steps would block every session.

Each case has enough text that a quadratic step takes minutes or hours and a linear one less than a second.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from crow.agent.instructions import included_names
from crow.agent.permissions.command_line import MAX_CHARS
from crow.agent.permissions.command_patterns import runs
from crow.agent.permissions.command_risks import find_risk
from crow.agent.permissions.risk_table import RISKS
from crow.agent.permissions.shell_text import simple_words
from crow.agent.turns.stream import without_overlap
from crow.domain.diff import diff_lines
from crow.domain.errors import ArgumentError, ModelError
from crow.domain.messages import ToolSpec
from crow.domain.rendering import in_title
from crow.export import markdown
from crow.export.redact import redactor
from crow.llm.endpoint import EndpointTimeouts
from crow.llm.errors import Origin, model_error, parse_error_response
from crow.llm.tool_calls import tool_name
from crow.store.importers.builder import ConversationBuilder
from crow.store.importers.files import Problems
from crow.store.portable import ExportFile
from crow.terminal.typed import TypedText
from crow.tools.builtin.files import similar_names
from crow.tools.builtin.matching import replace_text
from crow.tools.workspace import DiskWorkspace
from tests.llm.chat.test_chat_completions import ASK, ask, asking
from tests.support import fake_endpoint as fake
from tests.support import fork_server
from tests.support.fake_endpoint import FakeEndpoint

HANG_S = 300
ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_hostile_text_takes_linear_time() -> None:
    command = fork_server.command("from tests.guards import test_linear_time; test_linear_time.run_cases()")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    assert process.returncode == 0, f"the last of these cases did not end: {output.splitlines()[-3:]}"


def run_cases() -> None:
    """Run all cases, printing the name of each one first."""
    for name in (
        "text_tool_calls",
        "answers",
        "failures",
        "titles_and_rules",
        "typed_texts",
        "edits_and_files",
        "exports",
        "imports",
    ):
        print(name, flush=True)
        globals()[name]()


def text_tool_calls() -> None:
    openings = (
        *("<tool_call>f", "<tool_call>f<arg_key>a", "<function=f><parameter=a>", '<invoke name="f"><parameter name="a'),
        *("[TOOL_CALLS]f", "[TOOL_CALLS]f[CALL_ID]x", "<｜tool▁call▁begin｜>f\n{}", "<|python_tag|>f(", "[f(a='"),
        *("<|channel|>commentary to=f", "<|tool_call_begin|>f", "<start_function_call>call:f{a:", "```json\n"),
    )
    pieces = (" ", "\n", "</arg_key><arg_value>", "<parameter=", "<escape>", "f(a=1),", "```\n", "<function=f>", "<|")
    ends = ("!", "</tool_call>")
    bodies = [opening + piece * (30_000 // len(piece)) for opening in openings for piece in pieces]
    anyio.run(tell, [body + ends[place % len(ends)] for place, body in enumerate(bodies)])


def answers() -> None:
    pieces = ("</think>", "<think></think>", "<|channel|>final<|message|>", "<think>\n", "[think]")
    anyio.run(tell, [piece * (2_000_000 // len(piece)) for piece in pieces])
    tool_name("f" + " " * 400_000 + "x", {})
    without_overlap("-" * 64_000, "-" * 64_000)
    without_overlap(" " * 64_000, " " * 64_000)


async def tell(texts: list[str]) -> None:
    """Let a model answer with each of the texts, in one piece."""
    tool = ToolSpec(name="f", description="", input_schema={"type": "object", "properties": {"a": {}}})
    request = replace(ASK, tools=(tool,))
    async with FakeEndpoint() as endpoint, asking(endpoint, timeouts=EndpointTimeouts(), hang_s=HANG_S) as model:
        for text in texts:
            endpoint.script(fake.text(text))
            with suppress(ModelError):
                await ask(model, request)


def failures() -> None:
    for piece in ("<title>", "<title", "<h1>", "<", "1,111,", "tokens 5000 ", "max_tokens ", "image ", "try again in "):
        text = piece * (1_000_000 // len(piece))
        for body in (f"<html>{text}", json.dumps({"error": {"message": f"context {text}"}}), text):
            model_error(parse_error_response(400, body.encode()), Origin())


def titles_and_rules() -> None:
    for piece in (" _", "_ ", " _a", "&a", "]", "`"):
        in_title("x" + piece * 100_000 + "y")
        list(included_names("x" + piece * 100_000 + " @y"))
    for piece in ("@", " @", "`@a", "```\n", "@a,,,"):
        list(included_names(piece * 100_000))
    simple_words("git " * 100_000)
    for piece in (
        "git ",
        "`",
        "$(",
        "${",
        "eval ",
        "env ",
        "find -exec ",
        "sh -c ",
        "{a,",
        "<<a\n",
        '"$(',
        "((",
        "a=$(",
    ):
        runs(piece * 100_000, "git push")
        runs(piece * (MAX_CHARS // len(piece)), "git push")
    for words in (("python", *["-a"] * 50_000), ("sed", *["p"] * 50_000), ("git", "log", *["--a"] * 50_000)):
        find_risk(words, 1)
    for word in ("s/" + "a" * 50_000, *(piece * 50_000 for piece in ("/", ";", "-", "a/.", "--a_", "-Da", "a:"))):
        find_risk(("sed", word), 1)
        for program in RISKS:
            find_risk((program, word), 1)


def typed_texts() -> None:
    typed = TypedText()
    for _ in range(500):
        typed.feed(b"x" * 4_096)
        typed.shown(80)


def edits_and_files() -> None:
    file = "  }\n" * 200_000
    for old in ("}\n" * 100_000 + "{\n", "{\n" + "}\n" * 100_000, " }\n" * 100_000):
        with suppress(ArgumentError):
            replace_text(file, old, "x", every=False, name="a")
    similar_names("ab" * 100, ["ba" * 99 + f"{number:05}" for number in range(10_000)])
    for path in ("a/" * 8_000, "a/" * 500_000):
        with suppress(ArgumentError):
            DiskWorkspace(ROOT).resolve(path)


def exports() -> None:
    redact = redactor(["a secret"], home="/home/me", is_strict=True)
    tokens = (
        "eyJ-",
        "eyJaaaaaaaa.",
        "sk-",
        "a@",
        "a.",
        "://a:",
        "token=",
        "bearer ",
        "-----\n",
        "/home/",
        "C:\\Users\\",
    )
    for unit in tokens:
        redact(unit * 50_000)
    marks = ("*a ", "[", "[a](", "> ", "`a", "a**b", "- ", "|a", "<a ", "![a", "\\[", "_a __b ", "a\n\n  ", "[x](y)")
    for unit in marks:
        markdown.render_markdown(unit * 50_000)
        markdown.render_markdown((unit * 15_000)[: markdown.MAX_CHARS])
    for old, new in (("a\n", "b\n"), ("a\nb\n", "b\na\n"), ("a\n", "a\nb\n")):
        diff_lines(old * 50_000, new * 50_000)
    for unit in ('\\"', '"', '["', "\\"):
        check_import("[" * 300 + '"' + unit * 500_000)


def imports() -> None:
    with closing(ConversationBuilder("s1", cwd="/", parent_id=None, problems=Problems())) as conversation:
        for number in range(200_000):
            conversation.call(str(number), "read", {})
        for number in range(200_000):
            conversation.result(str(number), ())


def check_import(line: str) -> None:
    """Check a file of exported sessions whose second line is `line`."""
    with tempfile.NamedTemporaryFile("w") as written:
        written.write(f'{{"type":"crow","format":1}}\n{line}\n')
        written.flush()
        with closing(ExportFile(Path(written.name))) as file, suppress(ArgumentError):
            file.check()

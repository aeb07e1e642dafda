"""Text that others write takes linear time, however it was made: quadratic steps would stop every session.

Each case runs on so much text that a quadratic step takes many minutes or hours, and a linear one less than a second.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

HANG_S = 300
ROOT = Path(__file__).parents[2]


def test_text_of_models_endpoints_and_repositories_takes_linear_time() -> None:
    command = [sys.executable, "-c", "from tests.guards import test_linear_time; test_linear_time.run_cases()"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    assert process.returncode == 0, f"the last one of these never ended: {output.splitlines()[-3:]}"


def run_cases() -> None:
    """Run each case, after its name was printed."""
    for name in ("text_tool_calls", "answers", "failures", "titles_and_rules", "edits_and_files"):
        print(name, flush=True)
        globals()[name]()


def text_tool_calls() -> None:
    openings = (
        *("<tool_call>f", "<tool_call>f<arg_key>a", "<function=f><parameter=a>", '<invoke name="f"><parameter name="a'),
        *("[TOOL_CALLS]f", "[TOOL_CALLS]f[CALL_ID]x", "<｜tool▁call▁begin｜>f\n{}", "<|python_tag|>f(", "[f(a='"),
        *("<|channel|>commentary to=f", "<|tool_call_begin|>f", "<start_function_call>call:f{a:", "```json\n"),
    )
    pieces = (" ", "\n", "</arg_key><arg_value>", "<parameter=", "<escape>", "f(a=1),", "```\n", "<function=f>", "<|")
    for opening in openings:
        for piece in pieces:
            for end in ("!", "<", "</tool_call>"):
                answer(opening + piece * (60_000 // len(piece)) + end)


def answers() -> None:
    from crow.agent.overlap import without_overlap
    from crow.llm.calls import tool_name

    for piece in ("</think>", "<think></think>", "<|channel|>final<|message|>", "<think>\n", "[think]"):
        answer(piece * (8_000_000 // len(piece)))
    tool_name("f" + " " * 400_000 + "x", {})
    without_overlap("-" * 64_000, "-" * 64_000)
    without_overlap(" " * 64_000, " " * 64_000)


def answer(text: str) -> None:
    """An answer of a model, as it comes in one piece."""
    import json

    from crow.domain.errors import ModelError
    from crow.domain.messages import ToolSpec
    from crow.llm.parser import StreamParser

    parser = StreamParser(
        [ToolSpec(name="f", description="", input_schema={"type": "object", "properties": {"a": {}}})]
    )
    parser.feed(json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}))
    parser.feed("[DONE]")
    with suppress(ModelError):
        parser.finish()


def failures() -> None:
    import json

    from crow.llm.failures import Origin, complaint_of_response, failure

    for piece in ("<title>", "<title", "<h1>", "<", "1,111,", "tokens 5000 ", "max_tokens ", "image ", "try again in "):
        text = piece * (2_000_000 // len(piece))
        for body in (f"<html>{text}", json.dumps({"error": {"message": f"context {text}"}}), text):
            failure(complaint_of_response(400, body.encode()), Origin())


def titles_and_rules() -> None:
    from crow.agent.command_words import mentions, simple_words
    from crow.domain.titles import in_title

    for piece in (" _", "_ ", " _a", "&a", "]", "`"):
        in_title("x" + piece * 200_000 + "y")
    simple_words("git " * 200_000)
    mentions("git " * 200_000, ("git", "push"))


def edits_and_files() -> None:
    from crow.domain.errors import ArgumentError
    from crow.tools.builtin.files import similar_names
    from crow.tools.builtin.replace import replace
    from crow.tools.workspace import DiskWorkspace

    file = "  }\n" * 400_000
    for old in ("}\n" * 200_000 + "{\n", "{\n" + "}\n" * 200_000, " }\n" * 200_000):
        with suppress(ArgumentError):
            replace(file, old, "x", every=False, name="a")
    similar_names("ab" * 100, ["ba" * 99 + f"{number:05}" for number in range(10_000)])
    for path in ("a/" * 8_000, "a/" * 500_000):
        with suppress(ArgumentError):
            DiskWorkspace(ROOT).resolve(path)

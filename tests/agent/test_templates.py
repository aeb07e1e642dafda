"""Tests the user's own commands and the arguments of server prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.templates import ParsedCommand, Template, hint_of, parse_arguments, parse_prompt_call, read_templates
from crow.domain.entries import User
from crow.domain.errors import ArgumentError
from crow.tools.servers import PromptArgument, ServerPrompt, StdioServer
from tests.agent.harness import Tools, opened, text
from tests.support.scripted_model import ScriptedModel


def offered(*arguments: str) -> ServerPrompt:
    """A prompt with these arguments; those with a question mark are optional."""
    made = (PromptArgument(name=name.rstrip("?"), required=not name.endswith("?")) for name in arguments)
    return ServerPrompt(name="srv:p", server="srv", description="", arguments=tuple(made))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("/srv:p", ParsedCommand(name="srv:p", argument="")),
        ("/srv:p  a\n b ", ParsedCommand(name="srv:p", argument="a\n b")),
        ("/srv:p.q", None),
        ("/srv", None),
        ("srv:p", None),
        ("/:p", None),
        ("/C:\\x y", None),
        ("/srv:p/q", None),
    ],
)
def test_typed_server_prompt_is_recognised(text: str, call: ParsedCommand | None) -> None:
    assert parse_prompt_call(text) == call


@pytest.mark.parametrize(
    ("arguments", "text", "filled", "rest"),
    [
        ((), "", {}, ""),
        ((), "and be brief", {}, "and be brief"),
        (("a",), 'one "two  three', {"a": 'one "two  three'}, ""),
        (("a",), "one  two", {"a": "one  two"}, ""),
        (("a",), '"one  two"', {"a": "one  two"}, ""),
        (("a",), "a=one two", {"a": "one"}, "two"),
        (("a",), r"C:\temp\new", {"a": r"C:\temp\new"}, ""),
        (("a", "b"), r"\d+ 'a \ b'", {"a": r"\d+", "b": r"a \ b"}, ""),
        (("a?",), "", {}, ""),
        (("a", "b"), "one two three", {"a": "one", "b": "two three"}, ""),
        (("a", "b"), "'one two' three", {"a": "one two", "b": "three"}, ""),
        (("a", "b?"), "one", {"a": "one"}, ""),
        (("a", "b"), "b=two one", {"a": "one", "b": "two"}, ""),
        (("a", "b"), 'b="two 2" a=x=y', {"a": "x=y", "b": "two 2"}, ""),
        (("a?", "b?"), "c=1", {"a": "c=1"}, ""),
    ],
)
def test_words_fill_the_arguments(arguments: tuple[str, ...], text: str, filled: dict[str, str], rest: str) -> None:
    assert parse_arguments(offered(*arguments), text) == (filled, rest)


def test_missing_argument_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"`/srv:p` needs `b`\. Type `/srv:p a b \[c\]`"):
        parse_arguments(offered("a", "b", "c?"), "one")
    assert hint_of(offered("a", "b?")) == "a [b]"


@given(st.lists(st.sampled_from(["a", "b?", "c"]), unique=True), st.text())
def test_any_text_fills_the_arguments_or_is_refused(arguments: list[str], text: str) -> None:
    try:
        found, _ = parse_arguments(offered(*arguments), text)
    except ArgumentError:
        return
    assert found.keys() <= {name.rstrip("?") for name in arguments}


@pytest.mark.parametrize(
    ("content", "template"),
    [
        ("# Tidy up\n\nTidy the imports.\n", ("Tidy up", "", "# Tidy up\n\nTidy the imports.")),
        ("Fix $ARGUMENTS", ("Fix $ARGUMENTS", "arguments", "Fix $ARGUMENTS")),
        (
            '---\ndescription: "Look again"\nargument-hint: a file\nmodel: x\n---\nLook at it.\n',
            ("Look again", "a file", "Look at it."),
        ),
    ],
)
def test_markdown_file_is_a_command(tmp_path: Path, content: str, template: tuple[str, str, str]) -> None:
    (tmp_path / "mine.md").write_text(content)
    description, hint, body = template
    assert read_templates(tmp_path) == (Template(name="mine", description=description, hint=hint, text=body),)


def test_invalid_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text("---\ndescription: x\n---\n")
    (tmp_path / "help.md").write_text("mine")
    (tmp_path / "bad name.md").write_text("x")
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert read_templates(tmp_path, taken=["help"]) == ()
    assert read_templates(tmp_path / "nowhere") == ()


def test_argument_without_placeholder_is_appended() -> None:
    template = Template(name="a", description="", hint="", text="Do it.")
    assert (template.prompt(""), template.prompt("now")) == ("Do it.", "Do it.\n\nnow")


class HangingPrompts(Tools):
    """A toolbox whose server never answers when a prompt is needed."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked = anyio.Event()

    async def prompt(self, name: str) -> ServerPrompt | None:
        self.asked.set()
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_prompt_that_is_cancelled_while_its_server_fills_it_in_stays_in_the_history(tmp_path: Path) -> None:
    toolbox = HangingPrompts()
    stops: list[str] = []

    @asynccontextmanager
    async def open_tools(*_: object, **__: object) -> AsyncIterator[Tools]:
        yield toolbox

    servers = [StdioServer(name="srv", command="srv")]
    async with opened(tmp_path, ScriptedModel(), servers=servers, open_tools=open_tools) as run:

        async def prompt() -> None:
            stops.append(await run.session.prompt(text("/srv:p one")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await toolbox.asked.wait()
            run.session.cancel()
        assert stops == ["cancelled"]
        assert await run.kinds() == ["User", "TurnEnd"]
        assert [user.parts for user in run.client.stored(User)] == [text("/srv:p one")]
        assert await run.store.queued("s1") == ()

"""Prompts of MCP servers: `/server:prompt` and its arguments."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.templates import CalledPrompt, TemplateArguments, called, filling, hint_of
from crow.domain.entries import User
from crow.domain.errors import ArgumentError
from crow.tools import PromptArgument, ServerPrompt, StdioServer
from tests.agent.harness import Tools, opened, text
from tests.support.scripted_model import ScriptedModel


def offered(*arguments: str) -> ServerPrompt:
    """A prompt with these arguments; a question mark marks those that may be left out."""
    made = (PromptArgument(name=name.rstrip("?"), required=not name.endswith("?")) for name in arguments)
    return ServerPrompt(name="srv:p", server="srv", description="", arguments=tuple(made))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("/srv:p", CalledPrompt(name="srv:p", argument="")),
        ("/srv:p  a\n b ", CalledPrompt(name="srv:p", argument="a\n b")),
        ("/srv:p.q", None),
        ("/srv", None),
        ("srv:p", None),
        ("/:p", None),
        ("/C:\\x y", None),
        ("/srv:p/q", None),
    ],
)
def test_what_looks_like_a_prompt_of_a_server(text: str, call: CalledPrompt | None) -> None:
    assert called(text) == call


@pytest.mark.parametrize(
    ("arguments", "text", "filled", "rest"),
    [
        ((), "", {}, ""),
        ((), "and be brief", {}, "and be brief"),
        (("a",), 'one "two  three', {"a": 'one "two  three'}, ""),
        (("a",), "one  two", {"a": "one  two"}, ""),
        (("a",), '"one  two"', {"a": "one  two"}, ""),
        (("a",), "a=one two", {"a": "one"}, "two"),
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
    assert filling(offered(*arguments), text) == TemplateArguments(arguments=filled, rest=rest)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"`/srv:p` needs `b`\. Type `/srv:p a b \[c\]`"):
        filling(offered("a", "b", "c?"), "one")
    assert hint_of(offered("a", "b?")) == "a [b]"


@given(st.lists(st.sampled_from(["a", "b?", "c"]), unique=True), st.text())
def test_any_text_fills_or_is_refused(arguments: list[str], text: str) -> None:
    try:
        found = filling(offered(*arguments), text)
    except ArgumentError:
        return
    assert found.arguments.keys() <= {name.rstrip("?") for name in arguments}


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

"""What is typed after `/server:prompt`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.templates import CalledPrompt, called, hint_of, parse_arguments
from crow.domain.errors import ArgumentError
from crow.tools import PromptArgument, ServerPrompt


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
    assert parse_arguments(offered(*arguments), text) == (filled, rest)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"`/srv:p` needs `b`\. Type `/srv:p a b \[c\]`"):
        parse_arguments(offered("a", "b", "c?"), "one")
    assert hint_of(offered("a", "b?")) == "a [b]"


@given(st.lists(st.sampled_from(["a", "b?", "c"]), unique=True), st.text())
def test_any_text_fills_or_is_refused(arguments: list[str], text: str) -> None:
    try:
        found, _ = parse_arguments(offered(*arguments), text)
    except ArgumentError:
        return
    assert found.keys() <= {name.rstrip("?") for name in arguments}

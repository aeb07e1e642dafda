"""Lets the user pick a session, a model or a prompt from a numbered list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from crow.domain.text import on_one_line
from crow.terminal.render import cut

SHOWN = 15
"""The maximum number of choices that are listed at once. So the list and the question fit into a small terminal."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A line of the list."""

    value: str
    """The value that the choice stands for, such as the id of a session."""
    words: str
    """The text that the user sees."""


async def pick(
    choices: Sequence[Choice],
    *,
    columns: int,
    is_newest_last: bool,
    show: Callable[[str], Awaitable[None]],
    ask: Callable[[str], Awaitable[str]],
) -> str | None:
    """Let the user pick a choice by its number, or by words in it, and return its value. Return None if the user picks
    nothing.

    If several choices contain the words, the list is shortened to these choices, which keep their numbers. A long list
    shows only its end if `is_newest_last` is true, otherwise only its start.
    """
    listed = list(enumerate(choices, 1))
    while True:
        shown = listed[-SHOWN:] if is_newest_last else listed[:SHOWN]
        lines = [cut(f"{number:>3}) {on_one_line(choice.words)}", columns) for number, choice in shown]
        if len(shown) < len(listed):
            lines.append(f"     … {len(listed) - len(shown)} more; type a word to find them")
        await show("\n".join(lines))
        typed = (await ask("Type a number, or words to search; Enter changes nothing: ")).strip()
        if not typed:
            return None
        numbers = [str(number) for number in range(1, len(choices) + 1)]
        if typed in numbers:
            return choices[numbers.index(typed)].value
        found = _find(choices, typed)
        if len(found) == 1:
            return found[0][1].value
        if not found:
            await show(f"Nothing in the list has the words {on_one_line(typed)}.")
        listed = found or list(enumerate(choices, 1))


def _find(choices: Sequence[Choice], typed: str) -> list[tuple[int, Choice]]:
    """Return the choices that have all these words, with their numbers. If `typed` is the value of a choice, return
    only that choice."""
    words = typed.casefold().split()
    found = []
    for number, choice in enumerate(choices, 1):
        if typed == choice.value:
            return [(number, choice)]
        if all(word in f"{choice.value} {choice.words}".casefold() for word in words):
            found.append((number, choice))
    return found

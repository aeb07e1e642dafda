"""Undoes slips that models make when they copy text from a file.

A slip is a change that both texts of an edit have, such as line numbers in front of each line. It counts as a slip only
if both texts have it, and it is undone in both. Each function of `_SLIPS` knows one slip and yields the texts without
it, or nothing if the texts do not have it. The file is not looked at here: the caller tries the texts one after another
and takes the first that match exactly.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from crow.tools.builtin.folding import LOOK_ALIKES, is_look_alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """The old and new text that a model probably means."""

    old: str
    new: str
    remark: str = ""
    """Which slip was undone, for the model. Empty if the texts are as the model gave them."""
    is_whole_lines: bool = False
    """If set, the texts must match whole lines. Within a line, a `-` or a number is probably meant, so it is no
    slip."""


def without_slips(old: str, new: str) -> Iterator[Meant]:
    """For each slip that the texts have, yield the texts without it, the most certain slip first. If the old and the
    new text would then be the same, they are left out."""
    for slip in _SLIPS:
        for meant in slip(old, new):
            if meant.old and meant.old != meant.new:
                yield meant


_NUMBER = re.compile(r"\A[ \t]*(\d+)(?:\t|→|\||:)")
_SPACED_NUMBER = re.compile(r"\A[ \t]*(\d+)(?:→|\||:) ")
_FENCE = re.compile(r"\A\s*(```+|~~~+)[^\n`]*\n(.*?)\n?\1[ \t]*\n?\Z", re.DOTALL)
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|nbsp|#\d{1,6}|#[xX][0-9a-fA-F]{1,5});")
_ESCAPE = re.compile(r"\\([nt\"'\\])")
_ESCAPED = {"n": "\n", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def _without_numbers(old: str, new: str) -> Iterator[Meant]:
    """Undo line numbers in front of each line, as grep and other agents show them. Some agents put a space after the
    numbers."""
    found = [_NUMBER.match(line) for line in old.removesuffix("\n").split("\n")]
    numbers = [int(match[1]) if match else -1 for match in found]
    if -1 in numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return
    lines = new.split("\n")
    matches = [_NUMBER.match(line) for line in lines]
    if any(matches) and not all(match or not line for match, line in zip(matches, lines, strict=True)):
        return
    for number in (_NUMBER, _SPACED_NUMBER):
        bare_old, bare_new = (
            "\n".join(number.sub("", line, count=1) for line in text.split("\n")) for text in (old, new)
        )
        yield Meant(old=bare_old, new=bare_new, remark="the line numbers were left out", is_whole_lines=True)


def _without_fence(old: str, new: str) -> Iterator[Meant]:
    """Undo a Markdown fence around the text, and line numbers in it."""
    fenced, fenced_new = _FENCE.match(old), _FENCE.match(new)
    if fenced is None or (fenced_new is None and "```" in new):
        return
    bare_old, bare_new = fenced[2], fenced_new[2] if fenced_new else new
    yield Meant(old=bare_old, new=bare_new, remark="the code fence was left out")
    yield from _without_numbers(bare_old, bare_new)


def _without_diff_marks(old: str, new: str) -> Iterator[Meant]:
    """Undo the marks of a diff: `-` in front of old lines, `+` in front of new ones, and a space before the others."""
    olds, news = old.removesuffix("\n").split("\n"), new.removesuffix("\n").split("\n") if new else []
    is_marked = (
        all(line[:1] in ("-", " ", "") for line in olds)
        and all(line[:1] in ("+", " ", "") for line in news)
        and any(line.startswith("-") for line in olds)
        and (any(line.startswith("+") for line in news) or not news)
    )
    if is_marked:
        yield Meant(
            old="\n".join(line[1:] for line in olds) + "\n" * old.endswith("\n"),
            new="\n".join(line[1:] for line in news) + "\n" * (new.endswith("\n") and bool(news)),
            remark="the diff markers were left out",
            is_whole_lines=True,
        )


def _without_entities(old: str, new: str) -> Iterator[Meant]:
    """Undo HTML entities. Only those that occur in the old text are known to be a slip."""
    kinds = {match[0] for match in _ENTITY.finditer(old)}
    if kinds and not {match[0] for match in _ENTITY.finditer(new)} - kinds:
        plain_old, plain_new = (_ENTITY.sub(lambda match: html.unescape(match[0]), each) for each in (old, new))
        yield Meant(old=plain_old, new=plain_new, remark="HTML entities were decoded")


def _without_escapes(old: str, new: str) -> Iterator[Meant]:
    """Undo one level of backslash escapes. Only those that occur in the old text are known to be a slip."""
    kinds = {match[1] for match in _ESCAPE.finditer(old)}
    if kinds and not {match[1] for match in _ESCAPE.finditer(new)} - kinds:
        plain_old, plain_new = (_ESCAPE.sub(lambda match: _ESCAPED[match[1]], each) for each in (old, new))
        yield Meant(old=plain_old, new=plain_new, remark="one level of backslash escapes was undone")


def _without_blank_lines(old: str, new: str) -> Iterator[Meant]:
    """Leave out the blank lines before and after the old text, and as many before and after the new text."""
    # The first of the line ends at the end belongs to the last line with text.
    before, after = len(old) - len(old.lstrip("\n")), max(0, len(old) - len(old.rstrip("\n")) - 1)
    is_shared = new.startswith("\n" * before) and new.endswith("\n" * (after + 1)) and len(new) > before + after
    is_shared = is_shared or (not after and new.startswith("\n" * before))
    if (before or after) and is_shared and old.strip("\n"):
        yield Meant(
            old=old[before : len(old) - after],
            new=new[before : len(new) - after],
            remark="blank lines around the text were left out",
        )


def _without_look_alikes(old: str, new: str) -> Iterator[Meant]:
    """Write plain characters for look-alikes and odd spaces. Only those that occur in the old text are known to be a
    slip."""
    plain = {ord(each): LOOK_ALIKES.get(ord(each), " ") for each in set(old) if is_look_alike(each)}
    if plain:
        yield Meant(
            old=old.translate(plain), new=new.translate(plain), remark="characters that look alike were written plainly"
        )


_SLIPS: tuple[Callable[[str, str], Iterator[Meant]], ...] = (
    _without_numbers,
    _without_fence,
    _without_diff_marks,
    _without_entities,
    _without_escapes,
    _without_blank_lines,
    _without_look_alikes,
)

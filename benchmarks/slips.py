"""Edits with slips that models make, judged as a user would: `python -m benchmarks.slips [--tree DIR] [--show SLIP]`.

Unlike benchmarks.edits, the calls run as a model makes them: with files on disk, in many encodings, as `edit_file`,
`write_file` or `apply_patch`. A refused call gets one more try, made from nothing but the words of the refusal. The
score is: right, plus refused and repaired in that one step, minus ten times wrong. The code is the standard library of
Python, or any tree of source files.
"""

from __future__ import annotations

import asyncio
import html
import re
import sys
import sysconfig
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeAlias

from benchmarks.rows import Row, arguments, report
from benchmarks.tools import call, toolbox, unwatched
from crow.tools import Outcome
from crow.tools.mcp.client import McpToolbox

__all__ = ["SLIPS"]

COUNT = 354
WANTED = 320
Verdict: TypeAlias = Literal["right", "repaired", "useless", "wrong"]
SUFFIXES = {".py", ".js", ".ts", ".c", ".h", ".go", ".rs", ".java", ".rb", ".css"}
_NUMBERED = re.compile(r"^(\d+)\t(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One edit of one file."""

    slip: str
    text: str
    """The file, with LF line ends."""
    old: str
    new: str
    goal: str | None
    """The file after the edit. None if the edit must not change it."""
    first: int
    """The index of the first line that is meant."""
    count: int
    """How many lines are meant."""
    name: str = "nest.py"
    codec: str = "utf-8"
    ends: str = "\n"
    is_read: bool = False
    """Whether the model has read the file before."""
    read_text: str | None = None
    """What the file contained when the model read it, if that was something else."""
    accepts: str = ""
    """Words of a refusal after which nothing is left to do."""
    tool: str = "edit_file"
    path: str = ""
    """The path in the call, if it is not the file's."""
    more: Mapping[str, Any] | None = None
    """More arguments of the call."""
    sections: str = ""
    """More sections of a patch. `{}` stands for the directory."""
    others: tuple[tuple[str, str | None, str | None], ...] = ()
    """The files of these sections: name, text before, and text after the patch. None if there is no such file."""

    def encoded(self, text: str) -> bytes:
        return text.replace("\n", self.ends).encode(self.codec)

    @property
    def meant(self) -> list[str]:
        return self.text.split("\n")[self.first : self.first + self.count]


Slip: TypeAlias = Callable[[Case, Random], Case | None]


def sources(tree: Path) -> list[Path]:
    return sorted(path for path in tree.rglob("*") if path.suffix in SUFFIXES and 2_000 < path.stat().st_size < 90_000)


def cases(count: int, seed: int, tree: Path) -> Iterator[Case]:
    """Yield `count` cases, each slip in turn."""
    random = Random(seed)
    paths = sources(tree)
    made = tries = 0
    while made < count and tries < 400 * count:
        tries += 1
        name, slip = SLIPS[made % len(SLIPS)]
        plain = _plain(random.choice(paths), random)
        case = None if plain is None else slip(plain, random)
        if case is not None and (case.old != case.new or case.accepts):
            made += 1
            yield replace(case, slip=name)


def _plain(path: Path, random: Random) -> Case | None:
    try:
        text = path.read_text("utf-8").replace("\r", "")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    count = random.randint(3, 7)
    if len(lines) < 50 or "```" in text or "�" in text:
        return None
    first = random.randrange(2, len(lines) - count - 3)
    old = lines[first : first + count]
    code = [at for at, line in enumerate(old) if len(line.strip()) > 6]
    if len(code) < 3 or not old[0].strip() or not old[-1].strip() or text.count("\n".join(old)) != 1:
        return None
    if len({line.strip() for line in lines[first : first + count]}) < count or max(map(len, old)) > 160:
        return None
    at = random.choice(code)
    indent = old[at][: len(old[at]) - len(old[at].lstrip())]
    new = list(old)
    match random.randrange(4):
        case 0:
            word = random.choice(re.findall(r"\w+", old[at]) or ["x"])
            new[at] = old[at].replace(word, f"{word}_2", 1)
        case 1:
            new[at : at + 1] = [old[at], f"{indent}if (ready):", f"{indent}{_unit(lines)}nest.add({at})"]
        case 2:
            del new[at]
        case _:
            new[at] = f"{indent}replaced(by, {random.randrange(90)})"
    joined_old, joined_new = "\n".join(old), "\n".join(new)
    if joined_old == joined_new or not joined_new.strip():
        return None
    goal = "\n".join([*lines[:first], *new, *lines[first + count :]])
    name = f"nest{path.suffix}"
    return Case(slip="", text=text, old=joined_old, new=joined_new, goal=goal, first=first, count=count, name=name)


def _unit(lines: Sequence[str]) -> str:
    """One level of indentation in this file."""
    if sum(line.startswith("\t") for line in lines) > sum(line.startswith(" ") for line in lines):
        return "\t"
    return "  " if any(re.match(r"  \S", line) for line in lines) else "    "


def _both(change: Callable[[str], str]) -> Slip:
    """Spoil both texts of the call in the same way."""

    def spoil(case: Case, random: Random) -> Case | None:
        old, new = change(case.old), change(case.new)
        return None if old in case.text else replace(case, old=old, new=new)

    return spoil


def _in_old(change: Callable[[str], str]) -> Slip:
    """Spoil old_text only, in such a way that the edit must be refused or made right."""

    def spoil(case: Case, random: Random) -> Case | None:
        old = change(case.old)
        return None if old in case.text or not old.strip() else replace(case, old=old)

    return spoil


def _lines(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: "\n".join(change(line) if line.strip() else line for line in text.split("\n"))


def _in_file(change: Callable[[str], str]) -> Slip:
    """The lines of the file that the edit keeps look otherwise than the model writes them."""

    def spoil(case: Case, random: Random) -> Case | None:
        old, new = case.old.split("\n"), case.new.split("\n")
        shared = [line for line in old if line.strip() and line in new and change(line) != line]
        if not shared or case.goal is None:
            return None
        line = random.choice(shared)
        if line == old[-1]:
            return None
        changed = change(line)
        lines, goal = case.text.split("\n"), case.goal.split("\n")
        lines[case.first + old.index(line)] = changed
        goal[case.first + new.index(line)] = changed
        return replace(case, text="\n".join(lines), goal="\n".join(goal))

    return spoil


def _less(case: Case, random: Random) -> Case | None:
    indents = [len(line) - len(line.lstrip()) for line in f"{case.old}\n{case.new}".split("\n") if line.strip()]
    return _both(_lines(lambda line: line[min(indents) :]))(case, random) if min(indents) else None


def _reindented(unit: str) -> Slip:
    def change(line: str) -> str:
        body = line.lstrip(" \t")
        width = len(line[: len(line) - len(body)].expandtabs(4))
        return unit * (width // 4) + body

    def spoil(case: Case, random: Random) -> Case | None:
        indents = re.findall(r"^[ \t]*(?=\S)", f"{case.old}\n{case.new}", re.MULTILINE)
        has_units = all(len(indent.expandtabs(4)) % 4 == 0 for indent in indents)
        return _both(_lines(change))(case, random) if has_units else None

    return spoil


def _numbers(form: str) -> Slip:
    def spoil(case: Case, random: Random) -> Case | None:
        def number(text: str) -> str:
            return "\n".join(form.format(case.first + 1 + at, line) for at, line in enumerate(text.split("\n")))

        return replace(case, old=number(case.old), new=number(case.new))

    return spoil


def _numbers_in_old(case: Case, random: Random) -> Case:
    lines = case.old.split("\n")
    return replace(case, old="\n".join(f"{case.first + 1 + at}\t{line}" for at, line in enumerate(lines)))


def _diffed(case: Case, random: Random) -> Case | None:
    """Both texts are the lines of a diff, with a space before those that stay."""
    old, new = case.old.split("\n"), case.new.split("\n")
    kept = {line for line in old if line in new}
    if len(kept) == len(old) or len(kept) == len(new):
        return None

    def marked(lines: Sequence[str], mark: str) -> str:
        return "\n".join((" " if line in kept else mark) + line for line in lines)

    return replace(case, old=marked(old, "-"), new=marked(new, "+"))


def _escaped_quotes(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _skipped(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    inner = [at for at in range(1, len(lines) - 1) if lines[at].strip()]
    del lines[random.choice(inner)]
    return replace(case, old="\n".join(lines)) if "\n".join(lines) not in case.text else None


def _other_word(case: Case, random: Random) -> Case | None:
    words = sorted(set(re.findall(r"[A-Za-z_]{5,}", case.old)))
    word = random.choice(words) if words else ""
    return _in_old(lambda text: text.replace(word, word[:-1] + "ed"))(case, random) if word else None


def _reworded_comment(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    comments = [at for at, line in enumerate(lines) if line.strip().startswith(("#", "//", "*")) and len(line) > 24]
    if not comments:
        return None
    at = random.choice(comments)
    words = lines[at].rstrip().split(" ")
    lines[at] = " ".join([*words[:-2], "so", *words[-1:]])
    return replace(case, old="\n".join(lines)) if "\n".join(lines) != case.old else None


def _wrapped(case: Case, random: Random) -> Case | None:
    """A formatter has wrapped a line since, or the model remembers it wrapped."""
    lines = case.old.split("\n")
    for at, line in enumerate(lines):
        found = re.fullmatch(r"(\s*)([\w.= ]+\()([^()]+)(\)[;:]?)", line)
        if found:
            unit = found[1] + "    "
            lines[at : at + 1] = [
                found[1] + found[2],
                *(f"{unit}{part.strip()}," for part in found[3].split(",")),
                found[1] + found[4],
            ]
            return replace(case, old="\n".join(lines))
    return None


def _joined(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    at = random.randrange(len(lines) - 1)
    lines[at : at + 2] = [f"{lines[at].rstrip()} {lines[at + 1].strip()}"]
    return replace(case, old="\n".join(lines)) if lines[at].strip() and "\n".join(lines) not in case.text else None


def _twice(case: Case, random: Random) -> Case | None:
    """The same lines stand in a second place."""
    lines = case.text.split("\n")
    again = [*lines, "", "# another nest", *case.meant, "# its end", ""]
    if case.goal is None:
        return None
    goal = [*case.goal.split("\n"), *again[len(lines) :]]
    return replace(case, text="\n".join(again), goal="\n".join(goal))


def _everywhere(case: Case, random: Random) -> Case | None:
    word = next((word for word in re.findall(r"[A-Za-z_]{5,}", case.old) if case.text.count(word) > 2), "")
    if not word:
        return None
    return replace(case, old=word, new=f"{word}_2", goal=case.text.replace(word, f"{word}_2"), more={"all": True})


def _applied(case: Case, random: Random) -> Case | None:
    if case.goal is None or case.old in case.goal or len(case.new.strip()) < 30:
        return None
    count = case.new.count("\n") + 1
    return replace(case, text=case.goal, goal=None, count=count, accepts="already")


def _changed_here(case: Case, random: Random) -> Case | None:
    """Somebody changed a meant line after the model had read the file."""
    old, new = case.old.split("\n"), case.new.split("\n")
    shared = [line for line in old if line in new and len(line.strip()) > 4]
    if not shared or case.goal is None:
        return None
    line = random.choice(shared)
    lines, goal = case.text.split("\n"), case.goal.split("\n")
    lines[case.first + old.index(line)] = f"{line} // others"
    goal[case.first + new.index(line)] = f"{line} // others"
    return replace(case, text="\n".join(lines), goal="\n".join(goal), is_read=True, read_text=case.text)


def _changed_elsewhere(case: Case, random: Random) -> Case | None:
    if case.goal is None:
        return None
    return replace(
        case, text=f"// others\n{case.text}", goal=f"// others\n{case.goal}", first=case.first + 1, is_read=True,
        read_text=case.text,
    )  # fmt: skip


def _placeholder(stub: str) -> Slip:
    def spoil(case: Case, random: Random) -> Case | None:
        new = case.new.split("\n")
        if len(new) < 4 or len(case.old.split("\n")) < 4:
            return None
        mark = "#" if case.name.endswith((".py", ".rb")) else "//"
        return replace(case, new="\n".join([new[0], stub.format(mark), new[-1]]))

    return spoil


def _placeholder_in_old(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    mark = "#" if case.name.endswith((".py", ".rb")) else "//"
    return (
        replace(case, old="\n".join([lines[0], f"{mark} ... existing code ...", lines[-1]])) if len(lines) > 3 else None
    )


def _encoded(codec: str, extra: str, ends: str = "\n") -> Slip:
    def spoil(case: Case, random: Random) -> Case | None:
        line = f"// {extra}\n"
        if not case.text.isascii() or case.goal is None:
            return None
        return replace(
            case, text=line + case.text, goal=line + case.goal, first=case.first + 1, codec=codec, ends=ends,
            old=case.old, new=case.new,
        )  # fmt: skip

    return spoil


def _ends(ends: str) -> Slip:
    return lambda case, random: replace(case, ends=ends)


def _rewritten(case: Case, random: Random) -> Case | None:
    """The model writes the whole file anew, without having read it."""
    return None if case.goal is None else replace(case, tool="write_file", new=case.goal)


def _rewritten_short(case: Case, random: Random) -> Case | None:
    """The same with a stub for most of the file."""
    made = _rewritten(replace(case, is_read=True), random)
    mark = "#" if case.name.endswith((".py", ".rb")) else "//"
    return None if made is None else replace(made, new=f"{case.new}\n{mark} ... rest of the file unchanged ...\n")


def _moved(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    at = random.randrange(1, len(lines))
    old = "\n".join([*lines[at:], *lines[:at]])
    return replace(case, old=old) if old not in case.text else None


def _empty_old(case: Case, random: Random) -> Case:
    return replace(case, old="", accepts="old_text is empty")


def _same(case: Case, random: Random) -> Case:
    return replace(case, new=case.old, goal=None, accepts="the same")


def _wrong_path(case: Case, random: Random) -> Case:
    return replace(case, name=f"src/twigs/{case.name}", path=f"lib/{case.name}")


def _literal_breaks(case: Case, random: Random) -> Case | None:
    """Line breaks are written as backslash and n."""
    if "\\" in case.old + case.new:
        return None
    return replace(case, old=case.old.replace("\n", "\\n"), new=case.new.replace("\n", "\\n"))


def _stripped_first(case: Case, random: Random) -> Case | None:
    old, new = case.old, case.new
    if old == old.lstrip() or old.split("\n")[0] != new.split("\n")[0]:
        return None
    return replace(case, old=old.lstrip(), new=new.lstrip())


def _decomposed(case: Case, random: Random) -> Case | None:
    """The file has a word in another normal form."""
    lines = case.old.split("\n")
    line = lines[0]
    if case.goal is None or case.new.split("\n")[0] != line:
        return None
    word = f"{line} déjà"
    old, new = (text.replace(line, word, 1) for text in (case.old, case.new))
    made = unicodedata.normalize("NFD", word)
    text, goal = case.text.split("\n"), case.goal.split("\n")
    text[case.first] = goal[case.first] = made
    return replace(case, text="\n".join(text), goal="\n".join(goal), old=old, new=new)


def _lost_end(case: Case, random: Random) -> Case | None:
    """The new text lacks the line end that the old text has."""
    return replace(case, old=f"{case.old}\n") if case.new.strip() else None


def _cut_start(case: Case, random: Random) -> Case | None:
    """The old text begins within a line that the new text has whole."""
    line = case.old.split("\n")[0]
    at = random.randrange(len(line) // 2, len(line)) - len(line.rstrip()) // 4
    if case.new.split("\n")[0] != line or not line[:at].strip() or case.text.count(case.old[at:]) > 1:
        return None
    return replace(case, old=case.old[at:])


def _cut_end(case: Case, random: Random) -> Case | None:
    """The old text ends within a line that the new text has whole."""
    line = case.old.split("\n")[-1]
    cut = random.randrange(4, max(5, len(line.strip()) // 2))
    if case.new.split("\n")[-1] != line or not line[:-cut].strip() or not re.search(r"\w", line[-cut:]):
        return None
    return replace(case, old=case.old[:-cut])


def _cut_both(case: Case, random: Random) -> Case | None:
    """Both texts begin and end within the same lines."""
    first, last = case.old.split("\n")[0], case.old.split("\n")[-1]
    start, cut = len(first) - len(first.lstrip()) + 3, random.randrange(1, 4)
    if (
        case.new.split("\n")[0] != first
        or case.new.split("\n")[-1] != last
        or min(len(last.strip()), len(first.strip())) < 8
    ):
        return None
    return replace(case, old=case.old[start:-cut], new=case.new[start:-cut])


def _and(sections: str, *others: tuple[str, str | None, str | None], fails: bool = False) -> Slip:
    """The patch has more sections. If one of them `fails`, no file may change."""

    def add(case: Case, random: Random) -> Case:
        case = replace(case, tool="apply_patch", sections=sections, others=others)
        return replace(case, goal=None, accepts="other.txt") if fails else case

    return add


def _curly(text: str) -> str:
    return text.replace("'", "’").replace('"', "”")


SLIPS: tuple[tuple[str, Slip], ...] = (
    ("none", lambda case, random: case),
    ("less indented", _less),
    ("more indented", _both(_lines(lambda line: f"    {line}"))),
    ("first line stripped", _stripped_first),
    ("tabs", _reindented("\t")),
    ("two spaces", _reindented("  ")),
    ("curly quotes in the call", _both(_curly)),
    ("curly quotes in the file", _in_file(_curly)),
    ("dashes in the call", _both(lambda text: text.replace("-", "–"))),
    ("non-breaking spaces in the file", _in_file(lambda line: line[:8] + line[8:].replace(" ", "\u00a0"))),
    ("non-breaking spaces in the call", _both(_lines(lambda line: line.replace(" ", "\u00a0")))),
    ("zero-width in the file", _in_file(lambda line: line.replace("(", "(\u200b"))),
    ("zero-width in the call", _both(lambda text: text.replace("(", "(\u200b"))),
    ("decomposed in the file", _decomposed),
    ("numbers and tabs", _numbers("{}\t{}")),
    ("numbers and arrows", _numbers("{:>6}→{}")),
    ("numbers and bars", _numbers("{:>4} | {}")),
    ("numbers and colons", _numbers("{}: {}")),
    ("numbers in old_text only", _numbers_in_old),
    ("code fence", _both(lambda text: f"```\n{text}\n```")),
    ("diff markers", _diffed),
    ("HTML entities", _both(lambda text: html.escape(text, quote=False))),
    ("HTML entities with quotes", _both(html.escape)),
    ("escaped quotes", _both(_escaped_quotes)),
    ("literal line breaks", _literal_breaks),
    ("blank lines around", _both(lambda text: f"\n{text}\n\n")),
    ("trailing white space in the file", _in_file(lambda line: f"{line}  \t")),
    ("trailing white space in the call", _in_old(_lines(lambda line: f"{line} "))),
    ("a skipped line", _skipped),
    ("another word", _other_word),
    ("another case", _in_old(lambda text: text.replace("e", "E", 1))),
    ("a reworded comment", _reworded_comment),
    ("a wrapped line", _wrapped),
    ("joined lines", _joined),
    ("other quotes", _in_old(lambda text: text.replace("'", '"'))),
    ("no semicolons", _in_old(lambda text: text.replace(";", ""))),
    ("two places", _twice),
    ("every place", _everywhere),
    ("already made", _applied),
    ("changed here", _changed_here),
    ("changed elsewhere", _changed_elsewhere),
    ("placeholder", _placeholder("{} ... existing code ...")),
    ("bare placeholder", _placeholder("{} ...")),
    ("unchanged placeholder", _placeholder("{} [rest of the code remains the same]")),
    ("placeholder in old_text", _placeholder_in_old),
    ("Latin-1", _encoded("latin-1", "Gr\u00fc\u00dfe aus dem Nest")),
    ("Shift-JIS", _encoded("cp932", "こんにちは、巣のなか")),
    ("UTF-16", _encoded("utf-16", "巣 é")),
    ("UTF-8 with a mark", _encoded("utf-8-sig", "é")),
    ("CRLF", _ends("\r\n")),
    ("CRLF in Latin-1", _encoded("latin-1", "Gr\u00fc\u00dfe", "\r\n")),
    ("whole file unread", _rewritten),
    ("whole file with a stub", _rewritten_short),
    ("moved lines", _moved),
    ("empty old_text", _empty_old),
    ("nothing changes", _same),
    ("wrong path", _wrong_path),
    ("last line end lost", _lost_end),
    ("cut at the start", _cut_start),
    ("cut at the end", _cut_end),
    ("cut alike in both", _cut_both),
    ("and a second file", _and("*** Update File: {}/other.txt\n@@\n-one\n+two", ("other.txt", "one\n", "two\n"))),
    ("and a new file", _and("*** Add File: {}/sub/added.txt\n+one", ("sub/added.txt", None, "one\n"))),
    ("and a deleted file", _and("*** Delete File: {}/other.txt", ("other.txt", "one\n", None))),
    ("and a moved file", _and(
        "*** Update File: {}/other.txt\n*** Move to: {}/moved.txt\n@@\n-one\n+two",
        ("other.txt", "one\n", None), ("moved.txt", None, "two\n"),
    )),
    ("and a file that does not fit", _and(
        "*** Add File: {}/new.txt\n+one\n*** Update File: {}/other.txt\n@@\n-nowhere\n+two",
        ("new.txt", None, None), ("other.txt", "one\n", "one\n"), fails=True,
    )),
)  # fmt: skip


def as_patch(old: str, new: str, path: str, *more: str) -> str:
    """The change as a patch: lines that both texts share are kept. `more` are other sections."""
    mine, theirs = old.split("\n"), new.split("\n")
    hunk = ["@@"]
    for step, a, b, c, d in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if step == "equal":
            hunk += (f" {line}" for line in mine[a:b])
        else:
            hunk += (f"-{line}" for line in mine[a:b])
            hunk += (f"+{line}" for line in theirs[c:d])
    return "\n".join(["*** Begin Patch", f"*** Update File: {path}", *hunk, *more, "*** End Patch"])


def _are(case: Case, place: Path, state: Literal[1, 2]) -> bool:
    """Whether the other files are as before (1) or after (2) the patch."""
    texts = [(place / other[0]).read_text() if (place / other[0]).exists() else None for other in case.others]
    return texts == [other[state] for other in case.others]


class Judge:
    """Runs the calls of cases in a directory."""

    def __init__(self, box: McpToolbox, root: Path, *, is_patch: bool) -> None:
        self._box, self._root, self._is_patch = box, root, is_patch
        self._number = 0

    async def verdict(self, case: Case) -> tuple[Verdict, str]:
        """Return the verdict, and what the model was told."""
        self._number += 1
        place = self._root / f"c{self._number}"
        path = place / case.name
        path.parent.mkdir(parents=True)
        given = f"{place.name}/{case.path or case.name}"
        real = f"{place.name}/{case.name}"
        if case.is_read:
            path.write_bytes(case.encoded(case.text if case.read_text is None else case.read_text))
            await self._run("read_file", path=real)
        path.write_bytes(case.encoded(case.text))
        for name, before, _ in case.others:
            if before is not None:
                (place / name).write_text(before)
        outcome = await self._edit(case, case.old, case.new, given)
        now = path.read_bytes()
        if not outcome.is_error:
            is_right = case.goal is not None and now == case.encoded(case.goal) and _are(case, place, 2)
            return ("right" if is_right else "wrong"), outcome.text
        if now != case.encoded(case.text) or not _are(case, place, 1):
            return "wrong", outcome.text
        return await self._second_try(case, path, real, outcome.text)

    async def _second_try(self, case: Case, path: Path, real: str, words: str) -> tuple[Verdict, str]:
        if case.accepts and self._is_patch and case.slip in ("nothing changes", "empty old_text"):
            return ("repaired" if "changes nothing" in words or case.accepts in words else "useless"), words
        if case.accepts:
            return ("repaired" if case.accepts in words else "useless"), words
        if case.goal is None or (case.path and real not in words):
            return "useless", words
        goal = case.goal
        shown = {int(number): line for number, line in _NUMBERED.findall(words)}
        numbers = range(case.first + 1, case.first + case.count + 1)
        needs_lines = "laceholder" not in case.slip and not case.path and case.tool == "edit_file"
        if needs_lines and not all(number in shown for number in numbers):
            return "useless", words
        if case.tool == "write_file":
            if "write the whole file" not in words and "read it first" not in words:
                return "useless", words
            case = replace(case, tool="edit_file")
        lines = case.text.split("\n")
        if needs_lines:
            lines = [shown.get(at + 1, "\0") for at in range(len(lines))]
        first, last = case.first, case.first + case.count
        while case.text.count("\n".join(lines[first:last])) > 1 and (first in shown or last + 1 in shown):
            first, last = first - (first in shown), last + (last + 1 in shown)
        goal_lines = goal.split("\n")
        rest = len(case.text.split("\n")) - last
        old, new = "\n".join(lines[first:last]), "\n".join(goal_lines[first : len(goal_lines) - rest])
        self._box.prepare()
        again = await self._edit(replace(case, more=None), old, new, real)
        is_right = not again.is_error and path.read_bytes() == case.encoded(goal)
        changed = path.read_bytes() != case.encoded(case.text)
        return ("repaired" if is_right else "wrong" if changed else "useless"), f"{words}\n>> {again.text}"

    async def _edit(self, case: Case, old: str, new: str, path: str) -> Outcome:
        if case.tool == "write_file":
            return await self._run("write_file", path=path, content=new)
        if case.tool == "apply_patch" or (self._is_patch and old and not case.more):
            old = old.removesuffix("\n") if case.slip == "last line end lost" else old
            more = case.sections.replace("{}", path.split("/")[0]).split("\n") if case.sections else ()
            return await self._run("apply_patch", input=as_patch(old, new, path, *more))
        return await self._run("edit_file", path=path, old_text=old, new_text=new, **(case.more or {}))

    async def _run(self, tool: str, **given: Any) -> Outcome:
        made = call(tool, **given)
        planned = await self._box.plan(made)
        if planned.fault is not None:
            return Outcome(text=planned.fault, is_error=True)
        return await self._box.run(made, "call_1_0", unwatched, planned=planned)


async def rows(count: int, seed: int, tree: Path, show: str, *, is_patch: bool) -> list[Row]:
    what = "patches" if is_patch else "edits"
    found: dict[str, Counter[Verdict]] = {name: Counter() for name, _ in SLIPS}
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).resolve()) as directory:
        async with toolbox(Path(directory)) as box:
            judge = Judge(box, Path(directory), is_patch=is_patch)
            for case in cases(count, seed, tree):
                if is_patch and case.slip == "literal line breaks":
                    case = replace(case, slip="none", old="\n".join(case.meant), new=case.new.replace("\\n", "\n"))  # noqa: PLW2901
                verdict, words = await judge.verdict(case)
                found[case.slip][verdict] += 1
                if verdict in ("wrong", "useless") and show in ("all", case.slip):
                    print(f"=== {what}, {case.slip}: {verdict}\n{case.old}\n--- becomes\n{case.new}\n--- {words}\n")
    every: Counter[Verdict] = sum(found.values(), Counter())
    score = every["right"] + every["repaired"] - 10 * every["wrong"]
    missing = max(0, count * WANTED // COUNT - score)
    table = [
        Row(f"{what}: score, of {count}", score, score, ""),
        Row(f"{what}: score missing to {WANTED} of {COUNT}", missing, missing, "", 0),
        Row(f"{what}: right", every["right"], every["right"], ""),
        Row(f"{what}: refused and repaired in one step", every["repaired"], every["repaired"], ""),
        Row(f"{what}: wrong", every["wrong"], every["wrong"], "", 0),
    ]
    for name, verdicts in found.items():
        failed = verdicts["wrong"] + verdicts["useless"]
        table += [Row(f"{what} failed: {name}", failed, failed, f"of {verdicts.total()}")] if failed else []
    return table


async def main(options: Any) -> int:
    tree = options.tree or Path(sysconfig.get_path("stdlib"))
    made = [
        row
        for is_patch in (False, True)
        for row in await rows(options.count, options.seed, tree, options.show, is_patch=is_patch)
    ]
    report(made, options.json)
    return any(row.is_over for row in made)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("count", nargs="?", type=int, default=COUNT, help="how many edits to make")
    parser.add_argument("seed", nargs="?", type=int, default=1, help="another seed gives other edits")
    parser.add_argument("--tree", type=Path, help="a directory with source files; the standard library by default")
    parser.add_argument("--show", default="", metavar="SLIP", help="print what failed of this slip, or all")
    sys.exit(asyncio.run(main(parser.parse_args())))

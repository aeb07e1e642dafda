"""Edits of real code with slips that models make: made right, refused usefully, or made wrong.

The code is the standard library of Python. A case picks a few lines of a file, changes one of them, and spoils
old_text, new_text or the file in one way. An edit is right if the file holds exactly what the change would make of it.
A refusal is useful if it shows the lines that were meant, so that the next try can copy them. Each seed gives the same
cases for the same version of Python.
"""

from __future__ import annotations

import html
import sys
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

from benchmarks.rows import Row, arguments, report
from crow.domain.errors import ArgumentError
from crow.tools.builtin.matching import replace_text
from crow.tools.builtin.mismatch import placeholder_in

Outcome: TypeAlias = Literal["right", "useful", "useless", "wrong"]
MAX_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One edit."""

    slip: str
    text: str
    """The file."""
    old: str
    new: str
    wanted: str | None
    """The file after the edit, or None if the edit must be refused."""
    meant: str
    """The lines of the file that the edit means."""


Slip: TypeAlias = Callable[[Case, Random], Case | None]


def files() -> list[Path]:
    """The modules of the standard library, sorted."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases, each slip in turn."""
    random = Random(seed)
    library = files()
    texts: dict[Path, str] = {}
    made = 0
    while made < count:
        path = random.choice(library)
        text = texts.setdefault(path, path.read_text("utf-8", errors="replace"))
        name, slip = SLIPS[made % len(SLIPS)]
        plain = _plain_case(text, random)
        case = None if plain is None else slip(plain, random)
        is_elsewhere = case is not None and case.old in case.text and case.old not in case.meant
        if case is not None and case.old != case.new and case.old.strip() and not is_elsewhere:
            made += 1
            yield replace(case, slip=name)


def _plain_case(text: str, random: Random) -> Case | None:
    lines = text.split("\n")
    if len(lines) < 40:
        return None
    count = random.randint(2, 8)
    first = random.randrange(1, len(lines) - count - 1)
    chosen = lines[first : first + count]
    code = [index for index, line in enumerate(chosen) if len(line.strip()) > 8]
    if len(code) < 2 or not chosen[0].strip() or not chosen[-1].strip():
        return None
    old = "\n".join(chosen)
    if text.count(old) != 1 or len(set(chosen)) < len(chosen):
        return None
    changed = random.choice(code)
    body = chosen[changed]
    new_lines = list(chosen)
    match random.randrange(3):
        case 0:
            new_lines[changed] = body.rstrip() + "  # checked"
        case 1:
            words = body.split(" ")
            at = max(range(len(words)), key=lambda index: len(words[index]))
            words[at] = f"changed({words[at]})"
            new_lines[changed] = " ".join(words)
        case _:
            indent = body[: len(body) - len(body.lstrip())]
            new_lines.insert(changed + 1, f"{indent}log.debug('reached %d', {first})")
    new = "\n".join(new_lines)
    return Case(slip="", text=text, old=old, new=new, wanted=text.replace(old, new), meant=old)


def _fragment(case: Case, random: Random) -> Case | None:
    """The call names a part of a line only, in which the file has two spaces or an odd character."""
    line = next(
        (line for line in case.old.split("\n") if line.count(" ") > line[:1].count(" ") and line in case.new), ""
    )
    words = line.split()
    inner, odd = " ".join(words[1:-1]), random.choice(("  ", "\u00a0", " \u200b")).join(words[1:-1])
    if len(words) < 4 or inner not in line or case.text.count(inner) != 1 or not (inner[0] + inner[-1]).isalnum():
        return None
    text = case.text.replace(inner, odd)
    return replace(
        case, text=text, old=inner, new=inner + " or other", wanted=text.replace(odd, odd + " or other"), meant=odd
    )


def _exact(case: Case, random: Random) -> Case:
    return case


def _trailing(case: Case, random: Random) -> Case | None:
    if "\n" not in case.old:
        return None
    *lines, last = case.meant.split("\n")
    dirty = "\n".join([*(line + "  " if line.strip() and random.random() < 0.6 else line for line in lines), last])
    return _with_meant(case, dirty)


def _with_meant(case: Case, meant: str) -> Case | None:
    """The same edit of a file in which the meant lines look otherwise. What the edit does not change must stay so."""
    if meant == case.meant:
        return None
    kept = dict(zip(case.old.split("\n"), meant.split("\n"), strict=True))
    wanted = "\n".join(kept.get(line, line) for line in case.new.split("\n"))
    return replace(
        case, text=case.text.replace(case.meant, meant), wanted=case.text.replace(case.meant, wanted), meant=meant
    )


def _dedented(case: Case, random: Random) -> Case | None:
    indents = [len(line) - len(line.lstrip()) for line in (case.old + "\n" + case.new).split("\n") if line.strip()]
    if not (least := min(indents)):
        return None
    old, new = ("\n".join(line[least:] for line in text.split("\n")) for text in (case.old, case.new))
    is_elsewhere = case.text.count(old) > case.meant.count(old)
    return None if is_elsewhere else replace(case, old=old, new=new)


def _indented(case: Case, random: Random) -> Case:
    add = " " * random.choice((2, 4, 8))
    old, new = (
        "\n".join(add + line if line.strip() else line for line in text.split("\n")) for text in (case.old, case.new)
    )
    return replace(case, old=old, new=new)


def _reindent(text: str, unit: str) -> str | None:
    rows = []
    for line in text.split("\n"):
        width = len(line) - len(line.lstrip(" "))
        if line.strip() and width % 4:
            return None
        rows.append(unit * (width // 4) + line[width:] if line.strip() else line)
    return "\n".join(rows)


def _tabs_in_file(case: Case, random: Random) -> Case | None:
    meant, wanted = _reindent(case.old, "\t"), _reindent(case.new, "\t")
    if meant is None or wanted is None or meant == case.old or case.text.count(case.old) != 1:
        return None
    return replace(
        case, text=case.text.replace(case.old, meant), wanted=case.text.replace(case.old, wanted), meant=meant
    )


def _tabs_in_call(case: Case, random: Random) -> Case | None:
    old, new = _reindent(case.old, "\t"), _reindent(case.new, "\t")
    return None if old is None or new is None or old == case.old else replace(case, old=old, new=new)


def _two_spaces_in_call(case: Case, random: Random) -> Case | None:
    old, new = _reindent(case.old, "  "), _reindent(case.new, "  ")
    return None if old is None or new is None or old == case.old else replace(case, old=old, new=new)


def _special_in_file(characters: dict[str, str]) -> Slip:
    def spoil(case: Case, random: Random) -> Case | None:
        old, new = case.old.split("\n"), case.new.split("\n")
        shared = [index for index, line in enumerate(old) if line in new and any(each in line for each in characters)]
        if not shared:
            return None
        index = random.choice(shared)
        indent = len(old[index]) - len(old[index].lstrip())
        meant = list(old)
        meant[index] = old[index][:indent] + "".join(characters.get(each, each) for each in old[index][indent:])
        return _with_meant(case, "\n".join(meant))

    return spoil


def _accents(case: Case, random: Random) -> Case | None:
    line = case.old.split("\n")[0]
    if line not in case.new.split("\n"):
        return None
    added = line + "  # Ångström déjà-vu"
    old, new = case.old.replace(line, added, 1), case.new.replace(line, added, 1)
    plain = replace(case, old=old, new=new, meant=old, text=case.text.replace(case.old, old))
    decomposed = unicodedata.normalize("NFD", old)
    return _with_meant(replace(plain, wanted=""), decomposed)


def _numbered(case: Case, random: Random) -> Case:
    first = case.text[: case.text.index(case.old)].count("\n") + 1
    mark = random.choice(("\t", "→", "|", ": "))
    width = random.choice((0, 6))

    def number(text: str) -> str:
        return "\n".join(f"{first + at:{width}}{mark}{line}" for at, line in enumerate(text.split("\n")))

    return replace(case, old=number(case.old), new=number(case.new))


def _fenced(case: Case, random: Random) -> Case:
    return replace(case, old=f"```python\n{case.old}\n```", new=f"```python\n{case.new}\n```")


def _diffed(case: Case, random: Random) -> Case:
    old = "\n".join("-" + line for line in case.old.split("\n"))
    return replace(case, old=old, new="\n".join("+" + line for line in case.new.split("\n")))


def _entities(case: Case, random: Random) -> Case | None:
    old, new = html.escape(case.old, quote=False), html.escape(case.new, quote=False)
    return None if old == case.old else replace(case, old=old, new=new)


def _escaped(case: Case, random: Random) -> Case | None:
    if '"' not in case.old:
        return None
    old, new = (text.replace("\\", "\\\\").replace('"', '\\"') for text in (case.old, case.new))
    return replace(case, old=old, new=new)


def _blank_lines(case: Case, random: Random) -> Case:
    return replace(case, old=f"\n\n{case.old}\n", new=f"\n\n{case.new}\n")


def _squeezed(case: Case, random: Random) -> Case | None:
    old, new = case.old.split("\n"), case.new.split("\n")
    shared = [index for index, line in enumerate(old) if line in new and " = " in line]
    if not shared:
        return None
    meant = list(old)
    meant[shared[0]] = old[shared[0]].replace(" = ", "      = ")
    return _with_meant(case, "\n".join(meant))


def _crlf(case: Case, random: Random) -> Case | None:
    if "\r" in case.text or case.wanted is None:
        return None
    text, wanted = (each.replace("\n", "\r\n") for each in (case.text, case.wanted))
    return replace(case, text=text, wanted=wanted, meant=case.meant.replace("\n", "\r\n"))


def _other_word(case: Case, random: Random) -> Case | None:
    words = sorted({word for word in case.old.replace("(", " ").split() if word.isidentifier() and len(word) > 5})
    if not words:
        return None
    word = random.choice(words)
    other = word[:-2] + "_" + word[-2:]
    return replace(case, old=case.old.replace(word, other), new=case.new.replace(word, other), wanted=None)


def _skipped_line(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    inner = [index for index in range(1, len(lines) - 1) if lines[index].strip()]
    if not inner:
        return None
    del lines[random.choice(inner)]
    old = "\n".join(lines)
    return None if old in case.text else replace(case, old=old, wanted=None)


def _extra_line(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    lines.insert(random.randrange(1, len(lines)), "        result = self.prepare(argument)")
    return replace(case, old="\n".join(lines), wanted=None)


def _several_places(case: Case, random: Random) -> Case | None:
    return replace(case, text=f"{case.text}\n\n{case.old}\n", wanted=None)


def _already_made(case: Case, random: Random) -> Case | None:
    if case.wanted is None or case.old in case.wanted or len(case.new) < 40:
        return None
    return replace(case, text=case.wanted, meant=case.new, wanted=None)


def _placeholder(case: Case, random: Random) -> Case | None:
    old, new = case.old.split("\n"), case.new.split("\n")
    if len(new) < 5:
        return None
    stub = random.choice(
        ("# ... existing code ...", "# ... rest of the function ...", "    # ... (unchanged)", "# ...")
    )
    return replace(case, new="\n".join([new[0], stub, new[-1]]) + ("" if old[-1] == new[-1] else "  # x"), wanted=None)


def _reformatted(case: Case, random: Random) -> Case | None:
    lines = case.old.split("\n")
    long = [index for index, line in enumerate(lines) if line.count("(") == 1 and line.rstrip().endswith(")")]
    if not long:
        return None
    index = long[0]
    indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    head, _, rest = lines[index].partition("(")
    lines[index] = f"{head}(\n{indent}    {rest[:-1]},\n{indent})"
    return replace(case, old="\n".join(lines), wanted=None)


SLIPS: tuple[tuple[str, Slip], ...] = (
    ("none", _exact),
    ("trailing white space in the file", _trailing),
    ("less indented", _dedented),
    ("more indented", _indented),
    ("tabs in the file, spaces in the call", _tabs_in_file),
    ("spaces in the file, tabs in the call", _tabs_in_call),
    ("four spaces in the file, two in the call", _two_spaces_in_call),
    ("curly quotes in the file", _special_in_file({"'": "’", '"': "”"})),
    ("dashes in the file", _special_in_file({"-": "–"})),
    ("non-breaking spaces in the file", _special_in_file({" ": "\u00a0"})),
    ("invisible characters in the file", _special_in_file({"_": "_\u200b", ".": "\u200b."})),
    ("decomposed accents in the file", _accents),
    ("line numbers", _numbered),
    ("code fence", _fenced),
    ("diff markers", _diffed),
    ("HTML entities", _entities),
    ("doubled escapes", _escaped),
    ("blank lines around", _blank_lines),
    ("aligned columns in the file", _squeezed),
    ("CRLF in the file", _crlf),
    ("a part of a line", _fragment),
    ("another word", _other_word),
    ("a skipped line", _skipped_line),
    ("an extra line", _extra_line),
    ("several places", _several_places),
    ("already made", _already_made),
    ("placeholder", _placeholder),
    ("reformatted", _reformatted),
)


HINTS = {"placeholder": "must be written out", "already made": "Was the edit already made?"}
"""What a useful refusal says if it need not show the lines."""


def judge(case: Case) -> tuple[Outcome, str]:
    """Make the edit. Return the outcome, and the message of a refusal."""
    try:
        stub = placeholder_in(case.new, case.text)
        if stub is not None:
            return "useful", stub
        made = replace_text(case.text, case.old, case.new, every=False, name="module.py")
    except ArgumentError as error:
        shown = str(error).replace("\r", "")
        is_shown = all(line.rstrip("\r")[:200] in shown for line in case.meant.split("\n")[:MAX_LINES])
        is_useful = is_shown or HINTS.get(case.slip, shown + "!") in shown
        if case.slip == "several places":
            is_useful = case.meant.split("\n")[0][:200] in shown
        return ("useful" if is_useful else "useless"), str(error)
    return ("right" if made.text == case.wanted else "wrong"), made.remark


def rows_of(count: int, seed: int) -> list[Row]:
    """One row for each slip with the edits that were neither right nor refused usefully, and the wrong ones of all."""
    outcomes: dict[str, Counter[Outcome]] = {name: Counter() for name, _ in SLIPS}
    for case in cases(count, seed):
        outcomes[case.slip][judge(case)[0]] += 1
    every: Counter[Outcome] = sum(outcomes.values(), Counter())
    rows = [Row("edits made wrong", every["wrong"], every["wrong"], f"of {count}", 0)]
    rows += [Row("edits made right", every["right"], every["right"], f"of {count}")]
    rows += [Row("edits refused with what repairs them", every["useful"], every["useful"], f"of {count}")]
    for name, found in outcomes.items():
        failed = found["wrong"] + found["useless"]
        rows.append(Row(f"failed: {name}", failed, failed, f"of {found.total()}"))
    return rows


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("count", nargs="?", type=int, default=1_400, help="how many edits to make")
    parser.add_argument("seed", nargs="?", type=int, default=1, help="another seed gives other edits")
    options = parser.parse_args()
    found = rows_of(options.count, options.seed)
    report(found, options.json)
    sys.exit(any(row.is_over for row in found))

"""Turns the bytes of a web document into text; also runs as a program.

Everything here takes time in proportion to the input, whatever the input is: the scanner below never looks at a
character a second time (`html.parser` does so in many releases of Python), and no expression can backtrack.

The program converts large documents, so that a page can be given up by killing a process. It is run by its path with
the standard library alone: `python -I -S html.py MEDIA CHARSET`, the bytes on standard input, the text on standard
output. It must not be started with `-m`, which would import from the current directory, perhaps a hostile workspace.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from encodings import normalize_encoding
from encodings.aliases import aliases
from html import unescape

__all__ = ["HTML", "codec_of", "document_text", "page_text"]

HTML = ("text/html", "application/xhtml+xml")
META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
INDENTED_SIZE = 16
"""JSON is indented where that gives at most this many times its size: each level of nesting indents all below it."""

CPU_S = 30
CODECS = frozenset(
    (
        *("ascii", "utf_8", "utf_8_sig", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le"),
        *("latin_1", *(f"iso8859_{part}" for part in (*range(1, 12), *range(13, 17)))),
        *("cp437", "cp850", "cp852", "cp855", "cp866", "cp874", *(f"cp{page}" for page in range(1250, 1259))),
        *("koi8_r", "koi8_u", "mac_cyrillic", "mac_greek", "mac_latin2", "mac_roman", "mac_turkish", "tis_620"),
        *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "cp950"),
        *("shift_jis", "shift_jisx0213", "cp932", "euc_jp", "iso2022_jp", "euc_kr", "cp949", "johab"),
    )
)
"""The only codecs that a document may name: those of text that decode in linear time. Python has others as well, such
as punycode, which takes hours for some megabytes."""

MARKUP = re.compile(r"<(?=[A-Za-z/!?])")
TAG = re.compile(r"<(/?)([A-Za-z][^\s/>]*+)")
ATTRIBUTE = re.compile(r"""[\s/]*+([^\s/>][^\s/>=]*+)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s>"'][^\s>]*+)))?+""")
"""Of each kind of quote only the last one of a document can be unclosed, so that a failing search for its end happens
twice at most."""

TAG_END = re.compile(r"([\s/]*+)>")
COMMENT_END = re.compile("--!?>")
RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
ENDLESS_REFERENCE = re.compile(r"&#[0-9]{8,}+;?")
"""A character reference beyond every character; Python refuses to read a number of more than 4,300 digits."""

SKIPPED = frozenset({"head", "script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "select"})
BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figure"),
        *("footer", "form", "header", "hr", "main", "nav", "ol", "p", "section", "summary", "table", "tr", "ul"),
    )
)
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def document_text(data: bytes, media: str, charset: str) -> str:
    """The text of a document as it is best read. `media` and `charset` as declared, or empty.

    A charset that is unknown or not in `CODECS` counts as UTF-8. What cannot be decoded becomes U+FFFD.
    """
    told = META_CHARSET.search(data[:2_048]) if media in HTML else None
    codec = codec_of(charset or (told[1].decode("ascii") if told else "utf-8"))
    text = data.decode(codec, "replace").removeprefix("\ufeff")
    if media in HTML or (not media and text.lstrip()[:9].lower() == "<!doctype"):
        text = page_text(text)
    elif media == "application/json" and "\n" not in text.strip():
        text = indented(text)
    return text.encode("utf-8", "replace").decode("utf-8")  # escapes in JSON may have given half surrogate pairs


def codec_of(charset: str) -> str:
    """The codec for a declared charset. Hostile names reach no import: they are only looked up in tables."""
    name = normalize_encoding(charset.strip().lower()[:40])
    for spelling in (name, name.removeprefix("x_")):
        codec = aliases.get(spelling, spelling)
        if codec in CODECS:
            return codec
    return "utf_8"


def indented(text: str) -> str:
    """JSON with a line for each value; the text as it is where it is no JSON, or would grow too much."""
    try:
        pieces, size = [], 0
        for piece in json.JSONEncoder(ensure_ascii=False, indent=1).iterencode(json.loads(text)):
            pieces.append(piece)
            size += len(piece)
            if size > INDENTED_SIZE * len(text):
                return text
    except (ValueError, RecursionError):
        return text
    return "".join(pieces)


def page_text(html: str) -> str:
    """The text of a page as a reader sees it: its title, then headings, lists and links, and nothing that runs."""
    reader = Reader()
    for kind, value, link in scanned(html):
        if kind == "text":
            reader.take_text(value)
        elif kind == "start":
            reader.start(value, link)
        else:
            reader.end(value)
    lines = [line.rstrip(" \t") for line in "".join(reader.pieces).split("\n")]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    title = " ".join("".join(reader.title).split())
    return f"{title}\n\n{body}".strip() if title else body


def scanned(html: str) -> Iterator[tuple[str, str, str]]:
    """The page in order: `("text", its characters, "")`, `("start", tag, its href)` and `("end", tag, "")`.

    As in a browser, a tag or comment that never ends takes the rest of the page with it.
    """
    at = 0
    while markup := MARKUP.search(html, at):
        if markup.start() > at:
            yield "text", unescaped(html[at : markup.start()]), ""
        tag = TAG.match(html, markup.start())
        if tag is None:
            at = end_of_other(html, markup.start())
            if at < 0:
                return
            continue
        name, link = tag[2].lower(), ""
        at = tag.end()
        while attribute := ATTRIBUTE.match(html, at):
            if not link and name == "a" and attribute[1].lower() == "href":
                link = unescaped(attribute[2] or attribute[3] or attribute[4] or "")
            at = attribute.end()
        end = TAG_END.match(html, at)
        if end is None:
            return
        at = end.end()
        is_closed = end[1].endswith("/")
        if not tag[1]:
            yield "start", name, link
        if tag[1] or is_closed:
            yield "end", name, ""
        elif name in RAW:
            close = RAW[name].search(html, at)
            if close is None:
                return
            at = close.start()
    if at < len(html):
        yield "text", unescaped(html[at:]), ""


def end_of_other(html: str, start: int) -> int:
    """Where a comment or declaration ends that begins at `start`; -1 if it never does."""
    if html.startswith("<!--", start):
        end = COMMENT_END.search(html, start + 2)  # `<!-->` is a whole comment
        return -1 if end is None else end.end()
    return html.find(">", start) + 1 or -1


def unescaped(text: str) -> str:
    """`text` with its character references replaced."""
    return unescape(ENDLESS_REFERENCE.sub("\ufffd", text)) if "&" in text else text


class Reader:
    """Collects `pieces` of text and the `title`."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._skipped = ""  # the outermost element that is passed over, and how often it is open
        self._depth = 0
        self._in_title = False
        self._preformatted = 0
        self._links: list[str] = []

    def start(self, tag: str, link: str) -> None:
        """An element begins; `link` is where it leads."""
        if tag == "title":
            self._in_title = not self.title
        if tag == "body":
            self._skipped = ""
        if self._skipped:
            self._depth += tag == self._skipped
            return
        if tag in SKIPPED:
            self._skipped, self._depth = tag, 1
        elif tag == "br":
            self.pieces.append("\n")
        elif tag == "li":
            self.pieces.append("\n- ")
        elif tag in HEADINGS:
            self.pieces.append(f"\n\n{HEADINGS[tag]}")
        elif tag == "pre":
            self._preformatted += 1
            self.pieces.append("\n\n```\n")
        elif tag in ("td", "th"):
            self.pieces.append(" | ")
        elif tag in BLOCKS:
            self.pieces.append("\n\n" if tag != "tr" else "\n")
        elif tag == "a":
            self._links.append(link)

    def end(self, tag: str) -> None:
        """An element ends."""
        if tag == "title":
            self._in_title = False
        if self._skipped:
            self._depth -= tag == self._skipped
            if not self._depth:
                self._skipped = ""
            return
        if tag == "pre" and self._preformatted:
            self._preformatted -= 1
            self.pieces.append("\n```\n\n")
        elif tag in HEADINGS or (tag in BLOCKS and tag != "tr"):
            self.pieces.append("\n\n")
        elif tag == "a" and self._links:
            link = self._links.pop()
            if link.startswith(("http://", "https://")):
                self.pieces.append(f" ({link})")

    def take_text(self, text: str) -> None:
        """Characters between tags."""
        if self._in_title:
            self.title.append(text)
        elif self._skipped:
            return
        elif self._preformatted:
            self.pieces.append(text)
        else:
            words = re.sub(r"\s+", " ", text)
            if self.pieces and self.pieces[-1].endswith((" ", "\n")):
                words = words.lstrip()
            self.pieces.append(words)


def main() -> None:
    """Convert standard input. See the module's docstring."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))  # whoever started this may be gone
    except (ImportError, ValueError, OSError):  # no such limits here, or a stricter one already
        pass
    media, charset = sys.argv[1:]
    sys.stdout.buffer.write(document_text(sys.stdin.buffer.read(), media, charset).encode("utf-8"))


if __name__ == "__main__":
    main()

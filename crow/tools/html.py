"""Turns the bytes of a web document into text; also runs as a program.

The time is always proportional to the size of the input. The scanner looks at each character once, and no regular
expression can backtrack. In many releases of Python, `html.parser` may look at the same character many times.

Large documents are converted by running this file as a program, because a process can be killed. The program reads
bytes from standard input, writes text to standard output, and uses only the standard library. It is started by its
path, with `python -I -S html.py MEDIA CHARSET`. It is never started with `-m`, which would import modules from the
current directory. That directory may be a hostile workspace.
"""

from __future__ import annotations

import re
import sys
from encodings import normalize_encoding
from encodings.aliases import aliases
from html import unescape

_HTML = ("text/html", "application/xhtml+xml")
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
_CPU_S = 30
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
"""A document may name only these codecs. All of them decode text in linear time. Other codecs can be much slower:
punycode takes hours for a few megabytes."""

_MARKUP = re.compile(r"<(?=[A-Za-z/!?])")
_TAG = re.compile(r"<(/?)([A-Za-z][^\s/>]*+)")
_ATTRIBUTE = re.compile(r"""[\s/]*+([^\s/>][^\s/>=]*+)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s>"'][^\s>]*+)))?+""")
"""Matching takes linear time. A search for a closing quote fails only if no quote of the same kind follows in the whole
text. Therefore at most one search for a single quote and one search for a double quote can fail."""

_TAG_END = re.compile(r"([\s/]*+)>")
_COMMENT_END = re.compile("--!?>")
_RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
_ENDLESS_REFERENCE = re.compile(r"&#[0-9]{8,}+;?")
"""A character reference with a number beyond Unicode. It is replaced before `unescape` runs, because Python refuses to
read a number of more than 4,300 digits."""

_SKIPPED = frozenset({"head", "script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "select"})
_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figure"),
        *("footer", "form", "header", "hr", "main", "nav", "ol", "p", "section", "summary", "table", "tr", "ul"),
    )
)
_HEADINGS = {f"h{level}": f"\n\n{'#' * level} " for level in range(1, 7)}
_BEFORE = dict.fromkeys(_BLOCKS, "\n\n") | _HEADINGS
_BEFORE |= {"tr": "\n", "br": "\n", "li": "\n- ", "pre": "\n\n```\n", "td": " | ", "th": " | "}
"""The text to add where an element starts."""

_AFTER = dict.fromkeys((*(_BLOCKS - {"tr"}), *_HEADINGS), "\n\n")
"""The text to add where an element ends."""


def document_text(data: bytes, media: str, charset: str) -> str:
    """Return the text of a document in its most readable form. `media` is the media type and `charset` the charset that
    the server declared; each may be empty.

    As in browsers, a byte order mark of UTF-8 counts more than `charset`, and `charset` more than the page's own
    declaration. If the charset is unknown or not in `CODECS`, the text is decoded as UTF-8. Bytes that cannot be
    decoded become U+FFFD.
    """
    declared = _META_CHARSET.search(data[:2_048]) if media in _HTML else None
    codec = codec_of(charset or (declared[1].decode("ascii") if declared else "utf-8"))
    is_misread = not charset and codec.startswith(("utf_16", "utf_32"))  # wrong, because the declaration was in ASCII
    if is_misread or data.startswith(b"\xef\xbb\xbf"):
        codec = "utf_8"
    text = data.decode(codec, "replace").removeprefix("\ufeff")
    if media in _HTML or (not media and text.lstrip()[:9].lower() == "<!doctype"):
        text = page_text(text)
    return text


def codec_of(charset: str) -> str:
    """Return the codec for a declared charset. The name is only looked up in tables: a hostile name cannot make Python
    import a module."""
    name = normalize_encoding(charset.strip().lower()[:40])
    for spelling in (name, name.removeprefix("x_")):
        codec = aliases.get(spelling, spelling)
        if codec in CODECS:
            return codec
    return "utf_8"


def page_text(html: str) -> str:
    """Return the text of a page as a reader sees it: title, headings, lists and links, but no scripts."""
    reader = _Reader()
    reader.read(html)
    lines = [line.rstrip(" \t") for line in "".join(reader.pieces).split("\n")]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    title = " ".join("".join(reader.title).split())
    return f"{title}\n\n{body}".strip() if title else body


def _end_of_declaration(html: str, start: int) -> int:
    """Return the end of the comment or declaration that begins at `start`; -1 if it never ends."""
    if html.startswith("<!--", start):
        end = _COMMENT_END.search(html, start + 2)  # `<!-->` is a whole comment
        return -1 if end is None else end.end()
    return html.find(">", start) + 1 or -1


def _replace_references(text: str) -> str:
    """Return the text with its character references replaced."""
    return unescape(_ENDLESS_REFERENCE.sub("\ufffd", text)) if "&" in text else text


class _Reader:
    """Collects the text of a page in `pieces`, and the text of its title in `title`."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._skipped = ""  # the outermost open element whose text is left out
        self._depth = 0  # how many elements with that name are open
        self._in_title = False
        self._preformatted = 0  # how many `pre` elements are open
        self._links: list[str] = []  # the targets of the open links

    def read(self, html: str) -> None:
        """Read a page. If a tag or comment never ends, leave out its text and everything after it, as a browser
        does."""
        at = 0
        while markup := _MARKUP.search(html, at):
            if markup.start() > at:
                self.add_text(_replace_references(html[at : markup.start()]))
            tag = _TAG.match(html, markup.start())
            if tag is None:
                at = _end_of_declaration(html, markup.start())
                if at < 0:
                    return
                continue
            name, link = tag[2].lower(), ""
            at = tag.end()
            while attribute := _ATTRIBUTE.match(html, at):
                if not link and name == "a" and attribute[1].lower() == "href":
                    link = _replace_references(attribute[2] or attribute[3] or attribute[4] or "")
                at = attribute.end()
            end = _TAG_END.match(html, at)
            if end is None:
                return
            at = end.end()
            if not tag[1]:
                self.start(name, link)
            if tag[1] or end[1].endswith("/"):
                self.end(name)
            elif name in _RAW:
                close = _RAW[name].search(html, at)
                if close is None:
                    return
                at = close.start()
        if at < len(html):
            self.add_text(_replace_references(html[at:]))

    def start(self, tag: str, link: str) -> None:
        """Handle the start of an element. If it is a link, `link` is its target."""
        if tag == "title":
            self._in_title = not self.title
        if tag == "body" or (self._skipped == "head" and tag in _BEFORE):  # the end tag of the head may be missing
            self._skipped = ""
        if self._skipped:
            self._depth += tag == self._skipped
        elif tag in _SKIPPED:
            self._skipped, self._depth = tag, 1
        else:
            self._preformatted += tag == "pre"
            if tag == "a":
                self._links.append(link)
            elif tag in _BEFORE:
                self.pieces.append(_BEFORE[tag])

    def end(self, tag: str) -> None:
        """Handle the end of an element."""
        if tag == "title":
            self._in_title = False
        if self._skipped:
            self._depth -= tag == self._skipped
            if not self._depth:
                self._skipped = ""
        elif tag == "pre" and self._preformatted:
            self._preformatted -= 1
            self.pieces.append("\n```\n\n")
        elif tag == "a" and self._links:
            link = self._links.pop()
            if link.startswith(("http://", "https://")):
                self.pieces.append(f" ({link})")
        elif tag in _AFTER:
            self.pieces.append(_AFTER[tag])

    def add_text(self, text: str) -> None:
        """Handle text between tags."""
        if self._in_title:
            self.title.append(text)
        elif self._preformatted and not self._skipped:
            self.pieces.append(text)
        elif not self._skipped:
            words = re.sub(r"\s+", " ", text)
            if self.pieces and self.pieces[-1].endswith((" ", "\n")):
                words = words.lstrip()
            self.pieces.append(words)


def main() -> None:
    """Convert standard input; see the top of this file."""
    try:
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))  # in case the parent is killed
    except (ImportError, ValueError, OSError):  # no such limit on this system, or a stricter one is set
        pass
    media, charset = sys.argv[1:]
    sys.stdout.buffer.write(document_text(sys.stdin.buffer.read(), media, charset).encode("utf-8"))


if __name__ == "__main__":
    main()

"""A web page as text: what a reader sees, with headings, lists and links, and nothing that runs.

Strategy: the standard library's parser, a few rules for blocks, and collapsed white space outside of `pre`. A page that
was made to keep a parser busy is given as far as it was read in time. Knows nothing of where the page comes from.
"""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

__all__ = ["page_text"]

PARSED_S = 3.0

SKIPPED = frozenset({"head", "script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "select"})
BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figure"),
        *("footer", "form", "header", "hr", "main", "nav", "ol", "p", "section", "summary", "table", "tr", "ul"),
    )
)
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def page_text(html: str) -> str:
    """The text of a page, its title first."""
    reader = Reader()
    try:
        reader.feed(html)
        reader.close()
    except TimeoutError:
        reader.pieces.append(f"\n\n[what follows could not be read within {PARSED_S:g} s]")
    text = re.sub(r"[ \t]+\n", "\n", "".join(reader.pieces))
    body = re.sub(r"\n{3,}", "\n\n", text).strip()
    title = " ".join("".join(reader.title).split())
    return f"{title}\n\n{body}".strip() if title else body


class Reader(HTMLParser):
    """Collects `pieces` of text and the `title`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._skipping: list[str] = []
        self._in_title = False
        self._preformatted = 0
        self._links: list[str] = []
        self._deadline = time.monotonic() + PARSED_S

    def _look_at_the_clock(self) -> None:
        """:raises TimeoutError: it took too long."""
        if time.monotonic() > self._deadline:
            raise TimeoutError

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """The parser's: an element begins."""
        self._look_at_the_clock()
        if tag == "title":
            self._in_title = not self.title
        if tag == "body":
            self._skipping = []
        if tag in SKIPPED:
            self._skipping.append(tag)
        if self._skipping:
            return
        if tag == "br":
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
            self._links.append(dict(attrs).get("href") or "")

    def handle_endtag(self, tag: str) -> None:
        """The parser's: an element ends."""
        if tag == "title":
            self._in_title = False
        if tag in self._skipping:
            del self._skipping[self._skipping.index(tag) :]
            return
        if self._skipping:
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

    def handle_data(self, data: str) -> None:
        """The parser's: text."""
        self._look_at_the_clock()
        if self._in_title:
            self.title.append(data)
        elif self._skipping:
            return
        elif self._preformatted:
            self.pieces.append(data)
        else:
            words = re.sub(r"\s+", " ", data)
            if self.pieces and self.pieces[-1].endswith((" ", "\n")):
                words = words.lstrip()
            self.pieces.append(words)

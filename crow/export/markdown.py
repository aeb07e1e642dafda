"""Renders untrusted Markdown as HTML that cannot run code or load anything.

Raw HTML is shown as text. A link keeps its address only if the scheme is http, https or mailto. An image is replaced
with a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

MAX_CHARS = 60_000
"""A longer text is shown as plain text, because the parser is slow for some long texts."""

_LINK_SCHEMES = frozenset({"http", "https", "mailto"})
_URL_CHARS = 2_000
_LONGEST_RUN = 200
"""If a text repeats one of the characters in `_RUNS` this many times in a row, it is shown as plain text. Parsing it
would take quadratic time."""
_RUNS = tuple(char * _LONGEST_RUN for char in "[*_`<(!>~&|\\-")


def render_markdown(text: str) -> str:
    """Return the HTML of a Markdown text. Headings begin with h3."""
    if len(text) > MAX_CHARS or any(run in text for run in _RUNS) or text.count("[") > 5_000:
        return f'<pre class="plain">{escape(text)}</pre>'
    return str(_PARSER.render(text))


def plain_text(text: str) -> str:
    """Return a text as HTML that keeps its line ends."""
    return f'<div class="text">{escape(text)}</div>'


def link_to(address: str, words: str) -> str:
    """Return a link. If the address is not safe to follow, return the words with the address as a tooltip."""
    if not _is_web_address(address):
        return f'<span class="ref" title="{escape(address[:_URL_CHARS])}">{escape(words)}</span>'
    return f'<a href="{escape(address)}" rel="noopener noreferrer nofollow">{escape(words)}</a>'


def _is_web_address(address: str) -> bool:
    """Return whether a link to this address is safe to follow."""
    try:
        return len(address) <= _URL_CHARS and urlsplit(address).scheme in _LINK_SCHEMES
    except ValueError:
        return False


class _Renderer(RendererHTML):
    """The Markdown renderer, with crow's own HTML for links, images, headings, tables and code."""

    def link_open(self, tokens: Sequence[Token], idx: int, _options: Any, env: Any) -> str:
        address = str(tokens[idx].attrGet("href") or "")
        is_web = _is_web_address(address)
        env.setdefault("open_links", []).append("a" if is_web else "span")
        if not is_web:
            return f'<span class="ref" title="{escape(address[:_URL_CHARS])}">'
        return f'<a href="{escape(address)}" rel="noopener noreferrer nofollow">'

    def link_close(self, _tokens: Sequence[Token], _idx: int, _options: Any, env: Any) -> str:
        return f"</{env['open_links'].pop()}>"

    def image(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        address, alt = str(tokens[idx].attrGet("src") or ""), tokens[idx].content
        return f'<span class="note">[image: {link_to(address, alt or address[:80] or "without an address")}]</span>'

    def heading_open(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        return f"<h{_level(tokens[idx])}>"

    def heading_close(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        return f"</h{_level(tokens[idx])}>\n"

    def fence(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        language = tokens[idx].info.strip().split(maxsplit=1)[:1]
        label = f' data-language="{escape(language[0][:40])}"' if language else ""
        return f'<pre tabindex="0"{label}><code>{escape(tokens[idx].content)}</code></pre>\n'

    def code_block(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        return f'<pre tabindex="0"><code>{escape(tokens[idx].content)}</code></pre>\n'

    def table_open(self, *_: Any) -> str:
        return '<div class="table" tabindex="0"><table>\n'

    def table_close(self, *_: Any) -> str:
        return "</table></div>\n"

    def th_open(self, *_: Any) -> str:
        return "<th>"  # without the alignment, because the page's policy forbids inline styles

    def td_open(self, *_: Any) -> str:
        return "<td>"


def _level(token: Token) -> int:
    return min(6, int(token.tag[1:]) + 2)


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 20}, renderer_cls=_Renderer)
    parser.enable(["table", "strikethrough"])
    parser.disable("html_inline").disable("html_block")
    parser.validateLink = _accept_link  # type: ignore[method-assign]
    return parser


def _accept_link(url: str) -> bool:  # noqa: ARG001  # the renderer decides which addresses become links
    return True


_PARSER = _parser()

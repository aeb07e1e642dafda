"""Builds pages from the documents beside docs/, and writes the pages as Markdown for programs that read the website."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "packages/acp-check/README.md": "acp-check.md",
    "packages/crow-channels/README.md": "crow-channels.md",
}
"""Documents outside of docs/, and the pages that they become. Paths are relative to the repository and to docs/."""

ASSETS = {"assets/icon.svg": "registry/icon.svg", "assets/website.css": "website/website.css"}
"""Other files of the website, and where they come from."""

_LINK = re.compile(r"(?P<text>!?\[[^\]\n]*\])\((?P<target>[^)\s]+)\)")
_FOREIGN = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\">\s]+)")
_FENCE = re.compile(r"^ *(```|~~~)", re.MULTILINE)


class ShortIndents(Extension):
    """Lets two or three spaces continue a list item, as in CommonMark. Python-Markdown asks for four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name is Python-Markdown's
        md.tab_length = 2


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(ShortIndents())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the documents outside of docs/ as pages, and the icon."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for name, source in ASSETS.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links to other pages of the website. A link to any other file keeps its text alone."""
    names = {page: source for source, page in PAGES.items()}
    uri = page.file.src_uri
    source = names.get(uri, f"docs/{uri}")

    def replaced(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page_name = PAGES.get(wanted) or wanted.removeprefix("docs/")
        if wanted in PAGES or wanted.startswith("docs/"):
            return f"{text}({posixpath.relpath(page_name, posixpath.dirname(uri) or '.')}{hash_sign}{anchor})"
        if not (ROOT / wanted).exists():
            raise PluginError(f"{source} links to {target}, which does not exist")
        return text.strip("[]")

    parts = _outside_fences(markdown)
    page.markdown_source = "".join(_LINK.sub(replaced, part) if is_text else part for is_text, part in parts)
    return page.markdown_source


def on_page_context(context: Any, page: Any, **_: Any) -> Any:
    """Keep what the Markdown copies need: a page's title and text."""
    _written[page.file.src_uri] = (page.title, page.markdown_source)
    return context


def on_post_build(config: Any) -> None:
    """Write each page as Markdown, `llms.txt` and `llms-full.txt`. Refuse pages that load something from elsewhere."""
    site = Path(config.site_dir)
    foreign = sorted({load for page in site.rglob("*.html") for load in _FOREIGN.findall(page.read_text("utf-8"))})
    if foreign:
        raise PluginError(f"The website loads from elsewhere: {', '.join(foreign)}")
    index = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    full: list[str] = []
    for section in config.nav:
        ((name, entries),) = section.items()
        index += [f"## {name}", ""]
        for entry in entries:
            ((_, uri),) = entry.items()
            title, text = _written[uri]
            (site / uri).write_text(text, "utf-8")
            index.append(f"- [{title}]({uri}): {_first_sentence(text)}")
            full.append(text.strip())
        index.append("")
    (site / "llms.txt").write_text("\n".join(index), "utf-8")
    (site / "llms-full.txt").write_text("\n\n---\n\n".join(full) + "\n", "utf-8")


_written: dict[str, tuple[str, str]] = {}
"""The title and the Markdown of each page, by its path below docs/."""


def _outside_fences(markdown: str) -> list[tuple[bool, str]]:
    """Return the parts of `markdown`, each with whether it is text and not a block of code."""
    parts: list[tuple[bool, str]] = []
    is_text, since = True, 0
    for fence in _FENCE.finditer(markdown):
        parts.append((is_text, markdown[since : fence.start()]))
        is_text, since = not is_text, fence.start()
    return [*parts, (is_text, markdown[since:])]


def _first_sentence(markdown: str) -> str:
    """Return the first sentence below the title, without links."""
    paragraph = next(
        (part for part in markdown.split("\n\n") if part.strip() and not re.match(r"[#|!<`]", part.strip())), ""
    )
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.!?])\s", plain, maxsplit=1)[0]

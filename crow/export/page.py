"""Renders a session as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from pathlib import Path
from tempfile import SpooledTemporaryFile

from crow.domain import entries as kinds
from crow.domain.diff import diff_lines
from crow.domain.entries import Assistant, CallRef, Checkpoint, Diff, Entry, StopReason, ToolResult
from crow.domain.messages import File, Image, Link, Part, Resource, Text, ToolCall
from crow.domain.rendering import interrupted_text, plan_line
from crow.domain.spending import Spending, duration
from crow.domain.text import on_one_line, plural, safe, shorten, shorten_end
from crow.export.markdown import link_to, plain_text, render_markdown
from crow.export.redact import Redactor, masked_json
from crow.store import SessionRow, Store
from crow.store.codec import KINDS
from crow.store.transcript import label_words, local_time, time_text

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")

_ALL_RESULTS_CHARS = 24_000_000
_RESULT_CHARS = (2_000, 20_000)
"""The page shows a limited number of characters of each tool result. These are the smallest and the largest limit. The
limit is smaller for a longer session, so that browsers open the page without delay."""
# The page shows at most this much of each text, call, title, diff, image and list.
_TEXT_CHARS = 400_000
_ARGUMENT_CHARS = 4_000
_TITLE_CHARS = 300
_LINE_CHARS = 20_000
_DIFF_LINES = 600
_DIFF_LINE_CHARS = 2_000
_IMAGE_CHARS = 6_000_000
_ALL_IMAGES_CHARS = 60_000_000
_LISTED_FILES = 200
_PLOT_POINTS = 800
_MEMORY_BYTES = 8_000_000
"""The body of a page is in memory up to this size, and then in a temporary file."""

_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)")
_STOPS: Mapping[StopReason | str, str] = {
    "max_tokens": "the answer reached the output limit",
    "max_turn_requests": "the turn reached its limit of requests",
    "refusal": "the model refused",
    "cancelled": "it was cancelled",
    "interrupted": "it was interrupted",
    "error": "it failed",
}


@dataclass(slots=True)
class _Point:
    """One answer in the plots."""

    prompt: int
    """The number of prompts before this answer."""
    tokens: int | None
    """The tokens in the context after this answer, or None if they are unknown."""
    cost: float
    """The sum of all costs up to this answer, in US dollars."""
    cached: float | None = None
    """The share of the request that was read from the provider's cache, or None if it is unknown."""
    is_compaction: bool = False


@dataclass(slots=True)
class _PathFacts:
    """Facts about a whole path, for the head of the page."""

    prompts: list[tuple[int, str]] = field(default_factory=list)
    """The entry id and the first words of each prompt."""
    points: list[_Point] = field(default_factory=list)
    models: dict[str, None] = field(default_factory=dict)
    """The names of the models, in the order in which they were first used."""
    cost: float = 0.0
    """The sum of all costs, in US dollars."""
    answers: int = 0
    compactions: int = 0
    branches: int = 0
    """The number of branches that the path does not take."""


def page_policy() -> str:
    """Return the Content-Security-Policy with which a server sends a page. It lets the page run only the page's own
    script, in a separate origin, and load nothing."""
    return f"{_policy()}; frame-ancestors 'none'; sandbox allow-scripts"


def _policy() -> str:
    return (
        f"default-src 'none'; style-src '{_hash(_STYLE)}'; script-src '{_hash(_SCRIPT)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


async def session_page(
    store: Store, session_id: str, redact: Redactor, *, window: int | None = None
) -> AsyncIterator[bytes]:
    """Yield the page of a session with all its branches. `window` is the model's context window, if it is known."""
    row = await store.session(session_id)
    # `moves` returns the newest move first. Of several moves away from a leaf, the newest one counts.
    reasons = {move.from_leaf: move.reason for move in reversed(await store.moves(session_id))}
    page = _HtmlPage(row, redact, window=window)
    try:
        outline = await store.outline(session_id)
        page.labels = {point.entry: point.labels for point in outline.points if point.labels}
        for tip in outline.tips:
            if not tip.is_current:
                branch = await store.entries_beyond(tip.entry, row.leaf, KINDS.values())
                page.add_branch(branch, reasons.get(tip.entry, ""))
        async for batch in store.history(session_id):
            for entry in batch:
                page.feed(entry)
        for entry in await store.unstored_end(session_id):
            page.feed(entry)
        for piece in page.finish():
            yield piece
    finally:
        page.close()


class _HtmlPage:
    """Builds the page. Call `add_branch` for each branch that is not the current path, then `feed` for each entry of
    the path, then `finish`, and finally `close`.

    The body is collected in a temporary file. The head of the page comes before the body, but depends on the whole
    body.
    """

    def __init__(self, row: SessionRow, redact: Redactor, *, window: int | None = None) -> None:
        """`window` is the model's context window, if it is known."""
        self.redact = redact
        self._row, self._window = row, window
        least, most = _RESULT_CHARS
        self._result_chars = max(least, min(most, _ALL_RESULTS_CHARS // max(1, row.entries)))
        self._images_left = _ALL_IMAGES_CHARS
        """The images that follow may have this many characters of base64 in total."""
        self._outline = _PathFacts()
        self._spending = Spending()
        self._branches: dict[int | None, list[str]] = {}
        """Maps an entry of the current path (None for its beginning) to the HTML of the branches that begin there."""
        self._departures: dict[int, int | None] = {}
        """Maps each entry of a branch to the entry of the current path where the branch begins."""
        self._body = SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115  # closed by `close`
        self._path = _EntryRenderer(self, self._outline, is_numbered=True)
        self.labels: Mapping[int, tuple[str, ...]] = {}
        """The labels of entries."""

    def close(self) -> None:
        """Close the temporary file."""
        self._body.close()

    def add_branch(self, entries: Sequence[Entry], reason: str = "") -> None:
        """Add a branch that is not on the current path.

        `entries` are the entries on the path to the end of the branch, oldest first. Entries that were already added
        with another branch are not shown again. `reason` is the command with which the user left this branch.
        """
        new = [entry for entry in entries if entry.id not in self._departures]
        if not new:
            return
        parent = new[0].parent
        place = self._departures.get(parent, parent) if parent is not None else None
        self._departures.update((entry.id, place) for entry in new)
        renderer = _EntryRenderer(self, outline := _PathFacts())
        content = "".join([*map(renderer.render, new), renderer.unanswered()])
        if not outline.prompts and not outline.answers:
            return
        self._outline.branches += 1
        number = self._outline.branches
        prompts = plural(len(outline.prompts), "prompt")
        origin = f"from {_anchor(parent)}" if parent is not None else "from the start"
        left = (
            f", left by /{escape(self.plain_line(reason))}"
            if reason in ("undo", "redo", "rewind", "retry", "new")
            else ""
        )
        self._branches.setdefault(place, []).append(
            f'<details class="branch" id="branch-{number}"><summary>Branch not taken: {prompts}, '
            f"{plural(outline.answers, 'answer')}{left}</summary><p>This branch starts {origin}. The session does not"
            f" continue it.</p>\n{content}</details>\n"
        )

    def feed(self, entry: Entry) -> None:
        """Add the next entry of the current path."""
        self._spending.add(entry)
        self._write(self._branches_from(None))
        self._write(self._path.render(entry))
        self._write(self._branches_from(entry.id))

    def finish(self) -> Iterator[bytes]:
        """Yield the page."""
        self._write(self._path.unanswered())
        self._spending.finish()
        for entry in list(self._branches):  # branches that begin at no entry of the current path
            self._write(self._branches_from(entry))
        yield self._head().encode(errors="replace")
        self._body.seek(0)
        while piece := self._body.read(1 << 20):
            yield piece
        yield f"</main>\n</div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n".encode()

    def _write(self, html: str) -> None:
        self._body.write(html.encode(errors="replace"))

    def _branches_from(self, entry: int | None) -> str:
        """Remove and return the HTML of the branches that begin at `entry`."""
        return "".join(self._branches.pop(entry, ()))

    def plain_line(self, text: str) -> str:
        """Return a text on one line, shortened, with secrets masked, but not escaped for HTML."""
        line = on_one_line(self.redact(text[:_LINE_CHARS]))
        return shorten(line, _TITLE_CHARS)

    def _head(self) -> str:
        row, outline = self._row, self._outline
        title = escape(self.plain_line(row.title or "Untitled session"))
        facts = {
            "Session": f"<code>{escape(self.plain_line(row.id))}</code>",
            "Directory": f"<code>{escape(self.plain_line(row.cwd))}</code>",
            "Created": escape(time_text(row.created_ms)),
            "Changed": escape(time_text(row.updated_ms)),
            "Model": escape(", ".join(self.plain_line(name) for name in outline.models) or "none"),
            "Contents": f"{plural(len(outline.prompts), 'prompt')}, {plural(outline.answers, 'answer')}"
            + (f", {plural(outline.compactions, 'compaction')}" if outline.compactions else "")
            + (f", {plural(outline.branches, 'branch')} not taken" if outline.branches else ""),
            "Tokens": f"{row.tokens_in:,} in ({row.tokens_cached:,} cached), {row.tokens_out:,} out",
        }
        if row.cost:
            facts["Cost"] = _dollars(row.cost)
        if row.forked_from:
            facts["Forked from"] = f"<code>{escape(self.plain_line(row.forked_from))}</code>"
        listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
        items = "".join(f'<li><a href="#entry-{entry}">{escape(words)}</a></li>' for entry, words in outline.prompts)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="crow">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<a class="skip" href="#conversation">Skip to the conversation</a>
<header class="top">
<h1>{title}</h1>
<dl>{listed}</dl>
{self._plots()}
{self._where_it_went()}
</header>
<div class="tools" role="search" hidden>
<label for="query">Search</label>
<input id="query" type="search" autocomplete="off" spellcheck="false" placeholder="Search (press /)">
<output id="found" for="query"></output>
<button type="button" id="previous" aria-label="Previous match">↑</button>
<button type="button" id="next" aria-label="Next match">↓</button>
<button type="button" id="fold" aria-pressed="false">Open all</button>
</div>
<div class="columns">
<nav aria-label="Prompts">
<details class="contents"><summary>{plural(len(outline.prompts), "prompt")}</summary><ol>{items}</ol></details>
</nav>
<main id="conversation">
"""

    def _plots(self) -> str:
        points = [point for point in self._outline.points if point.tokens is not None or point.is_compaction]
        filled = [point.tokens for point in points if point.tokens is not None]
        if len(filled) < 2:
            return ""
        most = max(filled)
        top = max(most, self._window or 0)
        window = f"; the window has {self._window:,}" if self._window else ""
        words = f"Context: {filled[-1]:,} tokens now, {most:,} at most{window}."
        if self._outline.compactions:
            words += " Dashed lines are compactions."
        if self._window:
            words += " The dotted line is the window."
        figures = []
        if top:
            tokens = [point.tokens for point in points]
            figures.append(_plot("context", words, points, tokens, top, f"{top:,}", self._window))
        if self._outline.cost:
            words = f"Cost: {_dollars(self._outline.cost)} for this path."
            costs = [point.cost for point in points]
            figures.append(_plot("cost", words, points, costs, self._outline.cost, _dollars(self._outline.cost), None))
        shares = [point.cached for point in points]
        if sum(share is not None for share in shares) > 1:
            words = f"Read from the provider's cache: {100 * self._spending.cached_share:.0f} % of the input tokens."
            figures.append(_plot("cache", words, points, shares, 1.0, "100 %", None))
        if times := self._times():
            figures.append(times)
        return f'<div class="plots">{"".join(figures)}</div>'

    def _times(self) -> str:
        """Return the HTML of a bar that shows where the time went, or an empty string if it is unknown."""
        spent = self._spending
        parts = (
            ("answer-time", "model", spent.model_ms),
            ("ran", "tools", spent.tools_ms),
            ("asked", "you", spent.waiting_ms),
        )
        whole = sum(ms for _, _, ms in parts)
        if not whole:
            return ""
        bars, legend, x = "", [], 0.0
        for kind, name, ms in parts:
            width = 1000 * ms / whole
            bars += f'<polygon class="{kind}" points="{x:.1f},0 {x + width:.1f},0 {x + width:.1f},100 {x:.1f},100"/>'
            legend.append(f'<span class="key {kind}">{name} {duration(ms)}</span>')
            x += width
        words = "Time: " + ", ".join(f"{name} {duration(ms)}" for _, name, ms in parts)
        return (
            f'<figure class="plot times"><figcaption>{" ".join(legend)}</figcaption><svg viewBox="0 0 1000 100"'
            f' preserveAspectRatio="none" role="img" aria-label="{escape(words)}">{bars}</svg></figure>'
        )

    def _where_it_went(self) -> str:
        """Return the HTML of the breakdown of tokens and time, or an empty string if the path has no requests."""
        if not self._spending.requests:
            return ""
        text = render_markdown(self.clean(self._spending.text()))
        return f'<details class="spending"><summary>Where tokens and time went</summary>{text}</details>'

    def take_image(self, image: Image) -> str:
        """Return the HTML of an image. If the image is too large, or if not every browser can show its format, return a
        note in its place."""
        size = len(image.data) * 3 // 4
        if image.mime_type not in _IMAGE_TYPES or not _BASE64.fullmatch(image.data):
            return f'<p class="note">[an image of type {escape(self.plain_line(image.mime_type))} is not shown]</p>'
        if len(image.data) > min(_IMAGE_CHARS, self._images_left):
            return f'<p class="note">[an image of {size / 1e6:.1f} MB is not shown]</p>'
        self._images_left -= len(image.data)
        return f'<img alt="Image in the session" loading="lazy" src="data:{image.mime_type};base64,{image.data}">'

    def clean(self, text: str) -> str:
        """Return the text with secrets masked and hidden characters escaped."""
        return safe(self.redact(text))

    def line(self, text: str) -> str:
        """Return a text on one line, shortened, with secrets masked, as HTML."""
        return escape(self.plain_line(text))

    @property
    def result_chars(self) -> int:
        """The largest number of characters that the page shows of one tool result."""
        return self._result_chars


class _EntryRenderer:
    """Renders the entries of one path, and counts them in `outline`."""

    def __init__(self, page: _HtmlPage, outline: _PathFacts, *, is_numbered: bool = False) -> None:
        self._page, self._outline, self._is_numbered = page, outline, is_numbered
        self._calls: dict[CallRef, ToolCall] = {}
        """The calls of the last answer that have no result yet."""
        self._numbers = count(1)

    def render(self, entry: Entry) -> str:
        """Return the HTML of one entry with its labels, or an empty string for kinds that are not shown."""
        labels = () if isinstance(entry.body, kinds.Note) else self._page.labels.get(entry.id, ())
        marks = "".join(f'<p class="label">{self._page.line(label)}</p>' for label in labels)
        return marks + self._rendered(entry)

    def _rendered(self, entry: Entry) -> str:
        self._outline.cost += entry.cost or 0.0
        body, page = entry.body, self._page
        match body:
            case kinds.User(parts=parts):
                return self.unanswered() + self._prompt(entry, parts)
            case Assistant():
                return self.unanswered() + self._answer(entry, body)
            case ToolResult():
                return self._result(entry, body)
            case kinds.Command(text=text, answer=answer):
                content = plain_text(page.clean(text)) + self._markdown(answer)
                return self.unanswered() + _article(entry, "command", "Command", content)
            case kinds.Remark(text=text):
                return _article(entry, "remark", "", self._markdown(text))
            case Checkpoint():
                return self._checkpoint(entry, body)
            case kinds.Mask(before=before, tokens_before=old, tokens_after=new):
                words = f"Compaction (hidden outputs): the model does not see tool results before {_anchor(before)}"
                return _article(entry, "remark", "", f"<p>{words} ({old:,} → {new:,} tokens).</p>")
            case kinds.Restore(skill=name) if name:
                return _article(entry, "remark", "", f"<p>The skill {page.line(name)} was unloaded.</p>")
            case kinds.Restore(entry=restored):
                return _article(entry, "remark", "", f"<p>The compaction {_anchor(restored)} was undone.</p>")
            case kinds.Skill(name=name, text=text):
                return self._folded(entry, f"Skill: {page.line(name)}", text)
            case kinds.Reminder(text=text):
                return self._folded(entry, "Note to the model", text)
            case kinds.Custom(namespace=namespace, text=text, is_shown=True):
                return _article(entry, "remark", page.line(namespace), self._markdown(text))
            case kinds.Custom(namespace=namespace, text=text) if text:
                return self._folded(entry, f"Hook: {page.line(namespace)}", text)
            case kinds.Prompt(system=system, tools=tools):
                names = ", ".join(tool.name for tool in tools)
                words = f"System message and {plural(len(tools), 'tool')}"
                return self._folded(entry, words, f"{system}\n\nTools: {names}")
            case kinds.Note(about="label", value=value):
                label = f'<strong class="label">{page.line(value)}</strong>'
                return _article(entry, "remark", "", f"<p>{label_words(body, label)}</p>")
            case kinds.Note(about=about, value=value):
                words = f"{about.replace('_', ' ').capitalize()}: {page.line(value or 'default')}"
                return _article(entry, "remark", "", f"<p>{words}</p>")
            case kinds.TurnEnd(stop=stop, detail=detail):
                words = _STOPS.get(stop, stop)
                end = f"<p>The turn ended: {words}. {page.line(detail)}</p>"
                return self.unanswered() + ("" if stop == "end_turn" else _article(entry, "remark", "", end))
            case _:
                return ""

    def unanswered(self) -> str:
        """Return the HTML of the last answer's calls that have no result. Call this only if no
        result of these calls can follow."""
        calls, self._calls = self._calls, {}
        return "".join(
            f'<details class="entry call failed"><summary><span class="mark" aria-hidden="true">✗</span>'
            f'<span class="title">{self._page.line(call.name)}</span> <span class="state">no result</span></summary>'
            f"{self._arguments(call)}</details>\n"
            for call in calls.values()
        )

    def _prompt(self, entry: Entry, parts: Sequence[Part]) -> str:
        title = f"Prompt {next(self._numbers)}" if self._is_numbered else "Prompt"
        texts = " ".join(part.text[:1000] for part in parts if isinstance(part, Text))
        words = self._page.plain_line(texts)[:100] or "(no text)"
        self._outline.prompts.append((entry.id, words))
        return _article(entry, "prompt", title, "".join(map(self._part, parts)), level=2)

    def _part(self, part: Part) -> str:
        page = self._page
        match part:
            case Text(text=text):
                return plain_text(shorten_end(page.clean(text), _TEXT_CHARS))
            case Resource(uri=uri, text=text):
                content = self._pre(text, page.result_chars)
                return f"<details><summary>Attached: {page.line(uri)}</summary>{content}</details>"
            case Link(uri=uri, name=name):
                address, words = page.clean(uri), page.clean(name)[:_TITLE_CHARS]
                return f"<p>Linked: {link_to(address, words)}</p>"
            case Image():
                return page.take_image(part)
            case File(name=name, mime_type=mime_type):
                return f"<p>Attached: {page.line(f'{name} ({mime_type})')}</p>"

    def _answer(self, entry: Entry, body: Assistant) -> str:
        page, outline = self._page, self._outline
        outline.answers += 1
        name = entry.model or "The model"
        outline.models[name] = None
        usage = entry.usage
        filled = entry.estimate
        facts = []
        if usage is not None and usage.input_tokens is not None:
            filled = usage.input_tokens + (usage.output_tokens or 0)
            facts.append(f"{usage.input_tokens:,} in, {usage.output_tokens or 0:,} out")
        if entry.cost:
            facts.append(_dollars(entry.cost))
        cached = None
        if usage is not None and usage.input_tokens and usage.cached_tokens is not None:
            cached = min(1.0, usage.cached_tokens / usage.input_tokens)
        outline.points.append(_Point(len(outline.prompts), filled, outline.cost, cached))
        self._calls = {CallRef(assistant=entry.id, index=index): call for index, call in enumerate(body.calls)}
        text = interrupted_text(body) if body.finish == "interrupted" else body.text
        content = ""
        if body.thought.strip():
            thought = self._markdown(body.thought)
            content = f'<details class="thought"><summary>Thought</summary>{thought}</details>'
        if text.strip():
            content += self._markdown(text)
        if not content:
            return f'<a class="place" id="entry-{entry.id}"></a>\n'
        return _article(entry, "answer", page.line(name), content, facts=" · ".join(facts))

    def _result(self, entry: Entry, body: ToolResult) -> str:
        page = self._page
        call = self._calls.pop(body.call, None)
        shown = [self._diff(diff) for diff in body.announcement.diffs]
        diffs, added, removed = [one for one, _, _ in shown], sum(one[1] for one in shown), sum(one[2] for one in shown)
        changes = f"{_counts(added, removed)} " if shown else ""
        state = f"{'failed' if body.is_error else 'done'}, {body.duration_ms / 1000:.1f} s"
        content = [f'<p class="meta"><code>{page.line(body.name)}</code> {_meta(entry)}</p>']
        if call is not None and not diffs:
            content.append(self._arguments(call))
        content += diffs
        if body.plan is not None:
            content.append(self._pre("\n".join(map(plan_line, body.plan)), page.result_chars))
        elif body.text.strip() and not (diffs and not body.is_error):
            content.append(f"<h4>Result</h4>{self._pre(body.text, page.result_chars)}")
        content += map(page.take_image, body.images)
        content += (f"<p>Attached: {page.line(one.name)}</p>" for one in body.attachments)
        title = page.line((body.announcement.title or body.name).replace("`", ""))
        sign, kind = ("✗", "failed") if body.is_error else ("✓", "done")
        return (
            f'<details class="entry call {kind}" id="entry-{entry.id}"><summary>'
            f'<span class="mark" aria-hidden="true">{sign}</span><span class="title">{title}</span> {changes}'
            f'<span class="state">{state}</span></summary>{"".join(content)}</details>\n'
        )

    def _arguments(self, call: ToolCall) -> str:
        try:
            values = masked_json(json.loads(call.arguments), self._page.redact)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            text = call.raw or call.arguments
        else:
            text = "\n".join(
                f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
                for key, value in values.items()
            )
        return f"<h4>Arguments</h4>{self._pre(text, _ARGUMENT_CHARS)}" if text.strip() else ""

    def _diff(self, diff: Diff) -> tuple[str, int, int]:
        """Return the HTML of a change, and how many lines it adds and removes."""
        lines = diff_lines(self._page.clean(diff.old_text or ""), self._page.clean(diff.new_text))
        added, removed = (sum(line.mark == mark for line in lines) for mark in "+-")
        new = " (new)" if diff.old_text is None else ""
        head = f"<h4>{self._page.line(diff.path)}{new} {_counts(added, removed)}</h4>"
        rows, tag = [], {"+": "ins", "-": "del", "@": "b"}
        run: list[str] = []
        before = " "
        for mark, text in [*lines[:_DIFF_LINES], (" ", None)]:
            if run and (mark != before or text is None):
                joined = escape("\n".join(run)) + "\n"
                rows.append(f"<{tag[before]}>{joined}</{tag[before]}>" if before in tag else joined)
                run = []
            if text is not None:
                run.append(("" if mark == "@" else mark) + shorten_end(text, _DIFF_LINE_CHARS))
            before = mark
        more = len(lines) - _DIFF_LINES
        note = f'<p class="note">{more:,} more lines are not shown.</p>' if more > 0 else ""
        shown = f'{head}<pre class="diff" tabindex="0">{"".join(rows)}</pre>{note}' if lines else head
        return shown, added, removed

    def _checkpoint(self, entry: Entry, body: Checkpoint) -> str:
        page, outline = self._page, self._outline
        outline.compactions += 1
        outline.points.append(_Point(len(outline.prompts), body.tokens_after or None, outline.cost, is_compaction=True))
        kept = [f"everything from {_anchor(body.first_kept)} on"] if body.first_kept is not None else []
        kept += [f"{plural(len(body.pins), 'message')} of the user word for word"] if body.pins else []
        kept += [f"{plural(len(body.skills), 'skill')}"] if body.skills else []
        shown, covered = ", ".join(kept) or "nothing else", ""
        if body.first_covered is not None and body.last_covered is not None:
            covered = f" for the entries {body.first_covered} to {body.last_covered}"
        facts = f"{body.tokens_before:,} → {body.tokens_after:,} tokens, reason: {body.reason}, summary: {body.method}"
        content = [
            f"<p>From here on the model sees a summary{covered}. It keeps {shown} ({facts}).</p>",
            f"<details><summary>Summary</summary>{self._markdown(body.summary)}</details>",
        ]
        if body.pins:
            pins = "".join(
                f"<li>{_anchor(pin.entry)} {plain_text(shorten_end(page.clean(pin.text), page.result_chars))}</li>"
                for pin in body.pins
            )
            content.append(f"<details><summary>Kept messages</summary><ul>{pins}</ul></details>")
        for words, files in (("Files modified", body.files_modified), ("Files read", body.files_read)):
            if files:
                listed = "".join(f"<li><code>{page.line(name)}</code></li>" for name in files[-_LISTED_FILES:])
                content.append(f"<details><summary>{words}: {len(files):,}</summary><ul>{listed}</ul></details>")
        return _article(entry, "compaction", "Compaction (summary)", "".join(content), level=2)

    def _folded(self, entry: Entry, words: str, text: str) -> str:
        return (
            f'<details class="entry inner" id="entry-{entry.id}"><summary>{words}</summary>'
            f"{self._pre(text, self._page.result_chars)}</details>\n"
        )

    def _markdown(self, text: str) -> str:
        return render_markdown(shorten_end(self._page.clean(text), _TEXT_CHARS))

    def _pre(self, text: str, limit: int) -> str:
        """Return a text as preformatted HTML. If the text is long, its middle is left out."""
        shown = self._page.clean(_TERMINAL_CODES.sub("", text))
        if len(shown) <= limit:
            return f'<pre class="plain" tabindex="0">{escape(shown)}</pre>'
        head, tail = shown[: limit * 2 // 3], shown[-limit // 3 :]
        note = f"{len(shown) - len(head) - len(tail):,} of {len(shown):,} characters are not shown"
        return (
            f'<pre class="plain" tabindex="0">{escape(head)}</pre><p class="note">… {note} …</p>'
            f'<pre class="plain" tabindex="0">{escape(tail)}</pre>'
        )


def _article(entry: Entry, kind: str, title: str, content: str, *, level: int = 3, facts: str = "") -> str:
    heading = f"<h{level}>{title}</h{level}>" if title else ""
    shown = f'<span class="facts">{facts}</span>' if facts else ""
    head = f"<header>{heading}{shown}{_meta(entry)}</header>"
    return f'<article class="entry {kind}" id="entry-{entry.id}">{head}{content}</article>\n'


def _meta(entry: Entry) -> str:
    moment = local_time(entry.created_ms)
    return (
        f'<span class="meta"><time datetime="{moment.isoformat(timespec="seconds")}">{moment:%Y-%m-%d %H:%M}</time> '
        f"{_anchor(entry.id)}</span>"
    )


def _anchor(entry: int) -> str:
    return f'<a class="anchor" href="#entry-{entry}">#{entry}</a>'


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _counts(added: int, removed: int) -> str:
    return f'<span class="counts">+{added:,} −{removed:,}</span>'


def _plot(
    kind: str,
    words: str,
    points: Sequence[_Point],
    values: Iterable[float | None],
    top: float,
    scale: str,
    window: int | None,
) -> str:
    """Return the HTML of a plot. `values` has one value for each of `points`. A point with the value None is left out.
    At least one value must not be None. The vertical axis goes from 0 to `top`, which is above 0. `scale` is `top` as
    text. The drawing itself contains no text, so that browsers can stretch it to any width."""
    last = max(1, len(points) - 1)
    drawn = [(1000 * index / last, 100 - 96 * value / top) for index, value in enumerate(values) if value is not None]
    step = -(-len(drawn) // _PLOT_POINTS)
    groups = (drawn[at : at + step] for at in range(0, len(drawn), step))
    shown = [min(group, key=lambda point: point[1]) for group in groups]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
    cuts = (
        [1000 * index / last for index, point in enumerate(points) if point.is_compaction] if kind == "context" else []
    )
    marks = "".join(f'<line class="cut" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="100"/>' for x in cuts[:_PLOT_POINTS])
    if window is not None:
        y = 100 - 96 * window / top
        marks += f'<line class="limit" x1="0" x2="1000" y1="{y:.1f}" y2="{y:.1f}"/>'
    area = f"{shown[0][0]:.1f},100 {line} {shown[-1][0]:.1f},100"
    return (
        f'<figure class="plot {kind}"><figcaption>{escape(words)}</figcaption>'
        f'<div class="drawing"><p class="scale" aria-hidden="true"><span>{escape(scale)}</span><span>0</span></p>'
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f'<polygon points="{area}"/><polyline points="{line}"/>{marks}</svg></div>'
        f'<p class="axis" aria-hidden="true"><span>prompt {points[0].prompt}</span>'
        f"<span>prompt {points[-1].prompt}</span></p></figure>"
    )

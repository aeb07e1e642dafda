"""Sums up the tokens and the time of sessions, by cache breaks, tool outputs, tools and waiting for the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from crow.domain.entries import (
    BREAKS,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    Mask,
    ModelRequest,
    Note,
    Prompt,
    Restore,
    Started,
    ToolResult,
)
from crow.domain.messages import JsonObject
from crow.domain.rendering import code
from crow.domain.text import plural, title_line

_MOST = 10
"""The number of breaks, outputs and tools that are listed."""
RESULT_BYTES = 100_000
"""The model never sees more of a tool output than this, so no more of it needs to be read."""

_CHARS_PER_TOKEN = 4
"""For the estimated size of a tool output."""
_MISS_TOKENS = 1_024
"""A request is listed as a break if the log explains why the cache was missed. Otherwise, it is listed only if the
endpoint did not find more than this many tokens, and more than half, of the previous request in its cache."""
_TITLE_CHARS = 80


def is_break(body: Body) -> bool:
    """Return whether the first request after this entry does not begin with the whole previous request."""
    return isinstance(body, BREAKS) or (isinstance(body, Note) and body.about in ("dialect", "thought_level"))


def reason_of_break(body: Body) -> str:
    """Return why an entry breaks the cache."""
    match body:
        case Note(about="thought_level", value=value):
            return f"the thought level changed to {value or 'the default of the endpoint'}"
        case Note(value=value) if value.startswith("API "):
            return f"crow speaks another API with the endpoint ({value.removeprefix('API ')})"
        case Note(value="is_error"):
            return "this version of crow marks failed tool results"
        case Note(value=value):
            return f"the endpoint began to refuse a part of the messages, or to accept it again ({value})"
        case Checkpoint():
            return "a compaction replaced older messages"
        case Mask():
            return "a compaction hid old tool outputs"
        case Restore(skill=name) if name:
            return f"the skill {name} was unloaded"
        case Restore():
            return "a compaction was undone"
        case Prompt(reason=reason) if reason:
            return reason
        case _:
            return "a new system message was needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBreak:
    """A request for which the endpoint read less from its cache than it could have."""

    entry: int
    """The id of the request's answer."""
    session: str
    cause: str
    tokens: int | None
    """The input tokens that the previous request had, too, and that were not read from the cache. None if the endpoint
    does not say."""
    cost: float | None
    """The cost of the request in US dollars, or None if it is unknown."""
    created_ms: int


@dataclass(slots=True, kw_only=True)
class SentOutput:
    """A tool output, and what it cost to send it again with each request."""

    entry: int
    session: str
    tool: str
    title: str
    tokens: int
    """Its estimated size."""
    sent: int = 0
    """The number of counted requests that contained it so far."""
    sent_tokens: int = 0
    """`tokens` times `sent`. Set at the end of the path; 0 until then."""


@dataclass(slots=True, kw_only=True)
class ToolUse:
    """The calls of a tool."""

    name: str
    calls: int = 0
    ms: int = 0
    """The time that the calls took, in milliseconds. The times of calls that ran at the same time are added."""
    sent_tokens: int = 0
    """The estimated tokens of its outputs, counted once for each request that contained them."""


@dataclass(slots=True)
class _Path:
    """What is known of a path up to the entry that was added last."""

    requests: int = 0
    previous: Entry | None = None
    """The entry that was added last."""
    last_input: int = 0
    """The input tokens of the last request."""
    last_request_ms: int = 0
    """When the answer to it was stored."""
    model: str = ""
    """The model that answered it."""
    causes: list[str] = field(default_factory=list)
    """Why the next request will not begin with the whole last request. Empty if it will."""
    outputs: list[SentOutput] = field(default_factory=list)
    """The outputs that were added."""
    live: list[SentOutput] = field(default_factory=list)
    """The outputs that the next request will contain."""
    hiding: dict[int, Checkpoint | Mask] = field(default_factory=dict)
    """The compactions that were not undone, by the id of their entry."""
    started: set[CallRef] = field(default_factory=set)
    """The calls that began to run. A call that has a result but is missing here was refused."""


@dataclass(slots=True, kw_only=True)
class Spending:
    """Sums of entries. Each entry counts once, however many sessions share it.

    Call `begin` before each path, `add` for each of its entries, oldest first, and `finish` at the end.
    """

    sessions: Collection[str] | None = None
    """If set, only entries that these sessions have stored count."""
    since_ms: int = 0
    before_ms: int = 2**62
    model: str = ""
    """Only requests to models whose name contains this text count, and only the calls and outputs of such models."""
    requests: int = 0
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    model_ms: int = 0
    tools_ms: int = 0
    waiting_ms: int = 0
    """The time that questions to the user stayed open."""
    breaks: list[CacheBreak] = field(default_factory=list)
    tools: dict[str, ToolUse] = field(default_factory=dict)
    outputs: list[SentOutput] = field(default_factory=list)
    """The outputs that cost the most, largest first."""
    _seen: set[int] = field(default_factory=set)
    """The ids of the entries that were added, on this path or an earlier one."""
    _path: _Path = field(default_factory=_Path)
    _moves: dict[int | None, str] = field(default_factory=dict)
    """The moves of `begin` whose entry has not been reached yet."""

    def begin(self, moves: Mapping[int | None, str] | None = None) -> None:
        """Begin a path. `moves` says to which entries the session has moved back: it maps the id of each to the reason,
        such as an undo. The key None stands for the place before the first entry."""
        self._close(self._path)
        self._path, self._moves = _Path(), dict(moves or {})

    def add(self, entry: Entry) -> None:
        """Count the next entry of the path."""
        path, body = self._path, entry.body
        counts = self._counts(entry)
        if path.previous is not None and entry.parent in self._moves:
            path.causes.append(f"the session moved to another entry ({self._moves.pop(entry.parent)})")
        if is_break(body) and path.requests:
            path.causes.append(reason_of_break(body))
        if counts:
            self._count_time(entry)
            if not isinstance(body, ToolResult):
                self._count_usage(entry)
        match body:
            case Assistant():
                path.requests += 1
                for output in path.live if counts else ():
                    output.sent += 1
                self._note_request(entry, counts=counts)
            case ToolResult():
                self._note_result(entry, body, counts=counts)
            case Started(call=call):
                path.started.add(call)
            case Checkpoint() | Mask():
                path.hiding[entry.id] = body
                path.live = [output for output in path.live if not _hides(entry.id, body, output)]
            case Restore() if path.hiding.pop(body.entry, None) is not None:
                path.live = [
                    output
                    for output in path.outputs
                    if not any(_hides(at, each, output) for at, each in path.hiding.items())
                ]
            case _:
                pass
        path.previous = entry

    def finish(self) -> None:
        """Count the outputs of the last path."""
        self.begin()

    @property
    def cached_share(self) -> float:
        """The share of the input tokens that was read from the cache."""
        return self.tokens_cached / self.tokens_in if self.tokens_in else 0.0

    def as_json(self) -> JsonObject:
        """Return everything for programs."""
        return {
            "requests": self.requests,
            "tokens_in": self.tokens_in,
            "tokens_cached": self.tokens_cached,
            "tokens_out": self.tokens_out,
            "cost": self.cost,
            "cached_share": round(self.cached_share, 4),
            "seconds": {"model": self.model_ms / 1000, "tools": self.tools_ms / 1000, "you": self.waiting_ms / 1000},
            "breaks": [asdict(each) for each in self.breaks],
            "outputs": [asdict(each) for each in self.outputs],
            "tools": [asdict(each) for each in self.top_tools()],
        }

    def top_tools(self) -> list[ToolUse]:
        """Return the tools that cost the most, largest first."""
        return sorted(self.tools.values(), key=lambda use: (-use.sent_tokens, -use.ms, use.name))[:_MOST]

    def _top_breaks(self) -> list[CacheBreak]:
        """Return the breaks that cost the most, largest first."""
        return sorted(self.breaks, key=lambda each: (-(each.tokens or 0), each.entry))[:_MOST]

    def text(self) -> str:
        """Return everything as Markdown."""
        lines = [f"{100 * self.cached_share:.0f} % of the input tokens were read from the provider's cache."]
        times = (("the model", self.model_ms), ("tools", self.tools_ms), ("your answers", self.waiting_ms))
        lines += ["", "Time: " + ", ".join(f"{duration(ms)} for {name}" for name, ms in times) + "."]
        if self.breaks:
            lines += ["", f"{plural(len(self.breaks), 'cache break')}; these cost the most:", ""]
            lines += [f"- entry {each.entry}: {_break_words(each)}" for each in self._top_breaks()]
        if self.outputs:
            lines += ["", "The outputs that cost the most input tokens (estimated):", ""]
            lines += [f"- {code(each.title)}: {_output_words(each)}" for each in self.outputs]
        if self.tools:
            lines += ["", "The tools that cost the most:", ""]
            lines += [f"- {code(use.name)}: {_tool_words(use)}" for use in self.top_tools()]
        return "\n".join(lines)

    def _counts(self, entry: Entry) -> bool:
        is_new = entry.id not in self._seen
        self._seen.add(entry.id)
        is_own = self.sessions is None or entry.session in self.sessions
        model = entry.model or self._path.model  # a result belongs to the model that made the call
        has_model = not self.model or self.model.lower() in model.lower()
        return is_new and is_own and has_model and self.since_ms <= entry.created_ms < self.before_ms

    def _count_usage(self, entry: Entry) -> None:
        usage = entry.usage
        if (usage is None or (usage.input_tokens is None and usage.output_tokens is None)) and entry.cost is None:
            return
        self.requests += 1
        self.cost += entry.cost or 0.0
        if usage is not None:
            self.tokens_in += usage.input_tokens or 0
            self.tokens_cached += usage.cached_tokens or 0
            self.tokens_out += usage.output_tokens or 0

    def _count_time(self, entry: Entry) -> None:
        """Count the time since the previous entry of the turn as the model's, a tool's or the user's, depending on the
        kind of this entry."""
        previous, body = self._path.previous, entry.body
        if isinstance(body, ToolResult):
            self.tools_ms += body.duration_ms
        if previous is None or previous.turn != entry.turn:
            return
        passed = max(0, entry.created_ms - previous.created_ms)
        match body:
            case Assistant() | ModelRequest() | Checkpoint():
                self.model_ms += passed
            case Started(why=why) if why.endswith("by the user"):
                self.waiting_ms += passed
            case ToolResult(call=call) if call not in self._path.started:  # refused
                self.waiting_ms += passed
            case _:
                pass

    def _note_request(self, entry: Entry, *, counts: bool) -> None:
        path, usage = self._path, entry.usage
        sent = 0 if usage is None else usage.input_tokens or 0
        cached = None if usage is None else usage.cached_tokens
        causes, path.causes = list(dict.fromkeys(path.causes)), []
        if path.last_input and sent and path.model != entry.model and not causes:
            causes = [f"the model changed from {path.model} to {entry.model}"]
        if path.last_input and sent:
            expected = min(path.last_input, sent)
            lost = None if cached is None else max(0, expected - cached)
            if not causes and lost is not None and cached is not None and lost > max(_MISS_TOKENS, expected // 2):
                minutes = (entry.created_ms - path.last_request_ms) / 60_000
                causes = [f"the endpoint did not find it in its cache, {minutes:.0f} min after the request before"]
            if causes and counts:
                self.breaks.append(
                    CacheBreak(
                        entry=entry.id,
                        session=entry.session,
                        cause="; ".join(causes),
                        tokens=lost,
                        cost=entry.cost,
                        created_ms=entry.created_ms,
                    )
                )
        path.last_input, path.last_request_ms, path.model = sent or path.last_input, entry.created_ms, entry.model

    def _note_result(self, entry: Entry, body: ToolResult, *, counts: bool) -> None:
        if counts:
            use = self.tools.setdefault(body.name, ToolUse(name=body.name))
            use.calls, use.ms = use.calls + 1, use.ms + body.duration_ms
            chars = len(body.text) if body.cut is None else min(len(body.text), body.cut)
            output = SentOutput(
                entry=entry.id,
                session=entry.session,
                tool=body.name,
                title=title_line(body.announcement.title.replace("`", "") or body.name, _TITLE_CHARS),
                tokens=-(-chars // _CHARS_PER_TOKEN),
            )
            self._path.outputs.append(output)
            self._path.live.append(output)

    def _close(self, path: _Path) -> None:
        """Add up the tokens of the outputs of a path."""
        for output in path.outputs:
            output.sent_tokens = output.tokens * output.sent
            self.tools[output.tool].sent_tokens += output.sent_tokens
        found = (output for output in (*self.outputs, *path.outputs) if output.sent_tokens)
        self.outputs = sorted(found, key=lambda output: (-output.sent_tokens, output.entry))[:_MOST]


def _hides(at: int, body: Checkpoint | Mask, output: SentOutput) -> bool:
    """Return whether the compaction that the entry `at` stores hides an output from the model."""
    if isinstance(body, Checkpoint):
        return output.entry < (at if body.first_kept is None else body.first_kept)
    return output.entry < min(body.before, at) and output.entry not in body.exceptions


def _break_words(each: CacheBreak) -> str:
    """Return the cause and the cost of a break."""
    tokens = "an unknown number of" if each.tokens is None else f"{each.tokens:,}"
    cost = f"; the request cost {each.cost:.4f} US dollars" if each.cost else ""
    return f"{each.cause}: {tokens} tokens sent again without the cache{cost}"


def _output_words(each: SentOutput) -> str:
    """Return what an output cost."""
    return f"{each.sent_tokens:,} tokens ({each.tokens:,} in {plural(each.sent, 'request')}; entry {each.entry})"


def _tool_words(use: ToolUse) -> str:
    """Return what the calls of a tool cost."""
    return f"{plural(use.calls, 'call')}, {duration(use.ms)}, {use.sent_tokens:,} input tokens for its outputs"


def duration(ms: int) -> str:
    """Return a time in words."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

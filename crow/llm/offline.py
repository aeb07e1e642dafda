"""The built-in model: no network, no language model, the same answer every time.

Strategy: `rules` decides what to answer from the messages alone; this file streams it in small pieces, as a model
would, so that everything around it (drafts, cancelling, kills, compaction) can be seen and tested without an endpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

import anyio
import anyio.lowlevel

from crow.domain.messages import (
    Answer,
    AssistantMessage,
    JsonObject,
    Message,
    Text,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
from crow.domain.tokens import estimate_message, estimate_text, estimate_tools
from crow.llm import Delta, ModelInfo, Request, TextDelta, ThoughtDelta

__all__ = ["OfflineModel", "OfflineReply", "is_summary_wanted", "recap", "reply_to", "summary"]

_WINDOW = 32_768
_PIECE = re.compile(r"\s*\S+\s?|\s+")


class OfflineModel:
    """See :class:`crow.llm.Model`. `piece_delay_s` is waited after each word, `slow_delay_s` after each number of a
    count; 0 only lets others run."""

    def __init__(
        self,
        *,
        context_window: int | None = None,
        piece_delay_s: float = 0.005,
        slow_delay_s: float = 0.05,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._info = ModelInfo(
            name="offline",
            endpoint="offline offline",
            context_window=context_window or _WINDOW,
            is_window_configured=context_window is not None,
            takes_images=False,
        )
        self._piece_delay_s = piece_delay_s
        self._slow_delay_s = slow_delay_s
        self._sleep = sleep

    @property
    def info(self) -> ModelInfo:
        """Fixed."""
        return self._info

    def check(self) -> None:
        """Nothing is needed."""

    def stream(self, request: Request) -> OfflineStream:
        """The reply to `request`, in pieces."""
        return OfflineStream(request, self._pause)

    async def close(self) -> None:
        """Nothing is open."""

    async def _pause(self, is_slow: bool) -> None:
        delay_s = self._slow_delay_s if is_slow else self._piece_delay_s
        if delay_s > 0:
            await self._sleep(delay_s)
        else:
            await anyio.lowlevel.checkpoint()


class OfflineStream:
    """See :class:`crow.llm.Stream`."""

    def __init__(self, request: Request, pause: Callable[[bool], Awaitable[None]]) -> None:
        self._request = request
        self._pause = pause
        self._text: list[str] = []
        self._thought: list[str] = []
        self._answer: Answer | None = None
        self._deltas = self._run()

    async def __aenter__(self) -> OfflineStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._deltas.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    @property
    def answer(self) -> Answer:
        """The whole answer. :raises RuntimeError: before the iteration ended."""
        if self._answer is None:
            raise RuntimeError("the answer is not whole yet")
        return self._answer

    def partial(self) -> Answer:
        """What was given out so far."""
        return Answer(text="".join(self._text), thought="".join(self._thought), finish="interrupted")

    async def _run(self) -> AsyncGenerator[Delta, None]:
        request = self._request
        offered = [tool.name for tool in request.tools]
        reply = reply_to(request.messages, offered, may_call=request.tool_choice == "auto")
        for piece in _PIECE.findall(reply.thought):
            self._thought.append(piece)
            yield ThoughtDelta(text=piece)
            await self._pause(False)
        pieces = _PIECE.findall(reply.text)
        most = request.max_output_tokens
        is_cut = most is not None and len(pieces) > most
        for piece in pieces[:most]:
            self._text.append(piece)
            yield TextDelta(text=piece)
            await self._pause(reply.is_slow)
        self._answer = _answer(request, reply, "".join(self._text), is_cut=is_cut)


def _answer(request: Request, reply: OfflineReply, text: str, *, is_cut: bool) -> Answer:
    calls: tuple[ToolCall, ...] = ()
    if reply.call is not None and not is_cut:
        name, arguments = reply.call
        # Nine characters, and new with every message that came before.
        call_id = f"off{len(request.messages):06d}"
        calls = (ToolCall(id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=False)),)
    sent = sum(map(estimate_message, request.messages)) + estimate_tools(request.tools)
    made = estimate_text(text) + sum(estimate_text(call.arguments) for call in calls)
    return Answer(
        text=text,
        thought=reply.thought,
        calls=calls,
        finish="length" if is_cut else "tool_calls" if calls else "stop",
        usage=Usage(input_tokens=max(1, sent), output_tokens=max(1, made), cached_tokens=0),
    )


# FROM llm.rules: The rules that the offline model follows: a request in plain words to the calls and texts that
# answer it.
#
# Strategy: a prompt is cut at " then " into steps, each matched against a short table; how many calls were made since
# the prompt tells which step is next, so that the same messages always give the same reply. Pure.


ABOUT = (
    "I am crow's offline model: I follow fixed rules and am no language model. I can: read FILE, write FILE: TEXT, "
    "edit FILE: OLD -> NEW, run COMMAND, list files, search WORDS, plan: A; B; C, recall WORDS, count to N, think "
    "about WORDS, say WORDS, call TOOL {JSON}, and summarise. Several requests can be joined with the word then. For "
    "real work, set OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL."
)
_SHOWN_LINES = 12
_SHOWN_CHARS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineReply:
    """What to answer: a thought, a text, at most one call; `is_slow` streams the text at reading pace."""

    text: str = ""
    thought: str = ""
    call: tuple[str, JsonObject] | None = None
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One request: a call with words to go before it, or words alone."""

    words: str
    thought: str = ""
    tool: str = ""
    arguments: JsonObject = field(default_factory=dict)
    is_slow: bool = False


def reply_to(messages: Sequence[Message], offered: Sequence[str], *, may_call: bool) -> OfflineReply:
    """The reply to the last prompt in `messages`, given which tools are offered."""
    at = _last_prompt(messages)
    prompt = _prompt_text(messages[at]) if at is not None else ""
    if is_summary_wanted(prompt):
        return OfflineReply(text=summary(messages, prompt))
    since = messages[at + 1 :] if at is not None else ()
    steps = _steps(prompt, messages)
    if not steps:
        return OfflineReply(text=_unknown(prompt))
    calls_made = sum(len(message.calls) for message in since if isinstance(message, AssistantMessage))
    results = [message for message in since if isinstance(message, ToolMessage)]
    words: list[str] = [_shown(results[-1].text)] if results else []
    thought = ""
    is_slow = False
    for step in _after_calls(steps, calls_made):
        words.append(step.words)
        thought = thought or step.thought
        is_slow = is_slow or step.is_slow
        if not step.tool:
            continue
        if may_call and step.tool in offered:
            return OfflineReply(text="\n\n".join(words), thought=thought, call=(step.tool, step.arguments))
        words[-1] = f"I cannot do that: the tool {step.tool} is not offered to me."
    return OfflineReply(text="\n\n".join(words) or "Done.", thought=thought, is_slow=is_slow)


def _after_calls(steps: Sequence[_Step], calls: int) -> Sequence[_Step]:
    """The steps that are left after so many calls."""
    for position, step in enumerate(steps):
        if calls <= 0:
            return steps[position:]
        if step.tool:
            calls -= 1
    return ()


def _last_prompt(messages: Sequence[Message]) -> int | None:
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if isinstance(message, UserMessage) and _prompt_text(message):
            return position
    return None


def _prompt_text(message: Message) -> str:
    """What the user wrote, without what was added for the model (reminders, skills, notes in brackets)."""
    if not isinstance(message, UserMessage):
        return ""
    texts = (part.text.strip() for part in message.parts if isinstance(part, Text))
    return "\n".join(text for text in texts if text and not text.startswith(("<", "[The ", "[This ", "[No ")))


def _steps(prompt: str, messages: Sequence[Message]) -> list[_Step]:
    """The steps of a prompt; the words after a "then" that begin no step belong to the one before."""
    steps: list[_Step] = []
    pending = ""
    for piece in re.split(r"(?<!\s)\s++then\s+", prompt.strip()):
        step = _step(piece, messages)
        if step is None and not pending:
            return []
        if step is None:
            pending = f"{pending} then {piece}"
            steps[-1] = _step(pending, messages) or steps[-1]
            continue
        pending = piece
        steps.append(step)
    return steps


def _step(piece: str, messages: Sequence[Message]) -> _Step | None:
    piece = re.sub(r"^(?:please|can you|could you|now|and)\s+", "", piece.strip(), flags=re.IGNORECASE)
    for pattern, make in _RULES:
        match = pattern.fullmatch(piece)
        if match is not None:
            return make(match)
    if re.fullmatch(r"(?:summari[sz]e|recap|sum up)\b.{0,80}", piece, re.IGNORECASE | re.DOTALL):
        return _Step(words=recap(messages))
    return None


def _read(match: re.Match[str]) -> _Step:
    arguments: dict[str, object] = {"path": _plain(match["path"])}
    if match["line"]:
        arguments["line"] = int(match["line"])
    return _Step(words=f"I read {arguments['path']}.", tool="read_file", arguments=arguments)


def _write(match: re.Match[str]) -> _Step:
    path = _plain(match["path"])
    return _Step(words=f"I write {path}.", tool="write_file", arguments={"path": path, "content": match["text"] + "\n"})


def _edit(match: re.Match[str]) -> _Step:
    path = _plain(match["path"])
    arguments = {"path": path, "old_text": match["old"], "new_text": match["new"]}
    return _Step(words=f"I edit {path}.", tool="edit_file", arguments=arguments)


def _run(match: re.Match[str]) -> _Step:
    command = match["command"].strip().strip("`")
    return _Step(words=f"I run `{command}`.", tool="shell", arguments={"command": command})


def _list(match: re.Match[str]) -> _Step:
    arguments = {"path": _plain(match["path"])} if match["path"] else {}
    return _Step(words="I list the files.", tool="list_files", arguments=arguments)


def _search(match: re.Match[str]) -> _Step:
    arguments = {"pattern": _plain(match["words"])}
    if match["path"]:
        arguments["path"] = _plain(match["path"])
    return _Step(words=f'I search for "{arguments["pattern"]}".', tool="grep", arguments=arguments)


def _plan(match: re.Match[str]) -> _Step:
    lines = [line.strip() for line in match["items"].split(";") if line.strip()]
    items = [
        {"content": line, "status": "pending" if position else "in_progress", "priority": "medium"}
        for position, line in enumerate(lines)
    ]
    return _Step(words="I write the plan down.", tool="update_plan", arguments={"items": items})


def _recall(match: re.Match[str]) -> _Step:
    words = _plain(match["words"])
    arguments: dict[str, object] = {"entry": int(words)} if words.isdecimal() else {"query": words}
    return _Step(words=f'I look up "{words}" in the log.', tool="recall", arguments=arguments)


def _count(match: re.Match[str]) -> _Step:
    last = min(int(match["last"]), 1_000_000)
    return _Step(words="\n".join(map(str, range(1, last + 1))), is_slow=True)


def _think(match: re.Match[str]) -> _Step:
    return _Step(words="I have thought about it.", thought=f"A rule says: think about {match['words'].strip()}.")


def _say(match: re.Match[str]) -> _Step:
    return _Step(words=match["words"].strip())


def _call(match: re.Match[str]) -> _Step:
    try:
        arguments = json.loads(match["arguments"] or "{}")
    except ValueError:
        return _Step(words=f"{match['arguments']} is no JSON.")
    if not isinstance(arguments, Mapping):
        return _Step(words=f"{match['arguments']} is no JSON object.")
    return _Step(words=f"I call {match['tool']}.", tool=match["tool"], arguments=arguments)


_Make: TypeAlias = Callable[[re.Match[str]], _Step]
_RULES: tuple[tuple[re.Pattern[str], _Make], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), make)
    for pattern, make in (
        (r"(?:read|show|open)\s+(?:the\s+)?(?:file\s+)?(?P<path>\S+?)(?:\s+from\s+line\s+(?P<line>\d+))?[.!]?", _read),
        (r"(?:write|create)\s+(?:the\s+)?(?:file\s+)?(?P<path>[^\s:]+):\s?(?P<text>.*)", _write),
        (r"edit\s+(?:the\s+)?(?:file\s+)?(?P<path>[^\s:]+):\s?(?P<old>.+?)\s->\s(?P<new>.*)", _edit),
        (r"(?:run|execute)\s+(?P<command>.+)", _run),
        (r"list\s+(?:the\s+|all\s+)?files(?:\s+(?:in|of|under)\s+(?P<path>\S+?))?[.!]?", _list),
        (r"(?:search|grep)\s+(?:for\s+)?(?P<words>.+?)(?:\s+in\s+(?P<path>\S+))?", _search),
        (r"plan:\s*(?P<items>.+)", _plan),
        (r"recall\s+(?:entry\s+)?(?P<words>.+)", _recall),
        (r"count\s+to\s+(?P<last>\d{1,9})[.!]?", _count),
        (r"think(?:\s+about|:)\s*(?P<words>.+)", _think),
        (r"(?:say|echo)\s+(?P<words>.+)", _say),
        (r"call\s+(?P<tool>[A-Za-z0-9_-]+)\s*(?P<arguments>\{.*\})?", _call),
    )
)


def _plain(words: str) -> str:
    return words.strip().strip("`\"'")


def _shown(result: str) -> str:
    """The beginning of what a tool said."""
    lines = result.strip("\n").rstrip().splitlines()
    head = "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARS]
    more = len(lines) - _SHOWN_LINES
    if not head:
        return "The tool said nothing."
    return f"The tool said:\n\n{head}" + (f"\n... and {more} more lines" if more > 0 else "")


def _unknown(prompt: str) -> str:
    first = prompt.splitlines()[0][:120] if prompt else ""
    return f'I have no rule for "{first}".\n\n{ABOUT}' if first else ABOUT


# FROM llm.digest: What the offline model says of a conversation: an extract, made by rules, that keeps names and
# order.
#
# Strategy: what was asked, what was called and what came of it, in the words of the messages themselves; an earlier
# summary is carried over heading by heading. Pure.


_HEADINGS = ("Goal", "Constraints", "Done", "In progress", "Blocked", "Decisions and why", "Next", "Facts")
_BOUND = re.compile(r"at most (\d[\d,]*) (word|token)", re.IGNORECASE)
_DEFAULT_WORDS = 400
_LINE_CHARS = 160


def is_summary_wanted(prompt: str) -> bool:
    """Whether a prompt is the instruction of a compaction: it names the headings."""
    return "## Goal" in prompt and "## Next" in prompt


def summary(messages: Sequence[Message], instruction: str) -> str:
    """A summary under the fixed headings, within the number of words (or tokens) that the instruction names."""
    match = _BOUND.search(instruction)
    words = _DEFAULT_WORDS
    if match is not None:
        words = int(match[1].replace(",", "")) if match[2].lower() == "word" else int(match[1].replace(",", "")) // 2
    asked, done = _asked(messages), _done(messages)
    sections = _earlier(messages)
    if asked:
        sections.setdefault("Goal", [asked[0]])
        sections["Next"] = [f"Answer the newest request: {asked[-1]}"]
        sections["In progress"] = [asked[-1]]
    sections["Done"] = [*sections.get("Done", ()), *done]
    paths = dict.fromkeys([*(line[2:] for line in sections.get("Facts", ())), *_paths(messages)])
    sections["Facts"] = [f"- {path}" for path in paths]
    return _within(sections, max(20, words))


def recap(messages: Sequence[Message]) -> str:
    """A few lines for the user."""
    asked, done = _asked(messages)[:-1], _done(messages)
    if not asked and not done:
        return "Nothing has happened in this session yet."
    lines = ["By my rules, this session so far:"]
    lines += [f"- you asked: {line}" for line in asked[-8:]]
    lines += [f"- done: {line}" for line in done[-8:]]
    return "\n".join(lines)


def _within(sections: dict[str, list[str]], words: int) -> str:
    """The sections as text; the oldest lines of the longest section go first where there are too many words."""
    kept = {heading: list(sections.get(heading, ())) for heading in _HEADINGS}
    while True:
        text = "\n".join(line for heading, lines in kept.items() if lines for line in (f"## {heading}", *lines))
        longest = max(kept.values(), key=len)
        if len(text.split()) <= words or not longest:
            return text
        del longest[0]


def _asked(messages: Sequence[Message]) -> list[str]:
    """The first lines of the user's prompts, oldest first."""
    lines: list[str] = []
    for message in messages:
        if not isinstance(message, UserMessage):
            continue
        texts = (part.text.strip() for part in message.parts if isinstance(part, Text))
        own = [text for text in texts if text and not text.startswith(("<", "[")) and not is_summary_wanted(text)]
        lines.extend(_line(text) for text in own[:1])
    return lines


def _done(messages: Sequence[Message]) -> list[str]:
    """One line for each call: its name, its arguments, and how its result begins."""
    results = {message.call_id: message.text for message in messages if isinstance(message, ToolMessage)}
    return [
        _line(f"{call.name} {call.arguments}: {results.get(call.id, 'no result').strip()}")
        for message in messages
        if isinstance(message, AssistantMessage)
        for call in message.calls
    ]


def _paths(messages: Sequence[Message]) -> list[str]:
    paths: list[str] = []
    for message in messages:
        for call in message.calls if isinstance(message, AssistantMessage) else ():
            path = json.loads(call.arguments).get("path")
            if isinstance(path, str):
                paths.append(path)
    return paths


def _earlier(messages: Sequence[Message]) -> dict[str, list[str]]:
    """The sections of the summary that a compacted conversation begins with."""
    sections: dict[str, list[str]] = {}
    first = next((message for message in messages if isinstance(message, UserMessage)), None)
    text = "\n".join(part.text for part in first.parts if isinstance(part, Text)) if first is not None else ""
    if not text.startswith("["):
        return sections
    heading = ""
    for line in text.splitlines():
        if line.startswith(("#", "[", "<")):
            heading = line.removeprefix("## ")
        elif heading in _HEADINGS and line.strip():
            sections.setdefault(heading, []).append(line)
    return sections


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"

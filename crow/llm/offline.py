"""The built-in model. It follows fixed rules, needs no network, and always gives the same answer to the same request.

A prompt is split at " then " into steps, and each step is matched against a short table of rules. The number of calls
since the prompt determines the next step. The built-in model streams text in small pieces, like a real one. So drafts,
cancellation, killed processes and compaction can be tried and tested without an endpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import anyio

from crow.domain import messages as domain
from crow.domain.text import shorten
from crow.domain.tokens import estimate_message, estimate_text, estimate_tools
from crow.llm import Attempt, Delta, ModelInfo, Request, TextDelta, ThoughtDelta

_ABOUT = (
    "I am crow's offline model. I follow fixed rules and am not a language model. I understand: read FILE, write FILE: "
    "TEXT, edit FILE: OLD -> NEW, run COMMAND, list files, plan: A; B; C, count to N, think about WORDS, say WORDS, "
    'call TOOL {JSON}, and summarise. Join several requests with "then". For real work, set OPENAI_BASE_URL, '
    "OPENAI_API_KEY and CROW_MODEL."
)
_PIECE = re.compile(r"\s*\S+\s?|\s+")
_SHOWN_LINES = 12
_SHOWN_CHARS = 800
_LINE_CHARS = 160
_MAX_COUNT = 1_000_000
_WORD_LIMIT = re.compile(r"at most (\d[\d,]*) (word|token)", re.IGNORECASE)
PIECE_DELAY_S = 0.005
"""The pause after each word, in seconds."""
_SLOW_DELAY_S = 0.05
"""The pause after each number when the model counts."""
_EARLIER_GOAL = re.compile(r"^## Goal\n(.+)", re.MULTILINE)


class OfflineModel:
    """The built-in model; see :class:`crow.llm.Model`. `sleep` waits for a number of seconds."""

    def __init__(
        self,
        *,
        context_window: int | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.info = ModelInfo(
            name="offline",
            endpoint="offline offline",  # the address and the model's name
            is_local=True,
            context_window=context_window or 32_768,
            is_window_configured=context_window is not None,
        )
        self._sleep = sleep

    def check(self) -> None:
        """Do nothing, because the model always works."""

    def stream(self, request: Request) -> AbstractAsyncContextManager[_OfflineStream]:
        """Return the reply to `request`, in pieces."""
        return nullcontext(_OfflineStream(request, self._sleep))

    async def retire(self) -> None:
        """Do nothing, because there is nothing to close."""

    async def close(self) -> None:
        """Do nothing, because there is nothing to close."""


class _OfflineStream:
    """The stream of one reply; see :class:`crow.llm.Stream`."""

    def __init__(self, request: Request, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._request = request
        self._sleep = sleep
        self._text: list[str] = []
        self._thought: list[str] = []
        self._answer: domain.Answer | None = None
        self._has_begun = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        request = self._request
        may_call = request.tool_choice == "auto"
        reply = _reply_to(request.messages, {tool.name for tool in request.tools} if may_call else ())
        self._has_begun = True
        for piece in _PIECE.findall(reply.thought):
            self._thought.append(piece)
            yield ThoughtDelta(text=piece)
            await self._sleep(PIECE_DELAY_S)
        pieces = _PIECE.findall(reply.text)
        limit = request.max_output_tokens
        is_cut = limit is not None and len(pieces) > limit
        for piece in pieces[:limit]:
            self._text.append(piece)
            yield TextDelta(text=piece)
            await self._sleep(_SLOW_DELAY_S if reply.is_slow else PIECE_DELAY_S)
        calls: tuple[domain.ToolCall, ...] = ()
        if reply.call is not None and not is_cut:
            name, arguments = reply.call
            # Each call makes the conversation longer, so the ID is unique within the conversation.
            call_id = f"off{len(request.messages):06d}"
            calls = (domain.ToolCall(id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=False)),)
        sent = sum(map(estimate_message, request.messages)) + estimate_tools(request.tools)
        made = estimate_text("".join(self._text)) + sum(estimate_text(call.arguments) for call in calls)
        self._answer = domain.Answer(
            text="".join(self._text),
            thought=reply.thought,
            calls=calls,
            finish="length" if is_cut else "tool_calls" if calls else "stop",
            usage=domain.Usage(input_tokens=max(1, sent), output_tokens=max(1, made), cached_tokens=0),
        )

    @property
    def answer(self) -> domain.Answer:
        """The whole answer.

        :raises RuntimeError: the iteration has not ended yet.
        """
        if self._answer is None:
            raise RuntimeError("the answer is not complete yet")
        return self._answer

    def partial(self) -> domain.Answer:
        """Return the text and the thought that were streamed so far."""
        return domain.Answer(text="".join(self._text), thought="".join(self._thought), finish="interrupted")

    def attempts(self) -> tuple[Attempt, ...]:
        """Return one attempt, or none if the request has not begun."""
        if self._answer is not None:
            return (Attempt(usage=self._answer.usage),)
        made = estimate_text("".join(self._text)) + estimate_text("".join(self._thought))
        return (Attempt(output_tokens=made),) if self._has_begun else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfflineStep:
    """The model's output for one step of a prompt, or its whole reply: a thought, then a text, then at most one
    call."""

    text: str = ""
    thought: str = ""
    call: tuple[str, domain.JsonObject] | None = None
    """The name and the arguments."""
    is_slow: bool = False
    """Whether the text is streamed slowly, with `_SLOW_DELAY_S` after each word."""


_TOOL_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), tool, text)
    for pattern, tool, text in (
        (r"(?:read|show|open)\s+(?:the\s+)?(?:file\s+)?(?P<path>\S+?)[.!]?", "read_file", "I read {path}."),
        (r"write\s+(?P<path>[^\s:]+):\s?(?P<content>.*)", "write_file", "I write {path}."),
        (r"edit\s+(?P<path>[^\s:]+):\s?(?P<old_text>.+?)\s->\s(?P<new_text>.*)", "edit_file", "I edit {path}."),
        (r"run\s+`?(?P<command>.+?)`?", "shell", "I run `{command}`."),
        (r"list\s+(?:the\s+)?files(?:\s+in\s+(?P<path>\S+?))?[.!]?", "list_files", "I list the files."),
        (r"plan:\s*(?P<items>.+)", "update_plan", "I write the plan down."),
    )
)
"""Pattern, tool and text of each rule. The named groups of the pattern are the arguments of the call."""

_TEXT_RULE = re.compile(
    r"count\s+to\s+(?P<last>\d{1,9})|think\s+about\s+(?P<topic>.+)|say\s+(?P<words>.+)|(?P<summary>summari[sz]e\b.{0,80})"
    r"|call\s+(?P<tool>[A-Za-z0-9_-]+)\s*(?P<arguments>\{.*\})?",
    re.IGNORECASE | re.DOTALL,
)


def _reply_to(messages: Sequence[domain.Message], offered: Collection[str]) -> _OfflineStep:
    """Return the reply to the last prompt in `messages`. `offered` contains the names of the tools that the reply may
    call."""
    prompts = [at for at, message in enumerate(messages) if _prompt_text(message)]
    since = messages[prompts[-1] + 1 :] if prompts else ()
    prompt = _prompt_text(messages[prompts[-1]]) if prompts else ""
    if _is_summary_instruction(prompt):
        return _OfflineStep(text=_summarise(messages, prompt))
    if not (steps := _steps(prompt, messages)):
        first_line = prompt.partition("\n")[0][:120]
        return _OfflineStep(text=f'I have no rule for "{first_line}".\n\n{_ABOUT}' if first_line else _ABOUT)
    calls_made = sum(len(message.calls) for message in since if isinstance(message, domain.AssistantMessage))
    while steps and calls_made > 0:
        step = steps.pop(0)
        if step.call is not None and step.call[0] in offered:
            calls_made -= 1
    results = [message.text for message in since if isinstance(message, domain.ToolMessage)]
    texts = [_describe_result(results[-1])] if results else []
    calls = (at for at, step in enumerate(steps) if step.call is not None and step.call[0] in offered)
    first_call = next(calls, None)
    now = steps if first_call is None else steps[: first_call + 1]
    for step in now:
        name = step.call[0] if step.call is not None else None
        texts.append(step.text if name is None or name in offered else f"The tool {name} is not offered to me.")
    return _OfflineStep(
        text="\n\n".join(texts) or "Done.",
        thought=next((step.thought for step in now if step.thought), ""),
        call=None if first_call is None else steps[first_call].call,
        is_slow=any(step.is_slow for step in now),
    )


_ADDED = ("<", "[The ", "[This ", "[No ")
"""The texts that crow adds for the model begin with one of these."""


def _prompt_text(message: domain.Message) -> str:
    """Return the text that the user wrote in a message, without the text that crow adds for the model. Return an empty
    string for any other kind of message."""
    if not isinstance(message, domain.UserMessage):
        return ""
    texts = (part.text.strip() for part in message.parts if isinstance(part, domain.Text))
    return "\n".join(text for text in texts if text and not text.startswith(_ADDED))


def _steps(prompt: str, messages: Sequence[domain.Message]) -> list[_OfflineStep]:
    """Split a prompt into steps. If the words after a "then" match no rule, they belong to the previous step."""
    steps: list[_OfflineStep] = []
    pending = ""
    for piece in re.split(r"(?<!\s)\s++then\s+", prompt.strip()):  # this pattern takes linear time
        if (step := _step(piece, messages)) is not None:
            pending = piece
            steps.append(step)
        elif pending:
            pending = f"{pending} then {piece}"
            steps[-1] = _step(pending, messages) or steps[-1]
        else:
            return []
    return steps


def _step(piece: str, messages: Sequence[domain.Message]) -> _OfflineStep | None:
    piece = re.sub(r"^please\s+", "", piece.strip(), flags=re.IGNORECASE)
    for pattern, tool, text in _TOOL_RULES:
        if match := pattern.fullmatch(piece):
            arguments: dict[str, Any] = {key: value for key, value in match.groupdict().items() if value is not None}
            if "path" in arguments:
                arguments["path"] = arguments["path"].strip("`\"'")
            if tool == "write_file":
                arguments["content"] += "\n"
            if tool == "update_plan":
                lines = list(filter(None, map(str.strip, arguments["items"].split(";"))))
                arguments["items"] = [
                    {"content": line, "status": "pending" if number else "in_progress", "priority": "medium"}
                    for number, line in enumerate(lines)
                ]
            return _OfflineStep(text=text.format_map(arguments), call=(tool, arguments))
    if (match := _TEXT_RULE.fullmatch(piece)) is None:
        return None
    if match["last"]:
        return _OfflineStep(text="\n".join(map(str, range(1, min(int(match["last"]), _MAX_COUNT) + 1))), is_slow=True)
    if match["topic"]:
        return _OfflineStep(text="I have thought about it.", thought=f"A rule says: think about {match['topic']}.")
    if match["summary"]:
        before = messages[:-1] if messages and _prompt_text(messages[-1]) else messages
        return _OfflineStep(text=_summarise(before) or "Nothing has happened in this session yet.")
    if match["words"]:
        return _OfflineStep(text=match["words"].strip())
    try:
        return _OfflineStep(
            text=f"I call {match['tool']}.", call=(match["tool"], json.loads(match["arguments"] or "{}"))
        )
    except (ValueError, RecursionError):
        return _OfflineStep(text=f"{match['arguments']} is not valid JSON.")


def _describe_result(result: str) -> str:
    """Quote the beginning of a tool's result."""
    if not (lines := result.strip("\n").rstrip().splitlines()):
        return "The tool returned nothing."
    more = f"\n... and {len(lines) - _SHOWN_LINES} more lines" if len(lines) > _SHOWN_LINES else ""
    return "The tool returned:\n\n" + "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARS] + more


def _is_summary_instruction(prompt: str) -> bool:
    """Return whether a prompt is crow's instruction to write a summary. Such an instruction names the summary's
    headings."""
    return "## Goal" in prompt and "## Next" in prompt


def _summarise(messages: Sequence[domain.Message], instruction: str = "") -> str:
    """Return a summary with some of the fixed headings. If it is longer than the limit that `instruction` states in
    words or tokens, it leaves out calls, the oldest first."""
    limit = 400
    if match := _WORD_LIMIT.search(instruction):
        limit = max(20, int(match[1].replace(",", "")) // (1 if match[2].lower() == "word" else 2))
    asked, done = _prompts(messages), _calls(messages)
    first = next((message for message in messages if isinstance(message, domain.UserMessage)), None)
    texts = "\n".join(part.text for part in first.parts if isinstance(part, domain.Text)) if first is not None else ""
    earlier = _EARLIER_GOAL.search(texts) if texts.startswith("[") else None  # "[": the first message is a summary
    goal = [earlier[1]] if earlier is not None else asked[:1]
    while True:
        sections = {"Goal": goal, "Done": done, "Next": [f"Answer the newest request: {asked[-1]}"] if asked else []}
        text = "\n".join(line for heading, lines in sections.items() if lines for line in (f"## {heading}", *lines))
        if len(text.split()) <= limit or not done:
            return text
        del done[0]


def _prompts(messages: Sequence[domain.Message]) -> list[str]:
    """Return the user's prompts, each shortened to one line, oldest first."""
    texts = filter(None, map(_prompt_text, messages))
    return [_one_line(text) for text in texts if not text.startswith("[") and not _is_summary_instruction(text)]


def _calls(messages: Sequence[domain.Message]) -> list[str]:
    """Return one line for each call, with its name, its arguments and the beginning of its result."""
    results = {message.call_id: message.text for message in messages if isinstance(message, domain.ToolMessage)}
    return [
        _one_line(f"{call.name} {call.arguments}: {results.get(call.id, 'no result').strip()}")
        for message in messages
        if isinstance(message, domain.AssistantMessage)
        for call in message.calls
    ]


def _one_line(text: str) -> str:
    return shorten(" ".join(text.split()), _LINE_CHARS)

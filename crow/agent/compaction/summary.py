"""The summary of what a checkpoint covers.

Strategy: the session's own prefix plus one instruction, which the provider has cached; then the same as a capped
transcript, to any model; then notes taken by code, which cannot fail. At most two questions, each with a deadline;
whatever comes back empty, cut off, too long or with calls is no summary. Stores nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

import anyio

from crow.agent.compaction.budget import Limits
from crow.domain.errors import ModelError
from crow.domain.messages import (
    Answer,
    AssistantMessage,
    Message,
    SystemMessage,
    Text,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
)
from crow.domain.rendering import INTERRUPTED, NO_ANSWER, parts_text
from crow.domain.tokens import estimate_text
from crow.llm import Model, Request, TextDelta

__all__ = ["CoveredContext", "Summary", "SummaryOptions", "notes", "summarise", "usable_text"]

logger = logging.getLogger(__name__)

NOTES_HEADING = "## Notes taken without a model (oldest first)"

SUMMARISER = (
    "You write the working notes of a coding agent whose conversation grows too long to keep. You call no tools."
)

INSTRUCTION = """\
[crow] The conversation above will be replaced by your summary of it. Whoever goes on with the work sees the summary, \
the newest messages of the user word for word, the lists of files read and modified, the plan, and nothing else. Call \
no tool. Answer with the summary alone, in at most {words} words, in the language of the conversation, under exactly \
these headings, leaving out those with nothing to say:

## Goal
What the user wants in the end.
## Constraints
What must hold: rules, preferences, things the user forbade.
## Done
What is finished and how it was checked.
## In progress
What was being done just now, where exactly it stands.
## Blocked
What failed or waits, with the exact error; open questions.
## Decisions and why
What was chosen or ruled out, with the reason.
## Next
The next steps, in order.
## Facts
Names, paths, commands, numbers, versions and ids that are needed again, exactly as they were.
"""

UPDATE = (
    "The first message is an earlier summary. Update it: keep what still holds, correct what has changed, add what is "
    "new. Do not start over, and do not summarise the summary."
)

OUTPUT_CHARS = 2_000
ARGUMENT_CHARS = 500
NOTE_CHARS = 200
SHOWN_CHARS = 160
"""A piece of a summary is shown when it has so many characters."""


async def show_nobody(_: str) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredContext:
    """What is covered: a request's `tools` and first `messages`, the system message among them; `estimate` of both.

    `previous` is the earlier summary, empty if there is none; `messages[1]` renders it then.
    """

    tools: tuple[ToolSpec, ...]
    messages: tuple[Message, ...]
    estimate: int
    previous: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryOptions:
    """How to ask: `instruction` instead of crow's own; `focus` of the user, `context` from hooks; each question lasts
    `deadline_s` at most. `show` is given the text as it comes; an empty one takes back what it was given."""

    deadline_s: float
    instruction: str = ""
    focus: str = ""
    context: str = ""
    cache_key: str = ""
    show: Callable[[str], Awaitable[None]] = show_nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The text, how it was made, and what the questions used. `model` is the name of who wrote it, or empty."""

    text: str
    method: Literal["prefix", "serialised", "fallback", "hook"]
    model_calls: int = 0
    usage: Usage | None = None
    model: str = ""


async def summarise(
    head: CoveredContext,
    model: Model,
    limits: Limits,
    scale: float,
    asking: SummaryOptions,
    *,
    compact_model: Model | None = None,
) -> Summary:
    """A summary of `head` of at most `limits.summary` tokens. Never fails; lasts two deadlines at most."""
    budget = int(limits.summary / scale)
    instruction = instruction_for(budget, asking, bool(head.previous))
    calls = 0
    usages: list[Usage | None] = []
    first = prefix_request(head, instruction, limits, scale, asking.cache_key)
    other = compact_model or model
    second = serialised_request(head, instruction, smaller(limits, other), scale, asking.cache_key)
    for method, request, asked in (("prefix", first, model), ("serialised", second, other)):
        if request is None:
            continue
        calls += 1
        answer = await ask(asked, request, asking)
        usages.append(answer.usage if answer else None)
        if answer is not None and is_usable(answer, budget):
            return Summary(
                text=answer.text.strip(),
                method="prefix" if method == "prefix" else "serialised",
                model_calls=calls,
                usage=total(usages),
                model=asked.info.name,
            )
        await asking.show("")
    text = notes(head.previous, head.messages[2 if head.previous else 1 :], budget)
    return Summary(text=text, method="fallback", model_calls=calls, usage=total(usages))


def notes(previous: str, messages: Sequence[Message], budget: int) -> str:
    """A summary by code, of at most `budget` estimated tokens: `previous` carried on, then a line per answer and call
    of `messages`, the newest kept. Earlier notes are continued, so it does not nest."""
    base, _, earlier = previous.partition(NOTES_HEADING)
    base = shortened(base.strip(), budget * 2 // 3)
    lines = [line for line in earlier.strip().splitlines() if line.strip()]
    lines += [f"- {line}" for message in messages if (line := note(message))]
    left = budget - estimate_text(base) - estimate_text(NOTES_HEADING) - 4
    kept: list[str] = []
    for line in reversed(lines):
        left -= estimate_text(line) + 1
        if left < 0:
            break
        kept.append(line)
    sections = [base] if base else []
    if kept:
        sections.append("\n".join([NOTES_HEADING, *reversed(kept)]))
    return "\n\n".join(sections) or "No summary could be made."


def instruction_for(budget: int, asking: SummaryOptions, is_update: bool) -> str:
    words = str(max(60, min(2_000, budget // 2)))
    sections = [(asking.instruction.strip() or INSTRUCTION).replace("{words}", words).strip()]
    if is_update:
        sections.append(UPDATE)
    if asking.context.strip():
        sections.append(f"Take into account:\n{asking.context.strip()}")
    if asking.focus.strip():
        sections.append(f"Give most room to what matters for: {asking.focus.strip()}")
    return "\n\n".join(sections)


def prefix_request(
    head: CoveredContext, instruction: str, limits: Limits, scale: float, cache_key: str
) -> Request | None:
    """The conversation as it was sent, then the instruction; None if that leaves no room for an answer."""
    left = limits.window - round((head.estimate + estimate_text(instruction)) * scale)
    if left < limits.summary:
        return None
    between = (AssistantMessage(text=NO_ANSWER),) if isinstance(head.messages[-1], UserMessage) else ()
    return Request(
        messages=(*head.messages, *between, UserMessage(parts=(Text(text=instruction),))),
        tools=head.tools,
        tool_choice="none",
        max_output_tokens=None if limits.output is None else min(limits.output, left),
        cache_key=cache_key,
    )


def serialised_request(head: CoveredContext, instruction: str, limits: Limits, scale: float, cache_key: str) -> Request:
    """The conversation as a transcript of at most half of the window, the newest and the earlier summary kept."""
    budget = max(500, int(limits.window / 2 / scale) - estimate_text(instruction))
    messages = list(head.messages[1:])
    opening = [shortened(serialised(messages.pop(0)), budget // 2)] if head.previous and messages else []
    left = budget - sum(map(estimate_text, opening))
    newest: list[str] = []
    for message in reversed(messages):
        text = serialised(message)
        left -= estimate_text(text) + 1
        if left < 0:
            newest.append(f"[{len(messages) - len(newest)} earlier messages are left out.]")
            break
        newest.append(text)
    transcript = "\n\n".join([*opening, *reversed(newest)])
    text = f"<conversation>\n{transcript}\n</conversation>\n\n{instruction}"
    return Request(
        messages=(SystemMessage(text=SUMMARISER), UserMessage(parts=(Text(text=text),))),
        max_output_tokens=limits.output,
        cache_key=cache_key,
    )


def smaller(limits: Limits, model: Model) -> Limits:
    """`limits` within what is known of another model."""
    window = min(limits.window, model.info.context_window or limits.window)
    known = [tokens for tokens in (limits.output, model.info.max_output_tokens) if tokens is not None]
    return replace(limits, window=window, output=min([*known, window // 4]) if known else None)


async def ask(model: Model, request: Request, asking: SummaryOptions) -> Answer | None:
    """The whole answer, shown as it comes; None if the endpoint failed or took too long."""
    with anyio.move_on_after(asking.deadline_s):
        try:
            async with model.stream(request) as stream:
                waiting = ""
                async for delta in stream:
                    waiting += delta.text if isinstance(delta, TextDelta) else ""
                    if len(waiting) >= SHOWN_CHARS:
                        await asking.show(waiting)
                        waiting = ""
                if waiting:
                    await asking.show(waiting)
                return stream.answer
        except ModelError:
            return None
    return None


def usable_text(text: str, budget: int) -> str:
    """A summary that someone else wrote, stripped; empty if there is none or it is over its budget."""
    text = text.strip()
    if text and estimate_text(text) > budget:
        logger.warning("A hook's summary of %d tokens is not used; there is room for %d", estimate_text(text), budget)
        return ""
    return text


def is_usable(answer: Answer, budget: int) -> bool:
    """Whether an answer is a whole summary within its budget, and nothing else."""
    text = answer.text.strip()
    return bool(text) and not answer.calls and answer.finish == "stop" and estimate_text(text) <= budget


def serialised(message: Message) -> str:
    """One message as text; long outputs and arguments lose their middle."""
    match message:
        case SystemMessage(text=text):
            return text
        case UserMessage(parts=parts):
            return f"[user]\n{shortened(parts_text(parts), OUTPUT_CHARS)}"
        case AssistantMessage(text=text, calls=calls):
            lines = [f"[assistant]\n{shortened(text, OUTPUT_CHARS)}"]
            lines += [f"[calls {call.name}] {clipped(call.arguments, ARGUMENT_CHARS)}" for call in calls]
            return "\n".join(lines)
        case ToolMessage(text=text):
            return f"[result]\n{clipped(text, OUTPUT_CHARS)}"
        case _ as never:
            assert_never(never)


def note(message: Message) -> str:
    """What an answer said and called, in one line; empty for every other message."""
    if not isinstance(message, AssistantMessage) or message.text == NO_ANSWER:
        return ""
    said = clipped(" ".join(message.text.removesuffix(INTERRUPTED).split()), NOTE_CHARS)
    called = [f"{call.name}({clipped(call.arguments, NOTE_CHARS // 2)})" for call in message.calls]
    return "; ".join([said, *called] if said else called).replace("\n", " ")


def clipped(text: str, chars: int) -> str:
    """`text`, its middle left out so that about `chars` characters stay."""
    if len(text) <= chars:
        return text
    return f"{text[: chars * 2 // 3]} [...] {text[len(text) - chars // 3 :]}"


def shortened(text: str, tokens: int) -> str:
    """`text`, its middle left out so that its estimate is at most `tokens`; empty if there is no room at all."""
    chars = len(text)
    short = text
    while chars > 0 and estimate_text(short) > tokens:
        chars = min(chars - 1, chars * max(1, tokens) // max(1, estimate_text(short)))
        short = clipped(text, chars)
    return short if chars > 0 else ""


def total(usages: Sequence[Usage | None]) -> Usage | None:
    """Sums of what was reported."""
    known = [usage for usage in usages if usage is not None]
    if not known:
        return None

    def summed(values: Sequence[int | None]) -> int | None:
        return None if all(value is None for value in values) else sum(value or 0 for value in values)

    return Usage(
        input_tokens=summed([usage.input_tokens for usage in known]),
        output_tokens=summed([usage.output_tokens for usage in known]),
        cached_tokens=summed([usage.cached_tokens for usage in known]),
        reasoning_tokens=summed([usage.reasoning_tokens for usage in known]),
    )

"""Paths of entries for tests (built, random or damaged), and a check for valid requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from crow.domain.conversation import Projection
from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Custom,
    Entry,
    Location,
    Mask,
    PlanItem,
    Prompt,
    Reminder,
    Restore,
    Skill,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)

__all__ = ["PathBuilder", "breaks", "damaged", "histories", "plain_histories", "problems", "result_of", "said", "user"]

SPECS = (ToolSpec(name="read_file", description="Reads a file.", input_schema={"type": "object"}),)


def user(text: str, *, cut: int | None = None) -> User:
    return User(parts=(Text(text=text),), message_id="m", cut=cut)


def said(text: str = "", *calls: str, finish: str = "stop") -> Assistant:
    """An answer that calls `read_file` once for each id in `calls`."""
    return Assistant(
        text=text,
        message_id="m",
        calls=tuple(
            ToolCall(id=call, name="read_file", arguments=json.dumps({"path": f"/proj/{call}"})) for call in calls
        ),
        finish=finish,  # type: ignore[arg-type]
    )


def result_of(
    assistant: int, index: int = 0, text: str = "ok", *, name: str = "read_file", **more: object
) -> ToolResult:
    return ToolResult(
        call=CallRef(assistant=assistant, index=index),
        name=name,
        text=text,
        announcement=Announcement(title=name, kind="read", locations=(Location(path=f"/proj/{assistant}-{index}"),)),
        **more,  # type: ignore[arg-type]
    )


class PathBuilder:
    """Adds bodies as a store would: ids and parents in order."""

    def __init__(self, *bodies: Body) -> None:
        self.entries: list[Entry] = []
        self.turn = 1
        for body in bodies:
            self.add(body)

    def add(self, body: Body, **more: object) -> Entry:
        leaf = self.entries[-1].id if self.entries else None
        entry = Entry(
            id=(leaf or 0) + 1,
            conversation=1,
            session="s",
            parent=leaf,
            turn=self.turn,
            body=body,
            **more,  # type: ignore[arg-type]
        )
        self.entries.append(entry)
        if isinstance(body, TurnEnd):
            self.turn += 1
        return entry


def problems(messages: Sequence[Message]) -> list[str]:
    """The reasons why an endpoint would refuse the request; empty if it is valid."""
    found: list[str] = []
    if not messages or not isinstance(messages[0], SystemMessage):
        found.append("no system message at index 0")
    ids: set[str] = set()
    waiting: list[str] = []
    last: Message | None = None
    for index, message in enumerate(messages):
        if waiting and not isinstance(message, ToolMessage):
            found.append(f"{index}: calls {waiting} have no result")
            waiting = []
        match message:
            case SystemMessage():
                if index:
                    found.append(f"{index}: a second system message")
            case UserMessage(parts=parts):
                if isinstance(last, UserMessage):
                    found.append(f"{index}: two user messages in a row")
                if not parts:
                    found.append(f"{index}: no parts")
            case AssistantMessage(text=text, calls=calls):
                if isinstance(last, (SystemMessage, AssistantMessage)):
                    found.append(f"{index}: an assistant message out of turn")
                if not text.strip() and not calls:
                    found.append(f"{index}: an empty assistant message")
                if any(call.id in ids or not call.id for call in calls) or len({c.id for c in calls}) < len(calls):
                    found.append(f"{index}: repeated call ids")
                ids |= {call.id for call in calls}
                waiting = [call.id for call in calls]
            case ToolMessage(call_id=call_id, text=text):
                if not waiting or waiting.pop(0) != call_id:
                    found.append(f"{index}: result {call_id} is out of place")
                if not text:
                    found.append(f"{index}: an empty result")
        last = message
    if waiting:
        found.append(f"calls {waiting} have no result")
    return found


def breaks(body: Body) -> bool:
    """Whether the bytes sent may change at this entry."""
    return isinstance(body, (Checkpoint, Mask, Restore, Prompt))


WORDS = st.sampled_from(["", " ", "a", "look at this", "変更してください", "x" * 900])
CALL_IDS = st.sampled_from(["c1", "c2", "c1", "", "call_2_0"])
OPERATIONS = ("user", "say", "call", "result", "remind", "custom", "skill", "plan", "end", "prompt", "started")
BREAKS = ("checkpoint", "mask", "restore")


@st.composite
def plain_histories(draw: st.DrawFn, *, operations: Sequence[str] = OPERATIONS, most: int = 30) -> list[Entry]:
    """Entries that sessions write, in any order: results late, missing, or for calls of other answers."""
    path = PathBuilder(Prompt(system="You are crow.", tools=SPECS, cwd="/repo", model="m"))
    calls: list[CallRef] = []
    for operation in draw(st.lists(st.sampled_from(operations), max_size=most)):
        ref = draw(st.sampled_from(calls[-4:])) if calls else CallRef(assistant=1, index=0)
        match operation:
            case "user":
                path.add(user(draw(WORDS), cut=draw(st.sampled_from([None, None, 50]))))
            case "say":
                path.add(said(draw(WORDS), finish=draw(st.sampled_from(["stop", "interrupted", "length"]))))
            case "call":
                entry = path.add(said(draw(WORDS), *draw(st.lists(CALL_IDS, min_size=1, max_size=3))))
                assert isinstance(entry.body, Assistant)
                calls += [CallRef(assistant=entry.id, index=index) for index in range(len(entry.body.calls))]
            case "started":
                path.add(Started(call=ref, why="mode auto", announcement=Announcement(title="read")))
            case "result":
                path.add(result_of(ref.assistant, ref.index, draw(WORDS), cut=draw(st.sampled_from([None, 20]))))
            case "plan":
                plan = (PlanItem(content=draw(WORDS)),)
                path.add(result_of(ref.assistant, ref.index, "x" * 900, name="update_plan", plan=plan))
            case "remind":
                path.add(Reminder(text="The date has changed."))
            case "custom":
                path.add(Custom(namespace="ours", text=draw(WORDS), for_model=draw(st.booleans())))
            case "skill":
                path.add(Skill(name="review", text="s" * 900))
            case "end":
                path.add(TurnEnd(stop=draw(st.sampled_from(["end_turn", "cancelled", "error"]))))
            case "prompt":
                path.add(Prompt(system="You are crow, again.", tools=(), cwd="/repo", model="m"))
            case "checkpoint":
                kept = [e.id for e in Projection(path.entries).entries if not isinstance(e.body, Prompt)]
                first = draw(st.sampled_from([None, *kept[-8:]]))
                path.add(Checkpoint(compaction_id=f"k{len(path.entries)}", summary="What was done.", first_kept=first))
            case "mask":
                ids = st.integers(1, len(path.entries) + 1)
                path.add(Mask(before=draw(ids), exceptions=tuple(draw(st.lists(ids, max_size=3)))))
            case "restore":
                hidden = [e.id for e in path.entries if isinstance(e.body, (Checkpoint, Mask))]
                path.add(Restore(entry=draw(st.sampled_from(hidden)) if hidden else 1))
    return path.entries


def histories(most: int = 30) -> st.SearchStrategy[list[Entry]]:
    """Like `plain_histories`, with checkpoints, masks and restores."""
    return plain_histories(operations=(*OPERATIONS, *BREAKS), most=most)


@st.composite
def damaged(draw: st.DrawFn) -> list[Entry]:
    """A history with entries lost, doubled or swapped, and ids that refer to nothing."""
    entries = draw(histories())
    for _ in range(draw(st.integers(1, 6))):
        if not entries:
            break
        at = draw(st.integers(0, len(entries) - 1))
        match draw(st.sampled_from(["lose", "double", "swap", "renumber"])):
            case "lose":
                entries = entries[:at] + entries[at + 1 :]
            case "double":
                entries = entries[: at + 1] + entries[at:]
            case "swap":
                other = draw(st.integers(0, len(entries) - 1))
                entries[at], entries[other] = entries[other], entries[at]
            case "renumber":
                entries[at] = replace(entries[at], id=draw(st.integers(1, 60)))
    return entries

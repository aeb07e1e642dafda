"""Builds the messages that the model gets for a path.

Entries are processed in order. They become finished messages and at most one open step, which still waits for results.
Any path, however damaged, gives a valid request. A checkpoint, a mask and a restore are called breaks. Until the next
break, each request is a prefix of the next request. The cost of adding an entry depends only on the size of the entry.
Only a break costs more, because crow then processes all entries in use again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal, TypeAlias, assert_never

from crow.domain import entries as kinds
from crow.domain import rendering
from crow.domain.entries import Assistant, Body, CallRef, Checkpoint, Entry, Mask, PlanItem, Prompt, Restore, ToolResult
from crow.domain.messages import (
    AssistantMessage,
    Message,
    Part,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from crow.domain.tokens import estimate_message, estimate_tools

LOADING, FROM_WORKSPACE = "Load the skill ", " from this workspace"
"""The parts of the title of a call that loads a skill: before the name and, for a skill of the workspace, after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The messages and tools for the model."""

    tools: tuple[ToolSpec, ...]
    messages: tuple[Message, ...]
    """The first message is the system message."""
    origins: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """For each message, the id of the entry that the message comes from, or 0 if there is none."""
    estimates: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """The uncalibrated size of each message, in tokens."""
    tools_estimate: int = field(default=0, compare=False, repr=False)
    """The estimated size of the tool specs, in tokens."""

    @property
    def system(self) -> str:
        """The text of the system message."""
        first = self.messages[0]
        return first.text if isinstance(first, SystemMessage) else ""

    @property
    def fixed_estimate(self) -> int:
        """Estimated tokens of the tool specs and the system message."""
        return self.tools_estimate + sum(self.estimates[:1])

    @property
    def estimate(self) -> int:
        """Estimated tokens of the messages and the tool specs."""
        return self.tools_estimate + sum(self.estimates)


def for_model(entries: Sequence[Entry]) -> Context:
    """Return the messages for the model. `entries` are the entries of a path, oldest first. This function does not
    fail, whatever the entries contain."""
    return Projection(entries).context()


class Projection:
    """What the model sees of a path. Each new entry updates the projection."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries: list[Entry] = list(entries)
        self.complete = True
        """False if a restore brought back entries that are not in memory. The caller then has to load the newest part
        of the path again."""
        self._context: Context | None = None
        self._rebuild()

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries in use, oldest first: the newest prompt entry, the checkpoint, and all entries that the
        checkpoint does not cover."""
        return self._entries

    def entries_after(self, entry_id: int) -> Sequence[Entry]:
        """Return the entries that are newer than the entry `entry_id`, oldest first."""
        return tuple(reversed(list(takewhile(lambda entry: entry.id > entry_id, reversed(self._entries)))))

    def newest_user(self) -> Entry | None:
        """Return the newest user entry, or None."""
        return next((entry for entry in reversed(self._entries) if isinstance(entry.body, kinds.User)), None)

    def has_prompt(self, message_id: str) -> bool:
        """Whether there is a prompt or a command with this message id."""
        bodies = (entry.body for entry in self._entries)
        return any(isinstance(body, kinds.User | kinds.Command) and body.message_id == message_id for body in bodies)

    def shows_arguments(self, call: CallRef) -> bool:
        """Whether the model gets the whole arguments of a call."""
        bodies = (entry.body for entry in reversed(self._entries) if entry.id == call.assistant)
        return any(isinstance(body, Assistant) and body.cut is None for body in bodies)

    def shows_result(self, call: CallRef) -> bool:
        """Whether the model gets the whole result of a call."""
        for entry in reversed(self._entries):
            if isinstance(body := entry.body, ToolResult) and body.call == call:
                return body.cut is None and not self._is_hidden(entry.id, body)
        return False

    def loaded_skills(self) -> dict[str, int]:
        """Return the skills whose text the model sees, each with the entry that loaded it."""
        loaded: dict[str, int] = {}
        for body in (self.checkpoint_body,) if self.checkpoint is not None and self.checkpoint_body else ():
            loaded |= {skill_in(each.name): each.entry for each in body.skills}
        for entry in self._entries:
            match entry.body:
                case kinds.Skill(name=name):
                    loaded[name] = entry.id
                case Restore(skill=name):
                    loaded.pop(name, None)
        return loaded

    @property
    def checkpoint_body(self) -> Checkpoint | None:
        """The checkpoint that applies at the leaf, or None."""
        body = self.checkpoint.body if self.checkpoint else None
        return body if isinstance(body, Checkpoint) else None

    def add(self, entry: Entry) -> None:
        """Add a new leaf to the path."""
        self._context = None
        self._entries.append(entry)
        if isinstance(entry.body, (Checkpoint, Mask, Restore)):
            self._rebuild()
            if isinstance(entry.body, Restore):
                self.complete = self._is_chain()
        else:
            self._fold(entry)

    def context(self) -> Context:
        """Return what the model sees now. Until the next checkpoint, mask, restore or prompt entry, each call returns
        the same objects for the messages of an entry."""
        if self._context is None:
            rows = self._settled()
            self._context = Context(
                tools=self.prompt.tools if self.prompt else (),
                messages=tuple(rows.messages),
                origins=tuple(rows.origins),
                estimates=tuple(rows.estimates),
                tools_estimate=self._tools_estimate,
            )
        return self._context

    def _rebuild(self) -> None:
        """Find the checkpoint and masks that apply, drop the entries that the checkpoint covers, and turn the rest into
        messages."""
        self._unloaded = {skill: entry.id for entry in self._entries if (skill := unloaded_skill(entry.body))}
        """The names of unloaded skills, with the entries that unloaded them last."""
        breaks = [entry.id for entry in self._entries if isinstance(entry.body, (Checkpoint, Mask, Restore))]
        self._broken_at = max(breaks, default=0)
        """The id of the newest break or prompt entry, or 0. The messages before an older answer may have changed
        since."""
        restored = {entry.body.entry for entry in self._entries if isinstance(entry.body, Restore)}
        self.checkpoint: Entry | None = None
        """The entry of the checkpoint that applies at the leaf."""
        self._masks: list[tuple[int, frozenset[int]]] = []
        """The masks that apply, each as the id below which it hides outputs, and the ids that it leaves visible."""
        for entry in self._entries:
            if entry.id in restored:
                continue
            if isinstance(entry.body, Checkpoint):
                self.checkpoint = entry
            elif isinstance(entry.body, Mask):
                self._masks.append((min(entry.body.before, entry.id), frozenset(entry.body.exceptions)))
        self.prompt: Prompt | None = None
        """The prompt that applies at the leaf."""
        self.plan: tuple[PlanItem, ...] = ()
        """The plan at the leaf."""
        self.mode = ""
        """The mode at the leaf. Empty if the mode was never changed."""
        self._context = None
        self._tools_estimate = 0
        self._call_ids: set[str] = set()
        """The ids of calls that are in use."""
        self._step: _OpenStep | None = None
        """The newest answer with calls, as long as results may still arrive for it."""
        self._settled_rows: _Rows | None = None
        """A copy of `_rows` with the messages of the open step. None if there is no step, or if the step has changed
        since the copy was made."""
        system = SystemMessage(text="")
        self._rows = _Rows([system], [0], [estimate_message(system)])
        if self.checkpoint is not None and isinstance(self.checkpoint.body, Checkpoint):
            self._drop_covered(_first_kept(self.checkpoint))
            at, body = self.checkpoint.id, self.checkpoint.body
            kept = tuple(each for each in body.skills if not self._is_unloaded(each.name, at))
            self._rows.push(rendering.checkpoint_message(replace(body, skills=kept)), at)
        for entry in self._entries:
            self._fold(entry)

    def _drop_covered(self, first: int) -> None:
        """Drop the entries below the id `first`, except the newest prompt entry and the checkpoint."""
        prompts = [entry for entry in self._entries if isinstance(entry.body, Prompt)]
        newest = prompts[-1] if prompts else None
        self._entries = [
            entry for entry in self._entries if entry.id >= first or entry is newest or entry is self.checkpoint
        ]

    def _is_chain(self) -> bool:
        """Return whether all entries in use are in memory, so that none is missing at the beginning or in between."""
        kept, parent = self._entries, None
        if self.checkpoint is not None:
            first = _first_kept(self.checkpoint)
            kept = [entry for entry in self._entries if entry.id >= first]
            parent = kept[0].parent if kept and first in (kept[0].id, self.checkpoint.id + 1) else -1
        for entry in kept:
            if entry.parent != parent:
                return False
            parent = entry.id
        return True

    def _fold(self, entry: Entry) -> None:
        """Update the messages, the prompt, the plan and the mode with the next entry of the path."""
        body = entry.body
        match body:
            case kinds.Prompt():
                self.prompt = body
                self._broken_at = max(self._broken_at, entry.id)
                self._rows.mark_before_break()
                self._tools_estimate = estimate_tools(body.tools)
                system = SystemMessage(text=body.system)
                self._rows.messages[0], self._rows.estimates[0] = system, estimate_message(system)
                self._settled_rows = None
            case kinds.User():
                self._settle()
                self._rows.add_user(rendering.user_parts(body, entry.id), entry.id, entry.turn, "user")
            case kinds.Assistant():
                self._settle()
                self._fold_assistant(entry, body)
            case kinds.Started(call=call):
                if self._step is not None and self._step.holds(call):
                    self._step.started.add(call.index)
                    self._settled_rows = None
            case kinds.ToolResult():
                self._fold_result(entry, body)
            case kinds.Custom(for_model=False) | kinds.Custom(text=""):
                pass
            case kinds.Skill(name=name) if self._is_unloaded(name, entry.id):
                pass
            case kinds.Reminder() | kinds.Skill() | kinds.Custom():
                if self._step is None:
                    self._rows.add_user((rendering.added_part(body),), entry.id, entry.turn, "crow")
                else:
                    self._step.reminders.append((rendering.added_part(body), entry.id, entry.turn))
                    self._settled_rows = None
            case kinds.TurnEnd():
                self._settle()
                self._rows.openness = "closed"
            case kinds.Note(about="mode", value=mode):
                self.mode = mode
            case kinds.Checkpoint():
                if entry is self.checkpoint:
                    self.plan, self.mode = body.plan, body.mode
            case kinds.Note() | kinds.File() | kinds.Remark() | kinds.Command() | kinds.Mask() | kinds.Restore():
                pass
            case kinds.ModelRequest():
                pass
            case _ as never:
                assert_never(never)

    def _fold_assistant(self, entry: Entry, body: Assistant) -> None:
        calls = self._unique_calls(entry.id, body.calls)
        message = rendering.assistant_message(body, calls, entry.id)
        if message is None:
            self._rows.openness = "closed"  # a request was made here, so later text must not join an earlier message
            return
        if message.opaque and entry.id < self._broken_at:
            message = replace(message, is_before_break=True)
        self._rows.push(message, entry.id)
        if calls:
            self._step = _OpenStep(entry.id, calls)

    def _fold_result(self, entry: Entry, body: ToolResult) -> None:
        if body.plan is not None:
            self.plan = body.plan
        step = self._step
        if step is None or not step.holds(body.call) or body.call.index in step.results:
            return  # the call is unknown, already answered, or in a step that a later request closed
        call_id = step.calls[body.call.index].id
        render = rendering.elided_message if self._is_hidden(entry.id, body) else rendering.tool_message
        step.results[body.call.index] = (entry.id, render(body, entry.id, call_id))
        self._settled_rows = None

    def _is_unloaded(self, skill: str, entry: int) -> bool:
        return entry < self._unloaded.get(skill_in(skill), 0)

    def _is_hidden(self, entry: int, body: ToolResult) -> bool:
        """Whether a mask hides this result, the entry `entry`."""
        is_masked = any(entry < before and entry not in exceptions for before, exceptions in self._masks)
        return is_masked and rendering.is_maskable(body)

    def _unique_calls(self, entry: int, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        unique: list[ToolCall] = []
        for index, call in enumerate(calls):
            own = CallRef(assistant=entry, index=index).call_id
            call_id = call.id or own
            again = 0
            while call_id in self._call_ids:
                call_id = f"{own}_{again}" if again else own
                again += 1
            self._call_ids.add(call_id)
            unique.append(call if call.id == call_id else replace(call, id=call_id))
        return tuple(unique)

    def _settled(self) -> _Rows:
        """Return the messages, including the open step with the results that have arrived."""
        if self._step is None:
            return self._rows
        if self._settled_rows is None:
            self._settled_rows = self._rows.copy()
            self._step.render_into(self._settled_rows)
        return self._settled_rows

    def _settle(self) -> None:
        """Close the open step. Later results for it are ignored."""
        if self._step is None:
            return
        if self._settled_rows is not None:
            self._rows = self._settled_rows  # keep the message objects that were already sent
        else:
            self._step.render_into(self._rows)
        self._step = self._settled_rows = None


def unloaded_skill(body: Body) -> str:
    """Return the name of the skill that an entry unloads, or an empty string."""
    return body.skill if isinstance(body, Restore) else ""


def skill_in(name: str) -> str:
    """Return the name of a skill. `name` is that name or, in a checkpoint, the title of the call that loaded the
    skill."""
    return name.removeprefix(LOADING).removesuffix(FROM_WORKSPACE)


def _first_kept(checkpoint: Entry) -> int:
    """Return the lowest id of the entries that a checkpoint does not cover."""
    assert isinstance(checkpoint.body, Checkpoint)
    first = checkpoint.body.first_kept
    return checkpoint.id + 1 if first is None else min(first, checkpoint.id + 1)


_Openness: TypeAlias = Literal["closed", "crow", "user"]
"""Says what may be joined to the last message. `closed`: nothing. `crow`: any user text, because the last message is
crow's own text. `user`: only text from crow in the same turn, because the last message contains a prompt."""


@dataclass(slots=True)
class _Rows:
    """Messages in an order that every endpoint accepts. Only the system message and the end of the list change."""

    messages: list[Message]
    origins: list[int]
    """For each message, the id of the entry that the message comes from, or 0 if there is none."""
    estimates: list[int]
    """The uncalibrated size of each message, in tokens."""
    openness: _Openness = "closed"
    turn: int = 0
    """The number of the turn in which the last user message was added."""

    def copy(self) -> _Rows:
        return _Rows(self.messages[:], self.origins[:], self.estimates[:], self.openness, self.turn)

    def mark_before_break(self) -> None:
        """Mark the answers so far as made before a break."""
        for at, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage) and message.opaque and not message.is_before_break:
                self.messages[at] = replace(message, is_before_break=True)

    def push(self, message: Message, origin: int) -> None:
        """Add a message. User and assistant messages must alternate. If this message breaks that rule, first add a
        fixed line in the other role. There is one exception: an answer that continues a paused answer follows it
        directly."""
        last = self.messages[-1]
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            self._append(AssistantMessage(text=rendering.NO_ANSWER), origin)
        elif (
            isinstance(message, AssistantMessage)
            and isinstance(last, (SystemMessage, AssistantMessage))
            and not (isinstance(last, AssistantMessage) and last.is_paused)
        ):
            self._append(UserMessage(parts=(Text(text=rendering.NO_QUESTION),)), origin)
        self._append(message, origin)
        self.openness = "closed"

    def add_user(self, parts: tuple[Part, ...], origin: int, turn: int, kind: Literal["crow", "user"]) -> None:
        """Add a user message. Text from crow is joined to the prompt of the same turn. A prompt is joined to text from
        crow that comes directly before it."""
        last = self.messages[-1]
        joins = self.openness == "crow" or (self.openness == "user" and kind == "crow" and turn == self.turn)
        if joins and isinstance(last, UserMessage):
            whole = UserMessage(parts=(*last.parts, *parts))
            self.messages[-1], self.estimates[-1] = whole, estimate_message(whole)
            kind = "user" if self.openness == "user" else kind
        else:
            self.push(UserMessage(parts=parts), origin)
        self.openness, self.turn = kind, turn

    def _append(self, message: Message, origin: int) -> None:
        self.messages.append(message)
        self.origins.append(origin)
        self.estimates.append(estimate_message(message))


@dataclass(slots=True)
class _OpenStep:
    """An assistant message whose results are still arriving, in any order."""

    entry: int
    """The id of the entry with the assistant message."""
    calls: tuple[ToolCall, ...]
    results: dict[int, tuple[int, ToolMessage]] = field(default_factory=dict)
    """The results so far, each with the id of its entry. The keys are indexes of `calls`."""
    started: set[int] = field(default_factory=set)
    """The indexes of the calls that have started to run."""
    reminders: list[tuple[Part, int, int]] = field(default_factory=list)
    """Texts, each with the id of its entry and the number of its turn."""

    def holds(self, call: CallRef) -> bool:
        return call.assistant == self.entry and 0 <= call.index < len(self.calls)

    def render_into(self, rows: _Rows) -> None:
        """Add a result for every call, in call order, then the reminders that arrived while the step was open."""
        for index, call in enumerate(self.calls):
            if index in self.results:
                origin, message = self.results[index]
            else:
                text = rendering.EFFECTS_UNKNOWN if index in self.started else rendering.NOT_RUN
                origin, message = self.entry, ToolMessage(call_id=call.id, text=text, is_error=True)
            rows.push(message, origin)
        for part, origin, turn in self.reminders:
            rows.add_user((part,), origin, turn, "crow")

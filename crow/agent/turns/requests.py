"""Asks the model for one answer after another, shows each while it arrives, and stores it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import anyio

from crow.agent import new_message_id, new_remark
from crow.agent.background import after_delay
from crow.agent.compaction.compactor import Compactor
from crow.agent.history.branch import Branch
from crow.agent.history.usage import request_entry, usage_of_answer, usage_of_attempt
from crow.agent.turns.adapters import Adapters
from crow.agent.turns.calls import Calls
from crow.agent.turns.stream import AnswerDraft
from crow.domain import errors
from crow.domain.entries import Assistant, Entry, NewEntry, Note, Reminder
from crow.domain.errors import (
    BadRequest,
    ContextOverflow,
    ModelTimeout,
    NetworkError,
    Overloaded,
    ProtocolError,
    RateLimited,
)
from crow.domain.events import EntryStored
from crow.domain.messages import Answer, SentRequest
from crow.llm import Attempt, Model, Request, Stream, cost_of
from crow.tools import PlannedCall

logger = logging.getLogger(__name__)

_THINKS_S = 0.05
"""If an answer takes longer than this (in seconds), the tools get ready while the model works. By that time, the
request has been sent, so the tools do not delay the request."""
_PLAN_S = 0.05
"""If the calls of an answer take longer to plan than this (in seconds), the answer is saved as a draft. A plan may take
long because the editor has to send a file."""
_MAX_CONTINUED = 3
"""If one answer after another breaks off, at most this many of them are continued. If the next answer breaks off too,
the turn ends."""
_CONTINUE = (
    "<reminder>Your last answer was cut off by a broken connection. The user has seen it as it stands. Continue "
    "exactly where it stopped, without repeating anything and without a preamble.</reminder>"
)
_DOWN = (NetworkError, ModelTimeout, Overloaded, RateLimited)
"""After one of these errors, crow asks the fallback model."""
_BROKE_OFF = (
    "Stopped: each of the last {count} answers broke off before its end. What was shown is kept. Check the connection, "
    "then send another prompt to continue."
)


class Requests:
    """Makes the requests of one turn to the model. If the endpoint is down, `standby` returns another model, which
    answers for the rest of the turn.

    Each request goes through these states: the model answers (`_draft` is set, `_is_listening` is true), the answer is
    complete (`_answer` is set, `_is_listening` is false), the answer is stored (`_draft` and `_answer` are None). If
    the request fails before any text has arrived, `_draft` stays set until the next request."""

    def __init__(self, branch: Branch, compactor: Compactor, calls: Calls, standby: Standby | None) -> None:
        self.model = compactor.model
        """The model that answers now."""
        self._branch = branch
        self._compactor = compactor
        self._gauge = compactor.gauge
        self._calls = calls
        self._standby = standby
        self._draft: AnswerDraft | None = None
        """The answer that clients are shown, until it is stored."""
        self._answer: Answer | None = None
        """The same answer as soon as it is complete, until it is stored."""
        self._stream: Stream | None = None
        self._sent = 0
        """The estimated size of the last request, in tokens."""
        self._counted = 0
        """How many attempts of `_stream` have been added to the usage of the turn."""
        self._is_listening = False
        """Whether the model is answering now."""
        self._continued = 0
        """How many answers in a row had to be continued."""

    async def ask(self) -> tuple[int, Assistant, Sequence[PlannedCall]]:
        """Get one answer, store it and show it. Return its entry id, the answer, and the plans of its calls.

        If a stream breaks after text was shown, the model is asked once to continue. The model is not asked if each of
        the last `_MAX_CONTINUED` answers had to be continued. Text that the continuation repeats is left out. If a
        request failed and was too long, or may have been too long, crow compacts the context and sends the request
        again. If the endpoint is down and the user has named a fallback model, the request is sent to the fallback
        model.
        """
        is_continued = False
        before = ""
        while True:
            try:
                asked = await self._ask_once(before)
            except BadRequest as error:
                # An endpoint that began to answer has accepted the size of the request.
                has_answered = self._draft is not None and bool(self._draft.text or self._draft.thought)
                if has_answered or not error.is_unclear:
                    raise
                self.unstored_answer()  # counts the attempts; nothing was shown
                if not await self._compactor.refused_unclearly(error):
                    raise
            except (ContextOverflow, NetworkError, ModelTimeout, Overloaded, ProtocolError, RateLimited) as error:
                text = self._draft.text if self._draft is not None else ""
                shown = self.unstored_answer()
                if shown:
                    await self._store_answer(*shown)
                    if is_continued:
                        raise
                    if self._continued == _MAX_CONTINUED:
                        await self._branch.record([new_remark(_BROKE_OFF.format(count=_MAX_CONTINUED + 1))])
                        raise
                    is_continued = True
                    self._continued += 1
                if isinstance(error, ContextOverflow):
                    await self._compactor.overflowed(error)
                elif not shown and not await self._fall_back(error):
                    raise
                if text.strip():  # without text there is nothing to continue, so the model is just asked again
                    before = text
                    await self._branch.record([NewEntry(body=Reminder(text=_CONTINUE))])
            else:
                self._continued = self._continued if is_continued else 0
                if self._standby is not None:
                    await self._standby.answered()
                return asked

    async def _fall_back(self, error: errors.ModelError) -> bool:
        """If the endpoint is down, use another model for the rest of the turn. Return whether another model is used
        from now on."""
        if self._standby is None or not isinstance(error, _DOWN):
            return False
        model = await self._standby.next(error)
        if model is None:
            return False
        self.model = model
        await self._compactor.use(model)
        await self._compactor.make_room()
        return True

    async def _ask_once(self, before: str) -> tuple[int, Assistant, Sequence[PlannedCall]]:
        context = self._branch.context()
        request = Request(
            messages=context.messages,
            tools=context.tools,
            max_output_tokens=self._gauge.max_output_tokens(),
            cache_key=self._branch.row.id,
            thought_level=self._branch.thought_level,
        )
        self._draft = draft = AnswerDraft(self._branch, new_message_id(), before=before)
        self._stream, self._sent, self._counted = None, self._gauge.used(), 0
        self._branch.sent_parts.watch(self.model.info, self._branch.entries)
        await self._note_parts()
        self._is_listening = True
        try:
            async with after_delay(_THINKS_S, self._calls.prepare), self.model.stream(request) as self._stream:
                answer = await draft.follow(self._stream)
        finally:
            if draft.is_muted:
                # The caller of `mute` stores the answer and then cancels this task. Going on would store it twice.
                await anyio.sleep_forever()
            self._is_listening = False
        calls = self._calls.understood(answer.calls)
        self._answer = answer = replace(answer, calls=calls, usage=usage_of_answer(answer, sent=self._sent))
        await self._note_parts()
        plans: Sequence[PlannedCall] = ()
        if answer.calls:
            async with after_delay(_PLAN_S, self._save_draft):
                plans = await self._calls.plan(answer.calls)
        *failed, last = self._stream.attempts()
        self._count(failed)
        entry = await self._store_answer(self._assistant(draft.message_id, answer, plans, sent=last.sent))
        await self._gauge.answered()
        await self._gauge.tell()
        assert isinstance(entry.body, Assistant)
        return entry.id, entry.body, plans

    async def _note_parts(self) -> None:
        """If messages are sent in another form from now on, store a note, because the new form breaks the provider's
        cache."""
        if changed := self._branch.sent_parts.changed(self.model.info):
            await self._branch.record([NewEntry(body=Note(about="dialect", value=", ".join(changed)))])

    async def _save_draft(self) -> None:
        """Save the shown text of an answer that cannot be stored yet. Ignore a failure, because the whole answer is
        stored later."""
        if self._draft is not None:
            with suppress(errors.StoreError):
                await self._draft.save()

    async def _store_answer(self, new: NewEntry) -> Entry:
        """Store the answer that was shown, then publish it. If the turn is cancelled while the answer is being
        published, the end of the turn does not store the answer a second time."""
        (entry,) = await self._branch.store_only([new])
        self._draft = self._answer = self._stream = None
        await self._branch.publish(EntryStored(entry=entry))
        return entry

    def mute(self) -> bool:
        """Stop showing the answer that the model is giving. Return False if the model is not giving an answer.

        If this returns True, the turn does nothing until it is cancelled, and the caller has to cancel it. In this way,
        the turn's end can be stored while the connection to the model is still being closed.
        """
        if self._draft is None or not self._is_listening:
            return False
        self._draft.mute()
        return True

    def unstored_answer(self) -> list[NewEntry]:
        """Return the answer that was shown but not stored. It is marked as interrupted unless it is complete."""
        draft, stream = self._draft, self._stream
        if draft is None:
            return []
        attempts = stream.attempts() if stream is not None else ()
        answer = self._answer
        if answer is None and not (draft.text or draft.thought):
            self._count(attempts)
            return []
        self._count(attempts[:-1])
        if answer is None:
            usage = usage_of_attempt(attempts[-1], sent=self._sent) if attempts else None
            answer = Answer(text=draft.text, thought=draft.thought, finish="interrupted", usage=usage)
        return [self._assistant(draft.message_id, answer, sent=attempts[-1].sent if attempts else None)]

    def _count(self, attempts: Sequence[Attempt]) -> None:
        """Store the usage of requests that gave no answer. Each request is counted only once."""
        info, new = self.model.info, attempts[self._counted :]
        self._counted += len(new)
        new = [replace(each, sent=self._with_limits(each.sent)) for each in new]
        self._branch.store_with_next([request_entry(each, info, sent=self._sent, purpose="answer") for each in new])

    def _with_limits(self, sent: SentRequest | None) -> SentRequest | None:
        """Add the figures that decide about compactions to the record of a request."""
        return sent and replace(sent, limits=self._gauge.recorded())

    def _assistant(
        self, message_id: str, answer: Answer, plans: Sequence[PlannedCall] = (), *, sent: SentRequest | None
    ) -> NewEntry:
        info = self.model.info
        return NewEntry(
            body=Assistant(
                text=answer.text,
                message_id=message_id,
                thought=answer.thought,
                calls=answer.calls,
                finish=answer.finish,
                opaque=answer.opaque,
                reasoning_field=answer.reasoning_field,
                endpoint=info.endpoint,
                wire=answer.wire,
                announcements=tuple(plan.announcement for plan in plans),
                cut=self._gauge.cut_calls(answer.calls) if answer.calls else None,
                sent=self._with_limits(sent),
            ),
            model=info.name,
            usage=answer.usage,
            cost=cost_of(answer.usage, info),
            estimate=self._gauge.estimate(),
        )


class Standby:
    """Finds the model that answers for the rest of a turn while the endpoint of the branch's model is down.

    `down` has the names of the models whose endpoints are down and about which the user has been told. All turns of a
    session share this set.
    """

    def __init__(
        self,
        branch: Branch,
        adapters: Adapters,
        down: set[str],
        report: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._adapters = adapters
        self._down = down
        self._report = report
        self._own = self._name = branch.row.model
        self._is_subagent = branch.row.parent_id is not None

    async def next(self, error: errors.ModelError) -> Model | None:
        """Return the fallback of the model that failed with `error`, and tell the user about the change. Return None if
        the failed model has no usable fallback."""
        name = self._adapters.fallback(self._name)
        if not name:
            return None
        try:
            model = await self._adapters.model(name)
            model.check()
        except errors.CrowError as problem:
            logger.warning("The fallback %s of %s cannot be used: %s", name, self._name, problem)
            return None
        if self._own not in self._down or not self._is_subagent:
            title = f"{self._name} does not answer; {name} answers for the rest of this turn"
            await self._report(title, f"{error} The next prompt goes to {self._own} again.")
        self._down.add(self._own)
        self._name = name
        return model

    async def answered(self) -> None:
        """Tell the user if the branch's own model answers again."""
        if self._name == self._own and self._own in self._down:
            self._down.discard(self._own)
            await self._report(f"{self._own} answers again", "")

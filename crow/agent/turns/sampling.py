"""Lets the session's model answer requests of MCP servers, if the user allows it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio

from crow.agent import Client
from crow.agent.history.branch import Branch
from crow.agent.history.usage import request_entry
from crow.agent.permissions.decisions import Allow, Refuse
from crow.agent.permissions.judge import CANNOT_ASK, Permissions
from crow.agent.turns.cost import Budget
from crow.domain.entries import NewEntry
from crow.domain.errors import CrowError, ModelError, StoreError
from crow.domain.events import CallProgressed
from crow.domain.messages import Answer, Image, SystemMessage, UserMessage
from crow.domain.rendering import part_text
from crow.domain.tokens import estimate_message
from crow.llm import Attempt, Model, Request, TextDelta
from crow.tools.limits import FairLimiter
from crow.tools.sampling import SamplingAnswer, SamplingRefusal, SamplingRequest

logger = logging.getLogger(__name__)

_MAX_PER_TURN = 50
"""One server may get at most this many answers in one turn."""

_DEADLINE_S = 300.0
"""The model has this many seconds for one answer."""
_STORE_S = 5.0
"""After a cancellation, crow tries for this many seconds to store the usage of a request."""
_SYSTEM = "A tool of the user asks you this. Answer it; you have no tools."
_NOT_ALLOWED = SamplingRefusal(words="The user did not allow this request.", is_users=True)


class ModelSampler:
    """Implements :class:`crow.tools.sampling.Sampler` for a session and its subagents, one request at a time.

    The model sees only the server's messages: nothing of the session, and no tools. If the user rejects a request, that
    server's other requests in the same turn are rejected without asking.
    """

    def __init__(
        self,
        branch: Branch,
        client: Client,
        permissions: Permissions,
        budget: Budget,
        open_model: Callable[[], Awaitable[Model]],
    ) -> None:
        self._branch = branch
        self._client = client
        self._permissions = permissions
        self._budget = budget
        self._open_model = open_model
        self._slot = FairLimiter(1)
        self._asked: Counter[tuple[int, str]] = Counter()
        """Counts the requests, by turn and by the prefix of the server."""
        self._rejected: set[tuple[int, str]] = set()
        """The turns in which the user rejected a request, each with the prefix of the server that made the request."""

    async def sample(
        self, request: SamplingRequest, on_progress: Callable[[int], Awaitable[None]]
    ) -> SamplingAnswer | SamplingRefusal:
        """See :class:`crow.tools.sampling.Sampler`."""
        key = (self._branch.turn, request.prefix)
        if self._asked[key] >= _MAX_PER_TURN:
            return SamplingRefusal(words=f"A server gets at most {_MAX_PER_TURN} answers from the model in one turn.")
        self._asked[key] += 1
        async with self._slot.slot():
            try:
                if key in self._rejected:
                    return _NOT_ALLOWED
                decision = await self._permissions.judge_sampling(request, _question_text(request))
                if isinstance(decision, Refuse) and decision.words == CANNOT_ASK:
                    return _NOT_ALLOWED  # a question during another call may still reach the user
                if not isinstance(decision, Allow):  # `judge` returns None if the user cancelled instead of answering
                    self._rejected.add(key)
                    return _NOT_ALLOWED
                model = await self._open_model()
                model.check()
                return await self._answer(model, request, on_progress)
            except CrowError as error:
                # the error may contain addresses and settings that the server must not see
                logger.warning("MCP server %s got no answer from the model: %s", request.server, error)
                return SamplingRefusal(words="The model did not answer.")

    async def _answer(
        self, model: Model, request: SamplingRequest, on_progress: Callable[[int], Awaitable[None]]
    ) -> SamplingAnswer | SamplingRefusal:
        if words := await self._budget.why_stop(self._branch, model.info):
            logger.warning("MCP server %s got no answer from the model: %s", request.server, words)
            return SamplingRefusal(words="The session has reached its cost limit.")
        messages = (SystemMessage(text=request.system or _SYSTEM), *request.messages)
        sent = sum(map(estimate_message, messages))
        window = model.info.context_window
        if window is not None and sent + request.max_tokens > window:
            return SamplingRefusal(words="The request does not fit into the model's context window.")
        limit = min(request.max_tokens, model.info.max_output_tokens or request.max_tokens)
        shown = f"{model.info.name} answers {request.server}."
        await self._client.publish(CallProgressed(call=request.call, text=shown))
        answer = await self._read(
            model,
            Request(messages=messages, max_output_tokens=limit, cache_key=self._branch.row.id),
            on_progress,
            sent=sent,
        )
        return _cut_answer(answer, model.info.name, request.stop_sequences)

    async def _read(
        self, model: Model, request: Request, on_progress: Callable[[int], Awaitable[None]], *, sent: int
    ) -> Answer:
        """Read the model's answer. Store the request's usage even if the request fails or is cancelled.

        :raises ~crow.domain.errors.ModelError: the endpoint failed, or the answer took too long.
        """
        attempts: Sequence[Attempt] = ()
        try:
            with anyio.move_on_after(_DEADLINE_S):
                async with model.stream(request) as stream:
                    try:
                        length = 0
                        async for delta in stream:
                            if isinstance(delta, TextDelta):
                                length += len(delta.text)
                                await on_progress(length)
                        return stream.answer
                    finally:
                        attempts = stream.attempts()
            raise ModelError(f"{model.info.name} gave no answer within {_DEADLINE_S:g} s.")
        finally:
            used = [request_entry(each, model.info, sent=sent, purpose="sampling") for each in attempts]
            if used:
                with anyio.move_on_after(_STORE_S, shield=True):
                    await self._store(used)

    async def _store(self, used: Sequence[NewEntry]) -> None:
        try:
            await self._branch.record(used)
        except StoreError:  # stored with the branch's next entries instead
            self._branch.store_with_next(used)


def _question_text(request: SamplingRequest) -> str:
    """Return the text that would be sent to the model. The user sees this text and decides whether to allow the
    request."""
    lines = [f"At most {request.max_tokens:,} tokens.", *([f"system: {request.system}"] if request.system else [])]
    for message in request.messages:
        if isinstance(message, UserMessage):
            texts = ("[a picture]" if isinstance(part, Image) else part_text(part) for part in message.parts)
            lines.append("user: " + "\n".join(texts))
        else:
            lines.append(f"assistant: {message.text}")
    return "\n".join(lines)


def _cut_answer(answer: Answer, model: str, stops: Sequence[str]) -> SamplingAnswer | SamplingRefusal:
    """Return the model's answer. If it contains texts from `stops`, cut it before the first of them. Return a refusal
    if the model refused, whatever its text contains."""
    if answer.finish == "refusal":
        return SamplingRefusal(words="The model refused to answer.")
    ends = [end for stop in stops if (end := answer.text.find(stop)) >= 0]
    if ends:
        return SamplingAnswer(text=answer.text[: min(ends)], model=model, stop="stop_sequence")
    if answer.finish == "length":
        return SamplingAnswer(text=answer.text, model=model, stop="length")
    return SamplingAnswer(text=answer.text, model=model)

"""Counts the tokens and the cost of each request to a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from crow.agent.history.branch import Branch
from crow.domain.entries import ModelRequest, NewEntry
from crow.domain.messages import Answer, Usage
from crow.domain.tokens import estimate_text
from crow.llm import Attempt, Model, ModelInfo, Request, Stream, cost_of


def _complete_usage(usage: Usage | None, *, sent: int, made: int) -> Usage:
    """Fill in the token counts that the endpoint did not report. `sent` is the estimate for the input, and `made` is
    the estimate for the output."""
    usage = usage or Usage()
    if usage.input_tokens is not None and usage.output_tokens is not None:
        return usage
    return replace(
        usage,
        input_tokens=sent if usage.input_tokens is None else usage.input_tokens,
        output_tokens=made if usage.output_tokens is None else usage.output_tokens,
        is_input_estimated=usage.input_tokens is None,
        is_output_estimated=usage.output_tokens is None,
    )


def usage_of_answer(answer: Answer, *, sent: int) -> Usage:
    """Return the usage of the request that gave `answer`. `sent` is the estimated size of that request in tokens."""
    if answer.usage is not None and answer.usage.output_tokens is not None:
        return _complete_usage(answer.usage, sent=sent, made=0)
    texts = (answer.text, answer.thought, *(text for call in answer.calls for text in (call.name, call.arguments)))
    return _complete_usage(answer.usage, sent=sent, made=sum(map(estimate_text, texts)))


def usage_of_attempt(attempt: Attempt, *, sent: int) -> Usage:
    """Return the usage of a request that got no answer."""
    return _complete_usage(attempt.usage, sent=sent, made=attempt.output_tokens)


def request_entry(
    attempt: Attempt, info: ModelInfo, *, sent: int, purpose: Literal["answer", "summary", "title", "sampling"]
) -> NewEntry:
    """Return an entry that records the usage of one request, and its cost at the current prices."""
    usage = usage_of_attempt(attempt, sent=sent)
    return NewEntry(
        body=ModelRequest(purpose=purpose, sent=attempt.sent), model=info.name, usage=usage, cost=cost_of(usage, info)
    )


@asynccontextmanager
async def summary_stream(branch: Branch, model: Model, request: Request, *, sent: int) -> AsyncIterator[Stream]:
    """Open the stream that `model.stream(request)` returns, and record the request's usage when the stream is closed,
    even if the request failed or was cancelled. The usage is stored together with the branch's next entries. `sent` is
    the estimated size of the request in tokens."""
    async with model.stream(request) as stream:
        try:
            yield stream
        finally:
            branch.store_with_next(
                [request_entry(each, model.info, sent=sent, purpose="summary") for each in stream.attempts()]
            )

"""Shows what crow would have sent, compacted or refused with another model, system message or compaction policy.

No model is asked. The answers and results are those in the log. A compaction gets the summary of the log's next
compaction, or else notes taken without a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from crow.agent.compaction.budget import CompactionPolicy, Limits, Measure, limits_for, used_part
from crow.agent.compaction.compactor import MIN_ANSWERS
from crow.agent.compaction.planner import CheckpointDraft, Noop, fits, plan, with_bodies
from crow.agent.compaction.summary import notes
from crow.agent.compaction.window import DEFAULT_WINDOW
from crow.domain.conversation import Context, Projection, unloaded_skill
from crow.domain.entries import Assistant, Body, Checkpoint, Entry, Mask, Prompt, Restore
from crow.domain.messages import Usage
from crow.llm import ModelInfo, cost_of
from crow.store import Store
from crow.store.portable import renumbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is different from the session in the log."""

    info: ModelInfo
    """The model."""
    policy: CompactionPolicy
    system: str | None = None
    """Replaces the system message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldSend:
    """A request as it would have been. Sizes are in tokens."""

    entry: int
    """The id of the entry that holds the answer."""
    turn: int
    tokens: int
    was_tokens: int | None
    """The count that the provider reported for the request in the log."""
    cached: int
    """The part that is the same as in the request before."""
    compaction: str
    """`hidden outputs` or `summary` if the context would have been compacted before the request, else empty."""
    refused: str
    """Why crow would have refused the request, or empty."""
    cost: float | None
    """In US dollars, with the answer in the log. None if the prices are unknown."""
    was_cost: float | None


async def what_if(store: Store, session_id: str, change: Change) -> AsyncIterator[WouldSend]:
    """Yield the requests on a session's path, oldest first."""
    path = [entry async for entry in _doubled(store, session_id)]
    going = _Simulation(
        change, [(entry.id, entry.body.summary) for entry in path if isinstance(entry.body, Checkpoint)]
    )
    for entry in path:
        if isinstance(entry.body, Assistant):
            yield going.request(entry)
        if isinstance(entry.body, Prompt) and change.system is not None:
            going.add(replace(entry, body=replace(entry.body, system=change.system)))
        elif not isinstance(entry.body, Checkpoint | Mask | Restore) or unloaded_skill(entry.body):
            going.add(entry)


async def _doubled(store: Store, session_id: str) -> AsyncIterator[Entry]:
    """Yield the session's path with doubled ids, so that there is an unused id after each entry."""
    async for batch in store.history(session_id):
        for entry in batch:
            body: Body = renumbered(entry.body, _double, _double)
            yield replace(entry, id=_double(entry.id), parent=entry.parent and _double(entry.parent), body=body)


def _double(entry_id: int) -> int:
    return 2 * entry_id


class _Simulation:
    """A session with the change, up to the entry that was added last."""

    def __init__(self, change: Change, logged: list[tuple[int, str]]) -> None:
        """`logged` are the ids of the checkpoints in the log, with their summaries."""
        self._change = change
        self._logged = logged
        self._projection = Projection()
        self._leaf: Entry | None = None
        """The entry that was added last."""
        self._before: Context | None = None
        """The context of the request before."""
        self._requests = 0
        """The number of requests so far."""
        self._passes: list[int] = []
        """The value of `_requests` at each compaction."""

    def add(self, entry: Entry) -> None:
        """Add an entry to the path."""
        self._leaf = entry
        self._projection.add(entry)

    def request(self, answer: Entry) -> WouldSend:
        """Return the request for `answer`. If a compaction is needed before it, compact first."""
        usage = answer.usage or Usage()
        reported = None if usage.is_input_estimated else usage.input_tokens
        scale = min(4.0, max(0.5, reported / answer.estimate)) if reported and answer.estimate else 1.0
        measured, limits = self._measured(scale)
        compaction, refused = "", ""
        if self._change.policy.auto and measured.used >= limits.threshold:
            compaction, refused = self._compact(measured, limits)
            measured, limits = self._measured(scale)
        self._requests += 1
        cached = round(self._repeated() * scale)
        own = replace(usage, input_tokens=measured.used, cached_tokens=cached, cache_write_tokens=None)
        self._before = self._projection.context()
        return WouldSend(
            entry=answer.id // 2,
            turn=answer.turn,
            tokens=measured.used,
            was_tokens=reported,
            cached=cached,
            compaction=compaction,
            refused=refused,
            cost=None if refused else cost_of(own, self._change.info),
            was_cost=answer.cost,
        )

    def _measured(self, scale: float) -> tuple[Measure, Limits]:
        context, info = self._projection.context(), self._change.info
        used, fixed = round(context.estimate * scale), round(context.fixed_estimate * scale)
        declared, policy = info.context_window or DEFAULT_WINDOW, self._change.policy
        window = used_part(declared, declared, policy)
        is_configured = info.is_window_configured and window == declared
        limits = limits_for(window, info.max_output_tokens, fixed, policy, is_configured=is_configured)
        return Measure(used=used, fixed=fixed, scale=scale, is_reported=True), limits

    def _compact(self, measured: Measure, limits: Limits) -> tuple[str, str]:
        """Compact the context as a turn would. Return the kind of the compaction and the reason of a refusal; each may
        be empty."""
        if len(self._passes) > 1 and self._requests - self._passes[-2] < MIN_ANSWERS:
            return "", "the context fills up too fast" if limits.is_configured else ""
        decision = plan(self._projection, limits, measured, "threshold")
        if isinstance(decision, Noop):
            return "", ""
        assert self._leaf is not None, "a context that is full has entries"
        leaf = self._leaf
        self._logged = [(entry_id, summary) for entry_id, summary in self._logged if entry_id > leaf.id]
        found = decision if isinstance(decision, Mask) else self._checkpoint(decision, measured, limits)
        if found is None:
            return "", "the window is too small" if limits.is_configured else ""
        self.add(replace(leaf, id=leaf.id + 1, parent=leaf.id, body=found, usage=None, estimate=None))
        self._passes.append(self._requests)
        return "summary" if isinstance(found, Checkpoint) else "hidden outputs", ""

    def _checkpoint(self, drafts: tuple[CheckpointDraft, ...], measured: Measure, limits: Limits) -> Checkpoint | None:
        """Return the first checkpoint that makes the request small enough."""
        messages = self._projection.context().messages
        logged = self._logged.pop(0)[1] if self._logged else ""
        for draft in drafts:
            previous = self._projection.checkpoint_body
            start = 1 if previous is None else 2
            budget = int(draft.summary_tokens / measured.scale)
            taken = notes(previous.summary if previous else "", messages[start : draft.start], budget)
            for summary in filter(None, (logged, taken)):
                body = replace(draft.body, summary=summary)
                after = round(with_bodies(self._projection.entries, body).estimate * measured.scale)
                if fits(after, draft, limits, len(messages)):
                    return replace(body, tokens_before=measured.used, tokens_after=after)
        return None

    def _repeated(self) -> int:
        """Return how many estimated tokens of the request are the same as in the request before."""
        now, before = self._projection.context(), self._before
        if before is None or now.tools != before.tools:
            return 0
        same = 0
        for one, other, tokens in zip(now.messages, before.messages, now.estimates, strict=False):
            if one != other:
                break
            same += tokens
        return now.tools_estimate + same if same else 0

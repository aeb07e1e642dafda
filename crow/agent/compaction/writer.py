"""Writes checkpoints: a summary, the draft that fits, and the files in use. Stores and shows nothing itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import anyio

from crow.agent.compaction import Reason
from crow.agent.compaction.budget import Gauge, Limits, Measure
from crow.agent.compaction.checkpoint import FRAME_TOKENS, files_in_use
from crow.agent.compaction.planner import CheckpointDraft, fits, with_bodies
from crow.agent.compaction.summary import Summary, SummaryJob, notes, summarise
from crow.agent.compaction.wish import CompactionWish
from crow.agent.history.usage import summary_stream
from crow.agent.hooks import BranchHooks, CompactionAdvice
from crow.domain.conversation import Context, Projection
from crow.domain.entries import Body, Checkpoint, Prompt, ShownFile
from crow.domain.messages import ToolMessage
from crow.domain.rendering import file_text
from crow.domain.tokens import estimate_text
from crow.llm import Model

logger = logging.getLogger(__name__)

_DEADLINE_S = 120.0
_READ_S = 3.0
"""Reading the files in use may take this many seconds."""
_MAX_FILES = 50
_MIN_FILE = 50
"""If a checkpoint has room for fewer tokens than this, crow does not read another file for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """What a compaction needs in addition to the model."""

    fresh_prompt: Callable[[], Awaitable[Prompt]] | None = None
    """Builds the prompt entry that is stored with a checkpoint. If None, the current prompt entry stays."""
    compact_model: Model | None = None
    """If set, crow asks this model for the summary first."""
    hooks: BranchHooks | None = None
    read_file: Callable[[str], Awaitable[str | None]] | None = None
    """Returns the text that the tool `read_file` would show to the model. Returns None if the file may not be read or
    cannot be read."""
    deadline_s: float = _DEADLINE_S
    """Limits the time of each request, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One compaction in progress, which is called a pass."""

    reason: Reason
    wish: CompactionWish
    """What the user asked for."""
    measured: Measure
    """The context as measured at the beginning of the pass."""
    limits: Limits
    """The limits that apply."""
    advice: CompactionAdvice = field(default_factory=CompactionAdvice)
    """The advice of hooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCheckpoint:
    """A summary, and drafts of the checkpoint that will contain it."""

    summary: Summary
    drafts: Sequence[CheckpointDraft]
    projection: Projection
    """The drafts were made from this projection."""
    context: Context
    """The context of `projection`."""
    leaf: int
    """The id of the newest entry when the drafts were made."""
    endpoint: str
    """The endpoint of the session's model when the drafts were made."""


class CheckpointWriter:
    """Writes the checkpoints of one branch."""

    def __init__(self, gauge: Gauge, helpers: Helpers) -> None:
        self._gauge = gauge
        self._branch = gauge.branch
        self._helpers = helpers

    def limits(self, fixed: int, window: int | None, wish: CompactionWish) -> Limits:
        """Return the limits of a pass. `fixed` are the tokens of system prompt and tools, `window` (tokens) replaces
        the model's window.

        :raises ~crow.domain.errors.ArgumentError: the wish cannot be fulfilled in this window.
        """
        return wish.applied_to(self._gauge.limits(fixed, window=window), self._gauge.settings)

    async def prepare(
        self, model: Model, drafts: Sequence[CheckpointDraft], current: Pass, *, show: Callable[[str], Awaitable[None]]
    ) -> PreparedCheckpoint:
        """Write the summary for these drafts with the session's model. Call `show` with each piece of it."""
        projection, context, leaf = self._branch.projection, self._branch.context(), self._branch.entries[-1].id
        return PreparedCheckpoint(
            summary=await self._summary(model, self._job(context, drafts[0], current, show), current.advice.summary),
            drafts=drafts,
            projection=projection,
            context=context,
            leaf=leaf,
            endpoint=model.info.endpoint,
        )

    async def fit(
        self, compaction_id: str, prepared: PreparedCheckpoint, current: Pass
    ) -> tuple[Checkpoint, Prompt | None] | None:
        """Find the first draft that makes the next request small enough, and smaller than it would be without a
        compaction. Return the checkpoint made from this draft, and its prompt entry. Return None if no draft is good
        enough. To measure a draft, render the request that would result from it."""
        context, drafts, measured = prepared.context, prepared.drafts, current.measured
        prompt = await self._helpers.fresh_prompt() if self._helpers.fresh_prompt else None
        # the summary does not cover entries that were stored after the summary was begun
        newer = next((entry.id for entry in self._branch.projection.entries_after(prepared.leaf)), None)
        for draft in drafts:
            text = prepared.summary.text
            if draft is not drafts[0]:  # the summary lacks the messages that only this draft removes
                more = context.messages[drafts[0].start : draft.start]
                text = notes(text, more, int(draft.summary_tokens / measured.scale))
            body = replace(
                draft.body,
                compaction_id=compaction_id,
                summary=text,
                first_kept=newer if draft.body.first_kept is None else draft.body.first_kept,
                mode=self._branch.row.mode,
                method=prepared.summary.method,
                model_calls=prepared.summary.model_calls,
                focus=current.wish.focus,
                tokens_before=measured.used,
            )
            bodies: tuple[Body, ...] = (body,) if prompt is None else (prompt, body)
            after = with_bodies(self._branch.entries, *bodies)
            tokens = round(after.estimate * measured.scale)
            fixed = round(after.fixed_estimate * measured.scale)
            limits = self.limits(fixed, current.limits.window, current.wish)
            if tokens < measured.used and fits(tokens, draft, limits, len(context.messages)):
                return await self._show_files(replace(body, tokens_after=tokens), prompt, limits, measured), prompt
        return None

    async def _show_files(
        self, body: Checkpoint, prompt: Prompt | None, limits: Limits, measured: Measure
    ) -> Checkpoint:
        """Add the files in use to a checkpoint, as far as they fit. A file is left out if the model still sees its text
        in a tool output."""
        read_file, entries = self._helpers.read_file, self._branch.entries
        most = min(body.tokens_after + limits.files, limits.files_ceiling, measured.used - 1)
        left = most - body.tokens_after
        if read_file is None or limits.is_tiny or left < _MIN_FILE:
            return body
        others: tuple[Body, ...] = () if prompt is None else (prompt,)
        outputs = [each.text for each in with_bodies(entries, *others, body).messages if isinstance(each, ToolMessage)]
        shown: list[ShownFile] = []
        with anyio.move_on_after(_READ_S):
            for used in files_in_use(self._branch.projection.checkpoint_body, entries)[:_MAX_FILES]:
                text = await read_file(used.path)
                if text is None or any(text in output for output in outputs):
                    continue
                file = ShownFile(path=used.path, text=text)
                cost = math.ceil((FRAME_TOKENS + estimate_text(file_text(file))) * measured.scale)
                if cost <= left:
                    shown.append(file)
                    left -= cost
                if left < _MIN_FILE:
                    break
        while shown:  # the parts' estimates may not add up exactly to the estimate of the whole
            longer = replace(body, files_shown=tuple(shown))
            tokens = round(with_bodies(entries, *others, longer).estimate * measured.scale)
            if tokens <= most:
                return replace(longer, tokens_after=tokens)
            shown.pop()
        return body

    def _job(
        self, context: Context, draft: CheckpointDraft, current: Pass, show: Callable[[str], Awaitable[None]]
    ) -> SummaryJob:
        """Return the job of writing the summary for `draft`."""
        return SummaryJob(
            tools=context.tools,
            messages=context.messages[: draft.start],
            estimate=context.tools_estimate + sum(context.estimates[: draft.start]),
            previous=self.previous_summary(),
            limits=replace(current.limits, summary=draft.summary_tokens),
            scale=current.measured.scale,
            deadline_s=self._helpers.deadline_s,
            stream=partial(summary_stream, self._branch),
            instruction=self._gauge.settings.instruction,
            focus=current.wish.focus,
            context=current.advice.context,
            cache_key=self._branch.row.id,
            thought_level=self._branch.thought_level,
            show=show,
        )

    async def _summary(self, model: Model, job: SummaryJob, advised: str) -> Summary:
        """Return the summary that a hook advised if it fits. Otherwise ask the model for one."""
        text = advised.strip()
        size = estimate_text(text)
        if text and size <= job.budget:
            return Summary(text=text, method="hook")
        if text:
            logger.warning("Ignored a hook's summary of %d tokens; the limit is %d", size, job.budget)
        return await summarise(job, model, compact_model=self._helpers.compact_model)

    def previous_summary(self) -> str:
        """Return the summary that the model sees now, or an empty string."""
        checkpoint = self._branch.projection.checkpoint_body
        return checkpoint.summary if checkpoint else ""

"""The clients of subagents: they pass the text, calls and questions of a subagent on to the client of its session.

An editor that shows subagents gets each as a session of its own (`_ShownClient`). In other editors, a subagent in the
foreground is shown by the call that started it (`SubagentClient`), and one in the background is not shown
(`_HiddenClient`).
"""

from __future__ import annotations

import time

import anyio

from crow.agent import Client, PermissionAnswer, PermissionQuestion, new_message_id
from crow.agent.history.branch import Branch
from crow.agent.history.recall import BranchLog
from crow.agent.permissions.judge import Permissions
from crow.domain.entries import Assistant, Entry, Started, ToolResult, TurnEnd
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    Elicitation,
    ElicitationAnswer,
    ElicitationKind,
    EntryStored,
    Event,
    SessionMessage,
    SubagentChanged,
    SubagentLinked,
    TextShown,
)
from crow.domain.messages import Usage
from crow.domain.subagents import answer_id, order_id, resume_hint
from crow.tools import OnOutput, SubagentResult

_PROGRESS_EVERY_S = 0.1
"""The progress of a call is shown at most once in this many seconds, except when the subagent calls a tool."""
_PROGRESS_CHARS = 2_000
"""The progress of a call shows at most this many characters from the end of its text."""
_END_S = 5.0
"""When a subagent ends, crow waits at most this many seconds for clients to take the news."""
_CANCELLED = TurnEnd(stop="cancelled")


def client_for(
    client: Client, log: BranchLog, call_id: str, on_output: OnOutput, *, is_background: bool
) -> SubagentClient:
    """Return the client of a subagent that the call `call_id` starts. `client` is the client of the session."""
    if client.shows_subagents:
        return _ShownClient(client, log, call_id, is_background=is_background)
    if is_background:
        return _HiddenClient(client, log, None)
    return SubagentClient(client, log, on_output)


class SubagentClient:
    """The client of a subagent. It passes the subagent's calls on to the editor, and shows the subagent's text as
    progress of the call that started the task."""

    def __init__(self, client: Client, log: BranchLog, on_output: OnOutput | None) -> None:
        self.answers: list[int] = []
        """The entry ids of the subagent's answers in this run."""
        self.branch: Branch | None = None
        """The subagent's branch. None until it is open."""
        self.end: TurnEnd | None = None
        """How the work has ended. None until then."""
        self.message_id = new_message_id()
        """The message id of the subagent's prompt."""
        self._client = client
        self._log = log
        self._on_output = on_output
        self._lines: list[str] = []
        """The progress so far: a line for each call, and the text before it."""
        self._text = ""
        """The text since the last call."""
        self._answer = ""
        """The text of the subagent's newest answer, which is its result when it ends."""
        self._shown_at = 0.0

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return False

    @property
    def shows_subagents(self) -> bool:
        """See :class:`crow.agent.Client`. A subagent has no subagents."""
        return False

    def open_subagent(self, session_id: str) -> Client:  # noqa: ARG002
        """See :class:`crow.agent.Client`."""
        return self

    def close_subagent(self, session_id: str) -> None:
        """See :class:`crow.agent.Client`."""

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`."""
        return await self._client.ask(question)

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """See :class:`crow.agent.Client`."""
        return await self._client.elicit(question)

    async def finish_question(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        await self._client.finish_question(question_id)

    def permissions(self, shared: Permissions) -> Permissions:
        """Return the permissions of the subagent. `shared` are the permissions of the subagent's session, whose mode
        and rules always apply."""
        return shared

    async def begin(self, branch: Branch, prompt: str) -> None:
        """Show that the subagent has received its prompt and starts to work."""

    async def finish(self, branch: Branch) -> None:
        """Show how the work has ended. Cancellation does not interrupt this."""

    def close(self) -> None:
        """Forget the subagent."""

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        return self._client.question_kinds

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
        match event:
            case CallAnnounced(announcement=announcement):
                self._lines += [line for line in (self._text.strip(), f"● {announcement.title}") if line]
                self._text = ""
                await self._client.publish(event)
                await self._show()
            case CallProgressed() | CallEnded() | EntryStored(entry=Entry(body=Started() | ToolResult())):
                await self._client.publish(event)
            case EntryStored(entry=entry):
                self._add(entry)
            case TextShown(text=text):
                self._text += text
                if time.monotonic() - self._shown_at >= _PROGRESS_EVERY_S:
                    await self._show()
            case _:
                pass

    def _add(self, entry: Entry) -> None:
        if isinstance(entry.body, Assistant):
            assert self.branch is not None, "the branch is set before the turn runs"
            self.answers.append(entry.id)
            self._log.adopt(entry.id, self.branch)
            self._answer = entry.body.text

    async def _show(self) -> None:
        if self._on_output is None:
            return
        self._shown_at = time.monotonic()
        text = "\n".join([*self._lines[-50:], self._text.strip()]).strip()
        await self._on_output(text[-_PROGRESS_CHARS:])

    def result(self, task_id: str, usage: Usage | None, cost: float | None) -> SubagentResult:
        """Return the result of the task, for the agent that delegated the task. `usage` and `cost` (USD) are for this
        run only."""
        text, end = self._answer, self.end or _CANCELLED
        if end.stop == "error":
            text = f"{text}\n\nThe task failed: {end.detail}".strip()
        elif end.stop != "end_turn":
            text = f"{text}\n\n[the task ended early: {end.stop}]".strip()
        return SubagentResult(
            id=task_id,
            text=text,
            is_error=end.stop != "end_turn",
            steps=len(self.answers),
            usage=usage,
            cost=cost,
        )

    def report(self, words: str, changes: str = "") -> tuple[str, str]:
        """Report how a task in the background has ended. Return a text for the model and a line for the user. Both
        begin with `words`, which name the task. `changes` describes the changes in the subagent's layer."""
        task_id = self.branch.row.id if self.branch is not None else ""
        end = self.end or _CANCELLED
        match end.stop:
            case "end_turn":
                remark, more = f"{words} has ended.", f" Its answer:\n{self._answer or '(no answer)'}"
            case "error":
                remark, more = f"{words} has failed: {end.detail}", f"\n{self._answer}".rstrip()
            case stop:
                remark, more = f"{words} has ended early: {stop}.", f"\n{self._answer}".rstrip()
        more = "\n".join(filter(None, [more, changes]))
        return f"{remark}{more}{resume_hint(task_id)}", remark.replace(", which you started in the background,", "")


class _HiddenClient(SubagentClient):
    """The client of a subagent that works in the background and that the editor cannot show. It never asks the user,
    because a question needs a running turn of the session."""

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
        if isinstance(event, EntryStored):
            self._add(event.entry)

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        return frozenset()

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:  # noqa: ARG002
        """See :class:`crow.agent.Client`."""
        return "cannot_ask"

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:  # noqa: ARG002
        """See :class:`crow.agent.Client`."""
        return ElicitationAnswer(action="cancel")

    def permissions(self, shared: Permissions) -> Permissions:
        """See :class:`SubagentClient`."""
        return shared.asking(self)


class _ShownClient(SubagentClient):
    """The client of a subagent that the editor shows as a session of its own."""

    def __init__(self, client: Client, log: BranchLog, call_id: str, *, is_background: bool = False) -> None:
        super().__init__(client, log, None)
        self.message_id = order_id(call_id)
        self._is_background = is_background
        self._call_id = call_id
        self._session: Client | None = None
        """The editor's session for the subagent. None until the subagent was announced."""
        self._asking = 0
        """How many questions to the user are open."""

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return self._client.takes_notices

    def permissions(self, shared: Permissions) -> Permissions:
        """See :class:`SubagentClient`. The user is asked in the subagent's session."""
        return shared.asking(self)

    async def begin(self, branch: Branch, prompt: str) -> None:
        """See :class:`SubagentClient`. Announces the subagent before anything else names it."""
        session_id, parent_id = branch.row.id, branch.row.parent_id or ""
        await self._client.publish(SubagentChanged(session_id=session_id, title=branch.row.title or ""))
        self._session = self._client.open_subagent(session_id)
        order = SessionMessage(message_id=self.message_id, sender=parent_id, recipient=session_id, text=prompt)
        await self._client.publish(order)
        await self._session.publish(order)
        await self._client.publish(SubagentChanged(session_id=session_id, state="running"))
        await self._client.publish(SubagentLinked(call_id=self._call_id, session_id=session_id))

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
        if isinstance(event, EntryStored):
            self._add(event.entry)
        if self._session is not None:
            await self._session.publish(event)

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`. While the user is asked, the subagent's state is `requires_action`."""
        assert self._session is not None, "a running subagent was announced"
        assert self.branch is not None, "the branch is set before the turn runs"
        session_id = self.branch.row.id
        self._asking += 1
        try:
            if self._asking == 1:
                await self._client.publish(SubagentChanged(session_id=session_id, state="requires_action"))
            answer = await self._session.ask(question)
        finally:
            self._asking -= 1
        if not self._asking:
            await self._client.publish(SubagentChanged(session_id=session_id, state="running"))
        return answer

    async def finish(self, branch: Branch) -> None:
        """See :class:`SubagentClient`."""
        if self._session is None:  # the subagent was cancelled before it was announced
            return
        session_id, parent_id = branch.row.id, branch.row.parent_id or ""
        end = self.end or _CANCELLED
        if end.stop == "end_turn" and self._answer:
            answer = SessionMessage(
                message_id=answer_id(self._call_id), sender=session_id, recipient=parent_id, text=self._answer
            )
            with anyio.move_on_after(_END_S, shield=True):
                await self._session.publish(answer)
                if self._is_background:  # otherwise, the result of the call shows the answer
                    await self._client.publish(answer)
        with anyio.move_on_after(_END_S, shield=True):
            await self._client.publish(
                SubagentChanged(
                    session_id=session_id,
                    state="idle",
                    stop=end.stop,
                    detail=end.detail,
                    usage=branch.usage.turn,
                )
            )

    def close(self) -> None:
        """See :class:`SubagentClient`."""
        if self.branch is not None:
            self._client.close_subagent(self.branch.row.id)

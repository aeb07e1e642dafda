"""Tells the model, before each request, what has happened besides the results of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from crow.agent.history.branch import Branch
from crow.agent.turns.prompt import Briefing
from crow.domain.entries import NewEntry, Reminder, ToolResult, User
from crow.domain.messages import ToolCall

_POINT_OUT = frozenset({3, 10, 20})
"""When the number of repetitions reaches one of these numbers, the model is told that it repeats itself."""
_GIVE_UP = 30
"""After this number of repetitions, the turn ends."""
_REPEATED = (
    "<reminder>You have called {name} {count} times with the same arguments and the same result. Calling it again will "
    "not change that: use the result, try another way, or say what is in the way.</reminder>"
)


class WaitingNews(Protocol):
    """News of work in the background; see :class:`crow.agent.turns.inbox.Inbox`."""

    @property
    def has_news(self) -> bool:
        """Whether there is something that the model does not know yet."""

    async def deliver(self) -> None:
        """Store the news for the model."""


class News:
    """Tells the model of one turn what has happened since its last request.

    There are four kinds of news: prompts that the user added to the turn, work in the background that has ended, facts
    that have changed (such as the mode), and a warning if the model repeats the same call.
    """

    def __init__(self, branch: Branch, briefing: Briefing, inbox: WaitingNews | None) -> None:
        self._branch = branch
        self._briefing = briefing
        self._inbox = inbox
        self._steered: list[User] = []
        """The prompts that the user added and that the model has not seen yet."""
        self._repetition = _Repetition()

    @property
    def has_news(self) -> bool:
        """Whether the model has to be told something before the turn may end."""
        return bool(self._steered) or (self._inbox is not None and self._inbox.has_news)

    def steer(self, prompt: User) -> None:
        """Add another prompt by the user, which the model sees at its next step."""
        self._steered.append(prompt)

    def take_steered(self) -> list[NewEntry]:
        """Return the prompts that the model has not seen yet. Storing them removes them from the store's queue of
        prompts."""
        steered, self._steered = self._steered, []
        return [NewEntry(body=prompt) for prompt in steered]

    async def deliver(self) -> None:
        """Store the prompts that the user has added, and the news of background work, for the next request."""
        if self._steered:
            stored = await self._branch.store_only([NewEntry(body=prompt) for prompt in self._steered])
            del self._steered[: len(stored)]  # a cancellation while clients are told must not store them again
            await self._branch.publish_stored(stored)
        if self._inbox is not None:
            await self._inbox.deliver()

    async def remind(self) -> None:
        """Tell the model which facts have changed. Call this after any compaction, because a compaction may drop
        earlier reminders."""
        due = self._briefing.reminder()
        if due is not None:
            text, notes = due
            try:
                await self._branch.record([*notes, NewEntry(body=Reminder(text=f"<reminder>\n{text}\n</reminder>"))])
            except BaseException:  # it is not known whether the reminder was stored
                self._briefing.look_back()
                raise

    async def check_repetition(self, step: Iterable[tuple[ToolCall, ToolResult]]) -> str:
        """Tell the model if it makes the same calls again and again. Return a text for the user if the turn has to stop
        because of that, else an empty string. `step` has the calls of the last step and their results."""
        self._repetition.add(step)
        name, count = self._repetition.name, self._repetition.count
        if count >= _GIVE_UP:
            return (
                f"Stopped: {name} was called {count} times with the same arguments and the same result. "
                "Say what should be done differently."
            )
        if count in _POINT_OUT:
            text = _REPEATED.format(name=name, count=count)
            await self._branch.record([NewEntry(body=Reminder(text=text))])
        return ""


_Fingerprint: TypeAlias = tuple[str, str, bool, int]


class _Repetition:
    """Detects a model that makes the same calls again and again.

    A call is a repetition if it gives the same result as before and no other call gave a new result meanwhile. A new
    result restarts the count, so a command that is run again while files change is not a repetition.
    """

    def __init__(self) -> None:
        self.count = 0
        """In how many steps the most repeated call of the last step was made."""
        self.name = ""
        """The tool of that call."""
        self._known: set[_Fingerprint] = set()
        """All calls of the turn."""
        self._times: Counter[_Fingerprint] = Counter()
        """In how many steps each call was made since a step last gave a new result."""

    def add(self, step: Iterable[tuple[ToolCall, ToolResult]]) -> None:
        """Add a step's calls and results."""
        names = {_fingerprint(call, result): call.name for call, result in step}
        if not names.keys() <= self._known:
            self._times.clear()
        self._known |= names.keys()
        self._times.update(names.keys())
        counts = [(self._times[key], name) for key, name in names.items()]
        self.count, self.name = max(counts, default=(0, ""), key=lambda counted: counted[0])


def _fingerprint(call: ToolCall, result: ToolResult) -> _Fingerprint:
    """Return a value that is equal for calls with the same tool, arguments and result. It holds no large texts."""
    files = ((each.name, each.data) for each in result.attachments if each.for_model)
    shown = (result.text, *(image.data for image in result.images), *files)
    return call.name, call.arguments, result.is_error, hash(shown)

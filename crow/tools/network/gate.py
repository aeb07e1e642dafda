"""Decides for one command which hosts it may reach, and asks the user once about each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

from crow.tools.network import Clock, Host, HostVerdict
from crow.tools.network.uses import Use

_MAX_HOSTS = 200
"""After this many decisions, a command reaches no further hosts."""
_MAX_SHOWN = 5
_PRIVATE = (
    "is an address or a name of a private network; the user can allow it only with a rule that names it, such as "
    "network({host}) in config.toml under [permissions]"
)


class Gate:
    """Makes and remembers the decisions about one command. `judge` decides about a host, or about a use of a credential
    there. It may ask the user.

    If the command gives up its connection while the user is asked, the question stays open, and the answer holds for
    later connections.
    """

    def __init__(self, judge: Callable[[Host, Use | None], Awaitable[HostVerdict]]) -> None:
        self._judge = judge
        self._verdicts: dict[str, HostVerdict] = {}
        """The lasting decisions, by host, or by the words for a use of a credential."""
        self._lock = anyio.Lock()
        self._waiting = 0
        """How many connections wait for a decision."""
        self._left_s = 0.0
        """How much time the command has left, while its clock is stopped."""
        self.refused: dict[str, str] = {}
        """Maps each host that the command did not reach to the reason."""

    @property
    def has_allowed(self) -> bool:
        """Whether the command was allowed to reach a host."""
        return any(not verdict.refusal for verdict in self._verdicts.values())

    async def verdict(self, host: Host, clock: Clock, use: Use | None = None) -> HostVerdict:
        """Return whether the command may reach a host, and use a credential there. `clock` is stopped while a new
        decision is made."""
        about = str(host) if use is None or not use.place else use.words
        known = self._verdicts.get(about)
        if known is None:
            with self._stopped(clock):
                async with self._lock:
                    known = self._verdicts.get(about) or await self._decide(about, host, use)
        if known.refusal:
            self.refuse(host, known.refusal)
        return known

    def refuse(self, host: Host | str, reason: str) -> None:
        """Record for the model why the command did not reach a host."""
        if len(self.refused) < _MAX_HOSTS:
            self.refused.setdefault(str(host), reason)

    async def _decide(self, about: str, host: Host, use: Use | None) -> HostVerdict:
        """Ask `judge`, and remember a lasting decision under `about`. If a use of a credential is allowed, requests to
        this host that change nothing are allowed, too."""
        if len(self._verdicts) >= _MAX_HOSTS:
            return HostVerdict(refusal=f"the command asked for more than {_MAX_HOSTS} hosts")
        found = await self._judge(host, use)
        if host.is_address and not found.is_named and not found.refusal:
            found = HostVerdict(refusal=_PRIVATE.format(host=host))
        if not found.is_lasting:
            return found
        self._verdicts[about] = found
        for other in (*found.also, *(() if found.refusal else (host,))):
            self._verdicts.setdefault(str(other), found)
        return found

    @contextmanager
    def _stopped(self, clock: Clock) -> Iterator[None]:
        """Stop the clock of the command as long as at least one of its connections waits for a decision."""
        if not self._waiting:
            self._left_s = clock.deadline - anyio.current_time()
            clock.deadline = float("inf")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                clock.deadline = anyio.current_time() + self._left_s

    def take_refused(self) -> str:
        """Return the line of `describe` and forget these refusals, so that the next line names only later ones."""
        line = self.describe()
        self.refused.clear()
        return line

    def describe(self) -> str:
        """Return a line for the model about the hosts that the command did not reach; empty if it reached all."""
        if not self.refused:
            return ""
        lines = "; ".join(f"{host}: {reason}" for host, reason in list(self.refused.items())[:_MAX_SHOWN])
        more = len(self.refused) - _MAX_SHOWN
        return f"[Hosts not reached: {lines}{f'; and {more} more' if more > 0 else ''}]"

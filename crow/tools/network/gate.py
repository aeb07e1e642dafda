"""Decides for one command which hosts it may reach, and asks the user once about each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from crow.tools.network import Clock, Host, HostVerdict
from crow.tools.network.uses import Use

_MAX_HOSTS = 200
"""A command that asks for more hosts gets no other."""
_PRIVATE = (
    "is an address or a name of a private network; the user can allow it by its name alone, with a rule such as "
    "network({host}) in config.toml under [permissions]"
)


class Gate:
    """The decisions about one command. `judge` decides about a host, or about a use of a credential there. It may ask
    the user.

    A question stays open if the command gives up its connection, and its answer holds for all later ones.
    """

    def __init__(self, judge: Callable[[Host, Use | None], Awaitable[HostVerdict]]) -> None:
        self._judge = judge
        self._verdicts: dict[str, HostVerdict] = {}
        self._lock = anyio.Lock()
        self._waiting = 0
        self._left_s = 0.0
        self.refused: dict[str, str] = {}
        """Why the command did not reach hosts, by the hosts."""

    @property
    def has_allowed(self) -> bool:
        """Whether the command was allowed to reach a host."""
        return any(not verdict.refusal for verdict in self._verdicts.values())

    async def verdict(self, host: Host, clock: Clock, use: Use | None = None) -> HostVerdict:
        """Return whether the command may reach a host, and use a credential there. `clock` stops meanwhile."""
        about = str(host) if use is None or not use.place else use.words
        known = self._verdicts.get(about)
        if known is None:
            with _Stopped(self, clock):
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

    def begin_waiting(self, clock: Clock) -> None:
        if not self._waiting:
            self._left_s = clock.deadline - anyio.current_time()
            clock.deadline = float("inf")
        self._waiting += 1

    def end_waiting(self, clock: Clock) -> None:
        self._waiting -= 1
        if not self._waiting:
            clock.deadline = anyio.current_time() + self._left_s

    def take_refused(self) -> str:
        """Return the same line as `describe`, for a command that continues: the next one names only later refusals."""
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


_MAX_SHOWN = 5


class _Stopped:
    """Stops the clock of a command as long as a connection waits for a decision."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock

    def __enter__(self) -> None:
        self._gate.begin_waiting(self._clock)

    def __exit__(self, *_: object) -> None:
        self._gate.end_waiting(self._clock)

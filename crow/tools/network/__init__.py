"""The network of confined commands: hosts that the user allows by name, reached through a proxy of crow."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from crow.tools.network.credentials import Credentials
from crow.tools.network.hosts import Host
from crow.tools.network.uses import Use

LISTENER_PORT = 20_219
"""The port of crow's proxy on the loopback interface of each command. Commands share no loopback interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostVerdict:
    """The decision whether a command may reach a host."""

    refusal: str = ""
    """Why the command may not reach the host, in words for the model. Empty if it may."""
    is_named: bool = False
    """A rule that the user wrote names exactly this host, so the host may also be on a private network."""
    also: tuple[Host, ...] = ()
    """Other hosts for which the same decision holds: those of the same registry."""
    is_read_only: bool = False
    """Only `GET` and `HEAD` are allowed, where crow can see the request."""
    is_lasting: bool = True
    """The decision holds until the command ends. If false, the next connection to the host needs a new decision."""


class Clock(Protocol):
    """The time limit of a command. A :class:`anyio.CancelScope` is such a clock."""

    deadline: float
    """The time of the event loop, in seconds, at which the command is ended."""


class CommandNetwork(Protocol):
    """The network of one command."""

    def serving(
        self, listener: socket.socket, clock: Clock, credentials: Credentials
    ) -> AbstractAsyncContextManager[None]:
        """Accept the connections of a command until the block ends. `listener` listens in the command's network
        namespace, and is closed at the end. `clock` is stopped while crow asks the user. `credentials` are added to
        requests to their hosts, if the user allows it."""


__all__ = ["LISTENER_PORT", "Clock", "CommandNetwork", "Credentials", "Host", "HostVerdict", "Use"]

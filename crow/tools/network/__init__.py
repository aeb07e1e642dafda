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
    """Whether a command may reach a host."""

    refusal: str = ""
    """For the model. Empty if the command may reach the host."""
    is_named: bool = False
    """A rule that the user wrote names exactly this host, so it may also be on a private network."""
    also: tuple[Host, ...] = ()
    """Other hosts that the answer covers for this command: those of the same registry."""
    is_read_only: bool = False
    """Only requests that read are allowed, where crow can see the request."""
    is_lasting: bool = True
    """Whether it holds until the command ends. If not, the next connection is decided about again."""


class Clock(Protocol):
    """The time limit of a command; :class:`anyio.CancelScope` is one."""

    deadline: float
    """When the command is ended, on the clock of the event loop."""


class CommandNetwork(Protocol):
    """The network of one command."""

    def serving(
        self, listener: socket.socket, clock: Clock, credentials: Credentials
    ) -> AbstractAsyncContextManager[None]:
        """Accept the connections of a command until the block ends. `listener` listens in the command's network
        namespace, and is closed at the end. `clock` stops while the user is asked. `credentials` are added to requests
        that may use them."""


__all__ = ["LISTENER_PORT", "Clock", "CommandNetwork", "Credentials", "Host", "HostVerdict", "Use"]

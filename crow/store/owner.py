"""Identifies the store that runs a turn, and tells whether that store is still alive.

An owner is a store that a process has opened. There are three cases. An owner in this process is alive while its store
is open. An owner in another process with the same host, boot and pid namespace is alive while a process with the
owner's pid and start time exists. Any other owner cannot be looked up, and counts as alive for a minute after its last
sign of life. On a system without /proc, start times are unknown, and any living process with the owner's pid counts as
the owner.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

LEASE_MS = 60_000
"""If an owner's process cannot be looked up, the owner counts as alive for this long after its last sign of life."""

open_stores: set[str] = set()
"""The stores that this process has open, each as the text of its `Owner`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A store that a process has opened. Unknown fields are empty.

    The database stores `str(owner)`.
    """

    pid: int
    start: str
    """When the process started, in kernel ticks since boot."""
    boot: str
    """The kernel's id of the current boot."""
    namespace: str
    """Identifies the pid namespace of the process."""
    host: str
    token: str
    """A random text for each opened store."""

    @classmethod
    def current(cls) -> Owner:
        """Return an owner for this process, with a new token."""
        pid = os.getpid()
        return cls(
            pid=pid,
            start=_start_of(pid) or "",
            boot=_read("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace(),
            host=socket.gethostname(),
            token=os.urandom(8).hex(),
        )

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner that was stored as this text, or None if the text does not describe an owner."""
        try:
            values = json.loads(text)
            owner = cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None
        return owner if type(owner.pid) is int and 0 < owner.pid < 2**31 else None

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def dead_twin(owner: str) -> str:
    """Return an owner that is in the same process as `owner` but counts as dead, because it has no open store."""
    parsed = Owner.parse(owner)
    return str(replace(parsed, token="")) if parsed else ""


def readable(owner: str) -> str:
    """Return `owner` as text for a person, such as `process 1234 on HOST`."""
    parsed = Owner.parse(owner)
    return f"process {parsed.pid} on {parsed.host}" if parsed else owner


def is_alive(owner: str, *, lease_age_ms: int) -> bool:
    """Return whether the owner can still continue its turn. `lease_age_ms` is the time since the owner's last sign of
    life."""
    if owner in open_stores:
        return True
    other = Owner.parse(owner)
    if other is None:
        return False
    here = Owner.current()
    if (other.boot, other.namespace, other.host) != (here.boot, here.namespace, here.host):
        return lease_age_ms < LEASE_MS
    if (other.pid, other.start) == (here.pid, here.start):
        return False  # a closed store of this process
    if here.start:
        return _start_of(other.pid) == other.start
    return _exists(other.pid)


def _start_of(pid: int) -> str | None:
    """Return the start time of a process. Return None if the process has ended or there is no /proc."""
    stat = _read(f"/proc/{pid}/stat")
    # The process's name, in parentheses, may contain any character. The 20th field after it is the start time.
    rest = stat.rpartition(")")[2].split()
    return rest[19] if len(rest) > 19 and rest[0] not in "ZX" else None


def _exists(pid: int) -> bool:
    if os.name == "nt":  # on Windows, signal 0 would act like Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

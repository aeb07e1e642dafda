"""Who runs a turn, so that it can be told whether they still live.

Strategy: an owner is a store opened by a process: pid, its start time, boot, pid namespace and host, and a token for
the store itself. Where the pid can be looked up (same boot, same namespace, same host), it lives as long as a process
with this pid and start time does; in this very process, as long as that store is open. Elsewhere only the lease can
tell: older than a minute is dead. Without /proc, start times are unknown and a living pid counts as the owner.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

__all__ = ["LEASE_MS", "Owner", "dead_twin", "enlist", "is_alive", "readable", "retire"]

LEASE_MS = 60_000
"""How long an owner whose process cannot be looked up is believed to live after its last sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A store opened by a process. `start` is in the kernel's ticks since boot; unknown parts are empty."""

    pid: int
    start: str
    boot: str
    namespace: str
    host: str
    token: str

    @classmethod
    def current(cls) -> Owner:
        """This process, with a token of its own."""
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
        """The owner that `str` gave as `text`; None if it is something else."""
        try:
            values = json.loads(text)
            owner = cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None
        return owner if type(owner.pid) is int and 0 < owner.pid < 2**31 else None

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


_open_stores: set[str] = set()


def enlist(owner: str) -> None:
    """`owner` is a store open in this process from now on."""
    _open_stores.add(owner)


def retire(owner: str) -> None:
    """That store is closed."""
    _open_stores.discard(owner)


def dead_twin(owner: str) -> str:
    """An owner of the same process that is a store no longer open: who ran a turn that nobody runs any more."""
    parsed = Owner.parse(owner)
    return str(replace(parsed, token="")) if parsed else ""


def readable(owner: str) -> str:
    """`owner` for a person: `process 1234 on HOST`."""
    parsed = Owner.parse(owner)
    return f"process {parsed.pid} on {parsed.host}" if parsed else owner


def is_alive(owner: str, *, lease_age_ms: int) -> bool:
    """Whether the store that wrote `owner` can still go on; `lease_age_ms` is the time since its last sign."""
    if owner in _open_stores:
        return True
    other = Owner.parse(owner)
    if other is None:
        return False
    here = Owner.current()
    if replace(other, token="", pid=0, start="") != replace(here, token="", pid=0, start=""):
        return lease_age_ms < LEASE_MS
    if (other.pid, other.start) == (here.pid, here.start):
        return False  # this process, but a store that is closed: what it ran cannot go on
    if here.start:
        return _start_of(other.pid) == other.start
    return _exists(other.pid)


def _start_of(pid: int) -> str | None:
    """When the process started; None if there is none, or no /proc."""
    stat = _read(f"/proc/{pid}/stat")
    # The name, in parentheses, may hold anything; the 20th field after it is the start time.
    rest = stat.rpartition(")")[2].split()
    return rest[19] if len(rest) > 19 and rest[0] not in "ZX" else None


def _exists(pid: int) -> bool:
    if os.name == "nt":  # signal 0 would reach the process there, as if somebody had pressed Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
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

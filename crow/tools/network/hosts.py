"""Hosts as commands name them, and the rules about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from crow.domain.errors import ArgumentError
from crow.tools.network.registries import DEFAULT_REGISTRIES
from crow.tools.urls import is_address, normalize_url

PORTS = (80, 443)
"""The ports that a rule without a port covers."""
REGISTRIES = "registries"
"""The word in a rule that stands for the usual registries of all tools in `DEFAULT_REGISTRIES`."""
_MAX_CHARS = 300

_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,254})(?::([0-9]{1,5}))?", re.ASCII)
_PATTERN = re.compile(r"(\*\.)?(\[[^\]]*\]|(?:[A-Za-z0-9_.-]|[^\x00-\x7f])+|\*)(?::(\*|[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host in normal form, with a port."""

    name: str
    """In lower case, without a final dot, and in ASCII. An IPv6 address has no brackets."""
    port: int

    def __str__(self) -> str:
        place = f"[{self.name}]" if ":" in self.name else self.name
        return place if self.port in PORTS else f"{place}:{self.port}"

    @property
    def is_address(self) -> bool:
        """Whether this is an IP address instead of a name."""
        return is_address(self.name)


def parse_host(text: str, default_port: int | None = None) -> Host:
    """Return the host that a command names in a request, such as `api.example.com:443`. Without `default_port`, the
    text must have a port.

    This is stricter than for a URL that a person writes: escapes, user names and characters outside ASCII are refused.
    All forms of an IPv4 address become the usual one.

    :raises ~crow.domain.errors.ArgumentError: the text is not a host.
    """
    found = _PLACE.fullmatch(text) if len(text) <= _MAX_CHARS else None
    port = default_port if found is None or found[2] is None else int(found[2])
    if found is None or port is None or not 0 < port <= 65_535 or found[1].endswith(".."):
        raise ArgumentError(f"{text[:_MAX_CHARS]!r} is not a host; expected a name such as api.example.com:443")
    try:
        name = urlsplit(normalize_url(f"http://{found[1]}:{port}/")).hostname or ""
    except (ArgumentError, ValueError):
        raise ArgumentError(f"{text!r} is not a host; expected a name such as api.example.com:443") from None
    return Host(name, port)


def covers_host(pattern: str, host: str) -> bool:
    """Return whether the pattern of a rule covers a host. `host` has the form of `str(Host)`.

    `a.example` is this host alone, `*.a.example` all hosts below it, `*` all hosts, and `registries` the usual
    registries. `:*` covers all ports. A pattern without a port covers the ports 80 and 443. A pattern with one of these
    two ports also covers the other, because `str(Host)` leaves out both. A pattern of any other form covers nothing.

    :raises ~crow.domain.errors.ArgumentError: `host` is not a host.
    """
    asked = parse_host(host, PORTS[0])
    if pattern == REGISTRIES:
        return asked.port in PORTS and asked.name in _REGISTRY_HOSTS
    found = _parse_pattern(pattern)
    if found is None or (found.ports is not None and asked.port not in found.ports):
        return False
    if found.name == "*":
        return True
    if found.is_below:
        return not asked.is_address and asked.name.endswith(f".{found.name}")
    return asked.name == found.name


def is_host_pattern(pattern: str) -> bool:
    """Return whether the pattern of a rule can cover a host at all."""
    return _parse_pattern(pattern) is not None


def names_host(pattern: str, host: str) -> bool:
    """Return whether the pattern of a rule names exactly this host, without a wildcard."""
    return "*" not in pattern.partition(":")[0] and pattern != REGISTRIES and covers_host(pattern, host)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The pattern of a rule, except `registries`."""

    name: str
    """As in `Host`, or `*` for all hosts."""
    is_below: bool
    """Whether the pattern covers the hosts below `name` instead of `name`."""
    ports: tuple[int, ...] | None
    """The covered ports, or None for all ports."""


def _parse_pattern(pattern: str) -> _Pattern | None:
    """Return the parts of a pattern, or None if it can cover no host."""
    found = _PATTERN.fullmatch(pattern.strip())
    if found is None:
        return None
    below, place, port = found.groups()
    number = PORTS[0] if port in (None, "*") else int(port)
    ports = None if port == "*" else PORTS if number in PORTS else (number,)
    if place == "*":
        return None if below or not 0 < number <= 65_535 else _Pattern("*", False, ports)
    try:
        name = parse_host(_ascii(place), number).name
    except ArgumentError:
        return None
    return None if below and is_address(name) else _Pattern(name, bool(below), ports)


def _ascii(place: str) -> str:
    """Return the host of a rule in ASCII, because people also write names with other letters. If the host cannot be
    converted, return it as it is."""
    if place.isascii():
        return place
    try:
        return urlsplit(normalize_url(f"http://{place}/")).hostname or place
    except (ArgumentError, ValueError):
        return place


_REGISTRY_HOSTS = frozenset(host for hosts in DEFAULT_REGISTRIES.values() for host in hosts)

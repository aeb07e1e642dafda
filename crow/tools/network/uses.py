"""Finds out what a request of a command does at a host where crow adds the user's credential. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from crow.domain.errors import ArgumentError
from crow.domain.text import shorten
from crow.tools.network.hosts import Host
from crow.tools.urls import normalize_url

_READING = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PROPFIND", b"REPORT"))
_FETCH, _PUSH = "/git-upload-pack", "/git-receive-pack"
_FETCH_TYPE = b"application/x-git-upload-pack-request"
_MAX_PATH = 2_000


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a credential by a request."""

    words: str
    """A description for the user, such as `git push to git.example.com/team/app, with your credential`."""
    place: str = ""
    """The host and path that the request may change, as rules for `network_write` name them. Empty if it only reads."""
    is_allowed: bool = False
    """The settings allow changes with this credential without a question. In plan mode, changes are refused anyway."""


def use_of(host: Host, method: bytes, target: str, headers: Sequence[tuple[bytes, bytes]]) -> Use:
    """Return what a request does. `target` is the request's path with its query.

    :raises ~crow.domain.errors.ArgumentError: different servers may understand the path in different ways.
    """
    if not {".", ".."}.isdisjoint(target.partition("?")[0].split("/")):
        raise ArgumentError("servers disagree about the dots in the path of the request")
    url = normalize_url(f"https://{host}{target}")
    path, _, query = url.removeprefix(f"https://{host}").partition("?")
    path = re.sub("/+", "/", unquote(path))
    if not path.isprintable() or len(path) > _MAX_PATH:
        raise ArgumentError(f"the path of the request has control characters, or more than {_MAX_PATH:,} characters")
    if method == b"GET" and path.endswith("/info/refs") and _PUSH[1:] in parse_qs(query).get("service", ()):
        return _push(host, path.removesuffix("/info/refs"))
    types = [value.strip().lower() for name, value in headers if name == b"content-type"]
    if method in _READING or (method == b"POST" and path.endswith(_FETCH) and types == [_FETCH_TYPE]):
        return Use(f"connect to: {host}, with your credential")
    if method == b"POST" and path.endswith(_PUSH):
        return _push(host, path.removesuffix(_PUSH))
    shown = shorten(f"https://{host}{path}{query and '?'}{query}", _MAX_PATH)
    return Use(f"{method.decode('ascii')} {shown}, with your credential", f"{host}{path}")


def _push(host: Host, path: str) -> Use:
    """Return the use of a `git push` to the repository at a path."""
    place = f"{host}{path.removesuffix('.git')}"
    return Use(f"git push to {place}, with your credential", place)

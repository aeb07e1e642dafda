"""The names of servers, tools and prompts, and the URIs of resources."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line, safe

_NAME_CHARS = 64
_PREFIX_CHARS = 30
_HASH_CHARS = 8
URI_CHARS = 2_000
_SHOWN_CHARS = 100


def prefixes(servers: Sequence[str]) -> tuple[str, ...]:
    """Return a unique prefix for each server name, in the order of `servers`. If another server already has the prefix,
    a hash of the server's name and position is added.

    No prefix contains a double underscore or ends with an underscore, so tools of different servers never get the same
    name.
    """
    taken: list[str] = []
    for place, server in enumerate(servers):
        plain = re.sub(r"_+", "_", _valid_name(server)).strip("_")[:_PREFIX_CHARS].rstrip("_")
        if not plain or plain in taken:
            plain = f"{plain or 'server'}-{_short_hash(server, str(place))}"
        taken.append(plain)
    return tuple(taken)


def unique_names(prefix: str, separator: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names under which the model or the user sees a server's tools or prompts. They are in the order of
    `names`, the server's own names, which must not contain duplicates.

    A name consists of `prefix`, `separator` and the server's own name, in which invalid characters are replaced. A hash
    is added if the result is too long, or if replacing characters made the name equal to another name.
    """
    valid = [_valid_name(name) for name in names]
    counts = Counter(valid)
    full_names = [f"{prefix}{separator}{name}" for name in valid]
    need_no_hash = [
        bool(short) and len(full) <= _NAME_CHARS and (short == name or counts[short] == 1)
        for name, short, full in zip(names, valid, full_names, strict=True)
    ]
    taken = {full for full, is_plain in zip(full_names, need_no_hash, strict=True) if is_plain}
    unique = []
    for original, full, is_plain in zip(names, full_names, need_no_hash, strict=True):
        salt, name = 0, full
        # a tool's own name may be the same as a name made with a hash
        while not is_plain and (name in taken or name == full):
            digest = _short_hash(prefix, original, *[str(salt)] * (salt > 0))
            name = f"{full[: _NAME_CHARS - _HASH_CHARS - 1]}-{digest}"
            salt += 1
        taken.add(name)
        unique.append(name)
    return tuple(unique)


def _valid_name(name: str) -> str:
    """Replace the characters in `name` that are not allowed in the tool names sent to a model."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]


def checked_uri(uri: object) -> str:
    """Return `uri`, the URI of a resource, if it is valid. :raises ~crow.domain.errors.ArgumentError: `uri` is not a
    URI, or could mislead the user."""
    if not isinstance(uri, str) or not uri:
        raise ArgumentError("the uri is missing; expected text such as file:///notes.md")
    if len(uri) > URI_CHARS:
        raise ArgumentError(f"the uri has {len(uri):,} characters; expected at most {URI_CHARS:,}")
    if safe(uri) != uri or len(uri.split()) != 1 or ":" not in uri:
        shown = on_one_line(uri[:_SHOWN_CHARS])
        raise ArgumentError(
            f"the uri is {shown}; expected a URI with a scheme and without spaces or hidden characters, such as "
            "file:///a%20b"
        )
    return uri

"""Names of external tools as the model sees them, and of prompts as the user types them: valid, unique, and the same
for the same server list.

Strategy: `server__tool`, `server:prompt`. A server's prefix holds no double underscore and does not end in one, so no
two servers can meet; what had to be bent or shortened gets a hash where it would otherwise meet another. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

__all__ = ["prefixes", "prompt_names", "tool_names"]

NAME_CHARS = 64
PREFIX_CHARS = 30
HASH_CHARS = 8


def prefixes(servers: Sequence[str]) -> tuple[str, ...]:
    """One prefix for each server name, unique, in order; two servers of one name are told apart by their place."""
    taken: list[str] = []
    for place, server in enumerate(servers):
        plain = re.sub(r"_+", "_", bent(server)).strip("_")[:PREFIX_CHARS].rstrip("_")
        if not plain or plain in taken:
            plain = f"{plain or 'server'}-{short_hash(server, str(place))}"
        taken.append(plain)
    return tuple(taken)


def tool_names(prefix: str, tools: Sequence[str]) -> tuple[str, ...]:
    """The name of each tool of a server, in order; `tools` has no name twice."""
    return _joined(prefix, "__", tools)


def prompt_names(prefix: str, prompts: Sequence[str]) -> tuple[str, ...]:
    """The name of each prompt of a server, in order; `prompts` has no name twice."""
    return _joined(prefix, ":", prompts)


def _joined(prefix: str, joint: str, given: Sequence[str]) -> tuple[str, ...]:
    plain = [bent(one) for one in given]
    alike = Counter(plain)
    wholes = [f"{prefix}{joint}{name}" for name in plain]
    is_plain = [
        bool(name) and len(whole) <= NAME_CHARS and (name == one or alike[name] == 1)
        for one, name, whole in zip(given, plain, wholes, strict=True)
    ]
    taken = {whole for whole, stays in zip(wholes, is_plain, strict=True) if stays}
    names = []
    for one, whole, stays in zip(given, wholes, is_plain, strict=True):
        salt, name = 0, whole
        while not stays and (name in taken or name == whole):  # one may be named as another's hash would name it
            name = f"{whole[: NAME_CHARS - HASH_CHARS - 1]}-{short_hash(prefix, one, *[str(salt)] * (salt > 0))}"
            salt += 1
        taken.add(name)
        names.append(name)
    return tuple(names)


def bent(name: str) -> str:
    """`name` with only the characters that a model's tool name may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:HASH_CHARS]

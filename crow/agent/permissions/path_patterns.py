"""Globs of paths in permission rules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from unicodedata import normalize


def is_absolute(pattern: str) -> bool:
    """Return whether a glob of paths is absolute or begins with `~`, so that it can match paths outside the
    workspace."""
    return os.path.isabs(os.path.expanduser(pattern))


def names_path(pattern: str, paths: Iterable[str], *, ignore_case: bool = False) -> bool:
    """Return whether a glob matches one of `paths`, which are names of one file. `path_matcher` explains globs."""
    matcher = path_matcher(pattern, ignore_case=ignore_case)
    return any(matcher.fullmatch(normalize("NFC", path)) for path in paths)


_GLOB = re.compile(r"\*\*/|\*\*|\*|\?|[^*?]+")
_HERE = re.compile(r"^(?:\./+)+")
_GLOB_MEANINGS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@lru_cache(maxsize=256)
def path_matcher(pattern: str, *, ignore_case: bool) -> re.Pattern[str]:
    """Convert a glob of paths to a regular expression.

    A pattern without a slash matches names in any directory. `**` matches across directories. A pattern that ends with
    a slash matches everything below that directory. A pattern that begins with `./` matches only paths relative to cwd.
    Deny rules ignore case, because some file systems do. Unicode text is compared in its composed form (NFC).
    """
    pattern = normalize("NFC", os.path.expanduser(pattern))
    if pattern.endswith("/"):
        pattern += "**"
    is_anchored = pattern.startswith("./")
    pattern = _HERE.sub("", pattern)
    source = "".join(_GLOB_MEANINGS.get(part) or re.escape(part) for part in _GLOB.findall(pattern))
    anywhere = "(?!/)" if is_anchored else "" if "/" in pattern else "(?:.*/)?"
    return re.compile(anywhere + source, re.DOTALL | (re.IGNORECASE if ignore_case else 0))

"""Reads the front matter of skills, agents and commands: YAML between two `---` lines at the top of a file.

Each key is read as YAML by itself, so an invalid value does not affect other keys. A value that is not valid YAML, such
as `Use this: then that` or `[file] [line]`, is taken as plain text, because this is what its author meant.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Any

MAX_CHARS = 16 * 1024
"""Front matter with more characters is ignored."""

_YAML_CHARS = 4_000
"""A longer value is taken as plain text. Parsing a value of at most this many characters takes at most 20 ms, whatever
the value contains."""

_KEY = re.compile(r"""(["']?)([A-Za-z][\w.-]*)\1[ \t]*:(?=\s|$)""")
_BLOCK_MARK = re.compile(r"\s*[|>][-+0-9]*[ \t]*(?=[\r\n])")


def front_matter(text: str, wanted: Collection[str]) -> tuple[dict[str, str], int]:
    """Return the values of the `wanted` keys, and the index where the text after the front matter begins. Without front
    matter, there are no values and the index is 0.

    If a value is a YAML scalar, its text is returned, without quotes and comments. Any other value, such as a list, is
    returned as it is written in the file, but on one line.
    """
    start = 1 if text.startswith("\ufeff") else 0
    lines = text[start : start + MAX_CHARS].splitlines(keepends=True)
    ends = (number for number, line in enumerate(lines) if number and line.rstrip() == "---")
    end = next(ends, None) if lines and lines[0].rstrip() == "---" else None
    if end is None:
        return {}, 0
    blocks: dict[str, list[str]] = {}
    block: list[str] = []
    for line in lines[1:end]:
        key = _KEY.match(line)
        if key is not None:
            block = blocks[key[2]] = []
        block.append(line)
    values = {key: _value("".join(blocks[key])) for key in wanted if key in blocks}
    return values, start + sum(map(len, lines[: end + 1]))


def _value(block: str) -> str:
    """Return the value in a block, which has the lines of one key, as text. Tags, numbers and dates are not
    interpreted."""
    import yaml  # importing it takes 15 ms, and most workspaces have no skills or commands

    if len(block) <= _YAML_CHARS:
        try:
            ((_, value),) = yaml.compose(block, Loader=_loader()).value
            if isinstance(value, yaml.ScalarNode):
                return str(value.value).strip()
        except (yaml.YAMLError, RecursionError, AttributeError, TypeError, ValueError):
            pass
    text = block[block.index(":") + 1 :]
    mark = _BLOCK_MARK.match(text)
    return " ".join(text[mark.end() if mark else 0 :].split())


@cache
def _loader() -> Any:
    import yaml

    class BlocksOnly(yaml.BaseLoader):  # type: ignore[misc]
        """Refuses `[` and `{`, which take quadratic time if nested."""

        def fetch_flow_collection_start(self, _: object) -> None:
            raise yaml.scanner.ScannerError

    return BlocksOnly

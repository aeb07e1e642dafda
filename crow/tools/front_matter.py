"""The front matter of skills and commands: YAML between two `---` lines at the top of a file.

Each key is read as YAML by itself, so that a value that is no YAML (`Use this: then that`, `[file] [line]`) is taken as
the plain text that its author meant, and costs no other key.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Any

__all__ = ["front_matter"]

MOST_CHARS = 16 * 1024
"""Front matter that is longer is none."""

YAML_CHARS = 4_000
"""A longer value is taken as plain text: so much takes 20 ms at most, whatever it holds."""

_KEY = re.compile(r"""(["']?)([A-Za-z][\w.-]*)\1[ \t]*:(?=\s|$)""")
_BLOCK_MARK = re.compile(r"\s*[|>][-+0-9]*[ \t]*(?=[\r\n])")


def front_matter(text: str, wanted: Collection[str]) -> tuple[dict[str, str], int]:
    """The values of the `wanted` keys that are there, and where the text behind the front matter begins; no keys and 0
    without front matter.

    Blocks are folded, quotes and comments are gone; what is no text in YAML, such as a list, is given as it stands.
    """
    start = 1 if text.startswith("\ufeff") else 0
    lines = text[start : start + MOST_CHARS].splitlines(keepends=True)
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
    """The value of one key: text, whatever it looks like. Nothing is made of tags, numbers or dates."""
    import yaml  # 15 ms, for those alone who have such files

    if len(block) <= YAML_CHARS:
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
        """Refuses `[` and `{`, which cost quadratic time when nested."""

        def fetch_flow_collection_start(self, _: object) -> None:
            raise yaml.scanner.ScannerError

    return BlocksOnly

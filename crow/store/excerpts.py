"""Makes an excerpt of a long tool result from the beginning and the end of its text, without the rest of it.

After a year, a session may have hundreds of megabytes of tool output. A client that opens the session shows only the
beginning and the end of each output. The sha256 of an output is checked only when the whole output is read.
"""

from __future__ import annotations

import re

from crow.domain.rendering import EXCERPT_SLACK_BYTES, excerpt

SHARED_TEXT = re.compile(rb'"text":\{"blob":"([0-9a-f]{64})"\}')
"""Finds the hash of the blob that holds the text of a result."""


def text_blob_of(body: bytes) -> str | None:
    """Return the hash of the blob that holds the text of a result with this JSON. Return None if the JSON has the text
    itself, or if another member of the result, such as an attachment, is in the same blob."""
    found = SHARED_TEXT.search(body)
    return found[1].decode() if found and body.count(found[1]) == 1 else None


def bytes_per_end(most_bytes: int) -> int:
    """Return how many bytes of each of the two ends of a text are in an excerpt of about `most_bytes` bytes."""
    return max(1, most_bytes // 2)


def longest_whole(most_bytes: int) -> int:
    """Return the largest size in bytes of a text that is read whole, because an excerpt would not be much shorter."""
    return 2 * bytes_per_end(most_bytes) + EXCERPT_SLACK_BYTES


def excerpt_of_ends(head: bytes, tail: bytes, size: int, call_id: str) -> bytes:
    """Return an excerpt of a text with `size` bytes, as UTF-8. `head` and `tail` are its first and its last bytes."""
    omitted = size - len(head) - len(tail)
    return excerpt(head.decode(errors="ignore"), tail.decode(errors="ignore"), omitted, call_id).encode()

"""What a user asks of `/compact`: a size, how much to keep, and a focus."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from crow.agent.compaction.budget import CompactionPolicy, Limits, Measure
from crow.agent.compaction.window import MIN_ROOM
from crow.domain.errors import ArgumentError
from crow.domain.text import quote

_NUMBER = re.compile(r"([0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]{1,9})([kK]?)")
_KEEP = "--keep"
_USAGE = (
    "`/compact 3000` leaves at most 3,000 tokens of conversation; `/compact --keep 3000` keeps the newest 3,000 tokens "
    "word for word. Words after them say what the summary should focus on."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionWish:
    """What the user asks of one compaction."""

    size: int | None = None
    """After the compaction, the conversation may take at most this many tokens: everything that the model sees except
    the system message and the tools. If None, the settings decide."""
    keep: int | None = None
    """At most this many tokens of the newest messages stay word for word. If None, the settings decide."""
    focus: str = ""
    """What the summary should favour, in the user's words. May be empty."""

    @classmethod
    def parse(cls, argument: str) -> CompactionWish:
        """Return the wish in the argument of `/compact`: `[TOKENS] [--keep TOKENS] [FOCUS]`.

        :raises ArgumentError: a number of tokens is missing, or both numbers contradict each other.
        """
        words = argument.split()
        size = keep = None
        if words and _NUMBER.fullmatch(words[0]):
            size = _tokens_in(words.pop(0))
        if words and (words[0] == _KEEP or words[0].startswith(f"{_KEEP}=")):
            given = words.pop(0).removeprefix(_KEEP).removeprefix("=") or (words.pop(0) if words else "")
            if not _NUMBER.fullmatch(given):
                raise ArgumentError(f"`{_KEEP}` is {quote(given)}; expected a number of tokens. {_USAGE}")
            keep = _tokens_in(given)
        elif words and words[0].startswith("--"):
            raise ArgumentError(f"`/compact` has no option {quote(words[0])}. {_USAGE}")
        if size is not None and keep is not None and keep >= size:
            raise ArgumentError(
                f"`{_KEEP}` is {keep:,} tokens, but the whole conversation may take only {size:,}. Keep fewer tokens."
            )
        return cls(size=size, keep=keep, focus=" ".join(words))

    def applied_to(self, limits: Limits, settings: CompactionPolicy) -> Limits:
        """Return the limits for a compaction with this wish.

        :raises ArgumentError: the size leaves too little room, or the window cannot hold what is to be kept.
        """
        if self.size is not None:
            limits = _within(limits, self.size, settings)
        if self.keep is None:
            return limits
        beside = limits.summary + limits.pins + limits.lists + limits.skills
        most = limits.room * 19 // 20 - beside
        if self.keep > max(0, most):
            whole = "conversation" if self.size is not None else "window"
            raise ArgumentError(
                f"`{_KEEP}` is {self.keep:,} tokens; beside a summary, at most {max(0, most):,} tokens fit the {whole}."
            )
        target = max(limits.target, limits.fixed + self.keep + beside)
        files = min(limits.files, max(0, limits.threshold - limits.room // 20 - target))
        return replace(limits, keep=self.keep, target=target, files=files, is_keep_chosen=True)

    def why_not(self, measured: Measure) -> str:
        """Explain why the wish changes nothing. Return an empty string if the wish is not the reason."""
        takes = f"the conversation takes about {measured.used - measured.fixed:,} tokens"
        if self.size is not None and measured.used - measured.fixed <= self.size:
            return f"Nothing to do: {takes}, and you allow {self.size:,}."
        if self.size is not None:
            return f"Not compacted: {takes}, and no summary makes it as small as {self.size:,}."
        if self.keep is not None:
            return f"Not compacted: {takes}, so there is too little to summarise before the newest {self.keep:,}."
        return ""


def _tokens_in(text: str) -> int:
    match = _NUMBER.fullmatch(text)
    assert match is not None
    return int(match[1].replace(",", "").replace("_", "")) * (1_000 if match[2] else 1)


def _within(limits: Limits, size: int, settings: CompactionPolicy) -> Limits:
    """Return limits under which no compaction leaves more than `size` tokens beside the fixed part.

    :raises ArgumentError: the size leaves too little room to work.
    """
    target = 0.5 if settings.target is None else settings.target
    most = max(0.8, target + 0.2)  # the shares of the room in `Limits.ceiling` and `Limits.files_ceiling`
    least = -(-int(MIN_ROOM * most) // 100) * 100
    if size < least:
        raise ArgumentError(
            f"{size:,} tokens are too few for a conversation; expected at least {least:,}. If the number belongs to "
            f"the focus, put a word before it. {_USAGE}"
        )
    room = min(limits.room, int(size / most))
    return replace(
        limits,
        threshold=limits.fixed + min(limits.room, size),
        room=room,
        target=limits.fixed + int(room * target),
        keep=min(limits.keep, room // 5),
        pins=min(limits.pins, room // 8),
        summary=min(limits.summary, room // 10),
        lists=min(limits.lists, room // 20),
        skills=min(limits.skills, room // 16),
        files=room * 9 // 20,
        is_size_chosen=True,
    )

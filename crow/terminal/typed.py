"""The texts that the user types while a turn runs: the line in progress, and those that wait for the end of the
turn."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from rich.cells import cell_len

from crow.domain.text import on_one_line
from crow.terminal.render import cut

ENTERS = ("\r", "\n")
COMMANDS = ("/", "!")
"""How slash commands and the user's own shell commands begin."""

_ESCAPE, _SHIFT_TAB = "\x1b", "\x1b[Z"
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)", re.DOTALL)
"""The code of a key such as an arrow, or of a key with Alt."""

_PARTS = re.compile(r"[^\x00-\x1f\x7f]+|.", re.DOTALL)
"""Splits keys into runs of ordinary characters and single control characters."""

_END_CHARS = 4_000
"""Only this many characters at the end of a text are examined. No terminal shows more of a line."""
_SHOWN = 2
"""The maximum number of waiting texts that are shown, newest last."""


@dataclass(slots=True)
class TypedText:
    """The texts typed during a turn.

    Enter moves the line to the queue, from which each text becomes a prompt after the turn. Enter on an empty line
    takes the oldest text from the queue, to be sent into the running turn. Esc moves the newest text back to the line;
    if there is no text, it asks for the end of the turn.
    Lines that arrive together, such as pasted ones, stay together.
    """

    line: str = ""
    """The line in progress. It may contain line ends."""
    queue: list[str] = field(default_factory=list)
    """The texts that wait for the end of the turn, oldest first."""
    is_stop_asked: bool = False
    """Whether the last key was Esc while nothing was typed or queued."""
    is_mode_asked: bool = False
    """Whether the last key was Shift-Tab."""
    _decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), repr=False
    )

    def feed(self, data: bytes) -> tuple[str, ...]:
        """Take the bytes of typed keys. Return the texts to send into the running turn."""
        text = self._decode.decode(data)
        self.is_stop_asked = text == _ESCAPE and not (self.line or self.queue)
        self.is_mode_asked = text == _SHIFT_TAB
        if text == _ESCAPE:
            self.take_back()
            return ()
        text = _SEQUENCE.sub("", text)
        is_entered = text.endswith(ENTERS)
        for part in _PARTS.findall((text[:-1] if is_entered else text).replace("\r\n", "\n")):
            self._type(part)
        return self._enter() if is_entered else ()

    def feed_lines(self, data: bytes) -> tuple[str, ...]:
        """Take whole lines from a terminal that edits lines itself. A line with Esc alone takes a text back."""
        lines = data.decode("utf-8", "replace").splitlines() or [""]
        self.is_stop_asked = lines == [_ESCAPE] and not self.queue
        if lines == [_ESCAPE]:
            self.take_back()
            self.line = ""
            return ()
        self.line = "\n".join(lines).replace(_ESCAPE, "")
        return self._enter()

    def take_back(self) -> None:
        """Put the newest waiting text before the line. If no text is waiting, clear the line."""
        if self.queue:
            self.line = "\n".join(filter(None, [self.queue.pop(), self.line]))
        else:
            self.line = ""

    def take_all(self) -> str:
        """Remove all texts, and return them as one."""
        texts = [*self.queue, self.line]
        self.queue.clear()
        self.line = ""
        return "\n".join(filter(None, texts))

    def shown(self, columns: int) -> list[str]:
        """Return the lines to show below the answer, each cut to `columns` columns. Return none if there is no text."""
        if not self.line and not self.queue:
            return []
        hidden = max(0, len(self.queue) - _SHOWN)
        lines = [f"… {hidden} more queued"] if hidden else []
        lines += [f"queued: {_end_of(text, columns - 8)}" for text in self.queue[hidden:]]
        lines.append(f"> {_end_of(self.line, columns - 3)}▏")
        return [cut(line, columns) for line in (*lines, self.hint())]

    def hint(self) -> str:
        """Return a line that says what the keys do now."""
        if self.line:
            return "Enter queues this for after the turn" + (" · Esc takes back" if self.queue else " · Esc clears it")
        if self.queue and self.queue[0].startswith(COMMANDS):
            return "sent after the turn · Esc takes it back"  # a running turn takes no commands
        return "sent after the turn · Enter sends it into this turn · Esc takes it back"

    def _enter(self) -> tuple[str, ...]:
        text, self.line = self.line, ""
        if text.strip():
            self.queue.append(text)
            return ()
        if self.queue and not self.queue[0].startswith(COMMANDS):
            return (self.queue.pop(0),)
        return ()

    def _type(self, part: str) -> None:
        match part:
            case "\x7f" | "\b":
                self.line = self.line[:-1]
            case "\x15":  # Ctrl-U
                self.line = ""
            case "\x17":  # Ctrl-W
                self.line = self.line.rstrip()[: -len(self.line.split()[-1])] if self.line.split() else ""
            case "\r" | "\n":
                self.line += "\n"
            case "\t":
                self.line += " "
            case _:
                self.line += "".join(filter(str.isprintable, part))


def _end_of(text: str, columns: int) -> str:
    """Return a text on one line, or only its end if the line would take more than `columns` columns."""
    line = on_one_line(text[-_END_CHARS:])
    if cell_len(line) <= columns:
        return line
    while line and cell_len(line) >= columns:
        line = line[max(1, (cell_len(line) - columns) // 2) :]
    return f"…{line}"

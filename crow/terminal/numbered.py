"""Permission requests as `crow run` asks them at the terminal: with numbered options, and without styles."""

from __future__ import annotations

from dataclasses import dataclass

from crow.domain.diff import diff_text
from crow.domain.text import safe
from crow.terminal.connection import Params

NUMBERED_LINES = 60
"""The maximum number of lines of a call that a question shows. If a call has more lines, the question offers only the
options for this one call."""


@dataclass(frozen=True, slots=True)
class Question:
    """A permission request as it is shown at the terminal."""

    text: str
    """The request, with numbered options."""
    option_ids: tuple[str, ...]
    """The ids of the options, in the order of their numbers in `text`."""
    yes: str
    """The id of the option that y stands for."""
    no: str
    """The id of the option that n stands for."""

    def option_for(self, answer: str) -> str:
        """Return the id of the option for this answer, which may be a number, y or yes. Any other answer means no."""
        numbers = [str(number) for number in range(1, len(self.option_ids) + 1)]
        if answer in numbers:
            return self.option_ids[numbers.index(answer)]
        return self.yes if answer in ("y", "yes") else self.no


def numbered_question(params: Params) -> Question:
    """Return the question for a `session/request_permission`. It shows what would run or change, and then the options.

    If some lines of the call are not shown, only options that apply to this one call are offered.
    """
    call, options = params["toolCall"], params["options"]
    lines = [f"Allow this? {call['title']}"]
    for part in call.get("content") or ():
        match part:
            case {"type": "content", "content": {"type": "text", "text": str(text)}}:
                lines += text.splitlines()
            case {"type": "diff", "path": str(path), "newText": str(new)}:
                lines += [path, *diff_text(part.get("oldText") or "", new).splitlines()]
    if len(lines) > NUMBERED_LINES:
        lines[NUMBERED_LINES:] = [f"... ({len(lines) - NUMBERED_LINES} more lines)"]
        options = [option for option in options if option["kind"].endswith("_once")]
    lines += [f"{number}) {option['name']}" for number, option in enumerate(options, 1)]
    first = {option["kind"]: option["optionId"] for option in reversed(options)}
    return Question(
        "".join(f"{safe(line)}\n" for line in lines) + "Number, or y / n: ",
        tuple(option["optionId"] for option in options),
        first["allow_once"],
        first["reject_once"],
    )

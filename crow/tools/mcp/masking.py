"""Masks secrets in what the tools of a session return."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crow import tools
from crow.domain.entries import Announcement
from crow.domain.messages import Part, Resource, Text
from crow.domain.rendering import SecretMask
from crow.tools.truncate import END_OF_MARKER

_MARKER = re.compile(rf"\[\.\.\. [\d,]+{re.escape(END_OF_MARKER)}")
"""Matches the line that stands in front of output whose beginning is left out."""


def masked_plan(plan: tools.PlannedCall, mask: SecretMask) -> tools.PlannedCall:
    """Return the plan, with secrets masked in the diffs of its announcement, its error message, its review text and the
    definition of its tool."""
    return replace(
        plan,
        announcement=_masked_announcement(plan.announcement, mask),
        fault=None if plan.fault is None else mask(plan.fault),
        review_text=mask(plan.review_text),
        coverage=replace(plan.coverage, definition=mask(plan.coverage.definition)),
    )


def masked_outcome(outcome: tools.Outcome, mask: SecretMask) -> tools.Outcome:
    """Return the outcome, with secrets masked. Images and other binary data are not changed."""
    announcement, skill = outcome.announcement, outcome.skill
    return replace(
        outcome,
        text=mask(outcome.text),
        attachments=tuple(
            replace(each, name=mask(each.name), uri=None if each.uri is None else mask(each.uri))
            for each in outcome.attachments
        ),
        announcement=None if announcement is None else _masked_announcement(announcement, mask),
        raw_output={mask(key): _masked_json(value, mask) for key, value in outcome.raw_output.items()},
        skill=None if skill is None else (skill[0], mask(skill[1])),
    )


def _masked_announcement(announcement: Announcement, mask: SecretMask) -> Announcement:
    """Mask the texts of files. The rest comes from the call's arguments, which the model has written."""
    diffs = tuple(
        replace(diff, old_text=None if diff.old_text is None else mask(diff.old_text), new_text=mask(diff.new_text))
        for diff in announcement.diffs
    )
    return replace(announcement, diffs=diffs)


def masked_output(text: str, mask: SecretMask) -> str:
    """Return the output so far, with secrets masked. If the output begins with the end of a secret that was cut off,
    this end is masked too. If the output ends with what may be the beginning of a secret, that text is left out until
    more output arrives."""
    marker = match[0] if (match := _MARKER.match(text)) else ""
    text = mask(text[len(marker) :])
    if start := mask.cut_off(text):
        text = mask.mask + text[start:]
    return marker + text[: len(text) - mask.unfinished(text)]


def _masked_json(value: Any, mask: SecretMask) -> Any:
    match value:
        case str():
            return mask(value)
        case list() | tuple():
            return [_masked_json(item, mask) for item in value]
        case Mapping():
            return {mask(key): _masked_json(item, mask) for key, item in value.items()}
        case _:
            return value


def masked_part(part: Part, mask: SecretMask) -> Part:
    """Return the part of a prompt, with secrets in its text masked."""
    match part:
        case Text(text=text):
            return replace(part, text=mask(text))
        case Resource(text=str(text)):
            return replace(part, text=mask(text))
        case _:
            return part

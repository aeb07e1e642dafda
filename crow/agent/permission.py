"""Whether a call may run: one pure policy over mode, rules and what the call touches.

Strategy: refusals first (a deny rule, plan mode), then what is free, then rules that the user gave with "always",
then what the mode allows; whatever is left is asked. Everything outside the workspace is asked in every mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from crow.domain.messages import JsonObject
from crow.tools import Offer

__all__ = [
    "MODES",
    "Allow",
    "Ask",
    "Decision",
    "Mode",
    "Refuse",
    "Rule",
    "decide",
    "rule_for",
    "rule_from",
    "rule_words",
]

Mode: TypeAlias = Literal["ask", "accept-edits", "plan", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An "always" answer. `argument` None covers every call of the tool."""

    tool: str
    argument: str | None
    allow: bool

    def as_json(self) -> JsonObject:
        """As it is kept in the session's row."""
        return {"tool": self.tool, "argument": self.argument, "allow": self.allow}

    def covers(self, name: str, offer: Offer) -> bool:
        """Whether the rule is about this call."""
        return self.tool == name and (self.argument is None or self.argument == offer.argument)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """It runs; `why` is stored with it."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The user decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """It does not run; `words` tell the model why."""

    words: str


Decision: TypeAlias = Allow | Ask | Refuse


def decide(name: str, offer: Offer, mode: str, rules: Sequence[Rule]) -> Decision:
    """The decision for a call of tool `name`; an unknown mode is as strict as `ask`."""
    covering = [rule for rule in rules if rule.covers(name, offer)]
    if any(not rule.allow for rule in covering):
        return Refuse(words=f"The user has forbidden {name} for this session. Do it another way, or ask them.")
    if mode == "plan" and offer.access in ("write", "execute", "fetch", "external"):
        return Refuse(
            words=f"{name} is not available in plan mode: nothing may be changed or run. "
            "Read, search and write the plan; the user leaves plan mode when they agree with it."
        )
    if offer.access == "none":
        return Allow(why="touches only the session")
    if offer.outside:
        return Ask()
    if offer.access == "read":
        return Allow(why="reads inside the workspace are free")
    if covering:
        return Allow(why="always allowed by the user in this session")
    if mode == "auto":
        return Allow(why="mode auto")
    if mode == "accept-edits" and offer.access == "write":
        return Allow(why="mode accept-edits")
    return Ask()


def rule_for(name: str, offer: Offer, *, allow: bool) -> Rule:
    """The rule that an "always" answer about this call makes."""
    return Rule(tool=name, argument=offer.argument, allow=allow)


def rule_words(rule: Rule) -> str:
    """What the rule covers, for the option the user picks."""
    if rule.argument is None:
        return f"every {rule.tool} call in this session"
    line = " ".join(rule.argument.split())
    return f"`{line if len(line) <= 60 else line[:57] + '...'}` in this session"


def rule_from(value: JsonObject) -> Rule | None:
    """Read a rule back from the row; None for anything that is not one."""
    tool, argument, allow = value.get("tool"), value.get("argument"), value.get("allow")
    if isinstance(tool, str) and isinstance(allow, bool) and (argument is None or isinstance(argument, str)):
        return Rule(tool=tool, argument=argument, allow=allow)
    return None

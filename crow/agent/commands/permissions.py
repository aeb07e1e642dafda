"""`/permissions`: the rules that hold in this session, seen, added and taken back by whoever types.

Strategy: what is typed is a rule of the session like an "always" answer, stored with it and taken along by no fork,
export or import. Rules of config.toml are shown, and changed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from crow.agent.commands import CommandContext, Handler
from crow.agent.permissions import Rule, rule_text, rules_in, typed_rule
from crow.domain.errors import ArgumentError
from crow.store import SessionChanges

__all__ = ["PERMISSION_COMMANDS"]

USAGE = (
    "Type `/permissions` to see the rules, `/permissions allow RULE`, `/permissions deny RULE`, or "
    "`/permissions forget NUMBER`; a rule is such as `write_file`, `shell(git status)` or `edit_file(docs/**)`."
)


async def permissions(desk: CommandContext, argument: str) -> str:
    verb, _, rest = argument.partition(" ")
    rest = rest.strip()
    if not argument:
        return shown(desk)
    if verb in ("allow", "deny") and rest:
        return await add(desk, typed_rule(rest, allow=verb == "allow"))
    if verb == "forget" and rest:
        return await forget(desk, rest)
    raise ArgumentError(USAGE)


def shown(desk: CommandContext) -> str:
    """Mode and rules, those of the session numbered."""
    lines = [f"The mode is `{desk.branch.row.mode}`. A denial wins over everything else."]
    if desk.rules:
        lines += ["", "Rules of config.toml:", *(f"- {verb_of(rule)} {rule_text(rule)}" for rule in desk.rules)]
    rules = rules_in(desk.branch.row.permissions)
    if rules:
        lines += ["", "Rules of this session:"]
        lines += [f"{number}. {verb_of(rule)} {rule_text(rule)}" for number, rule in enumerate(rules, 1)]
    return "\n".join([*lines, "", USAGE])


async def add(desk: CommandContext, rule: Rule) -> str:
    rules = rules_in(desk.branch.row.permissions)
    if rule in rules:
        return f"There is such a rule already: {rules.index(rule) + 1}. {verb_of(rule)} {rule_text(rule)}"
    unknown = await unknown_words(desk, rule.tool)
    await keep(desk, (*rules, rule))
    done = f"From now on in this session: {verb_of(rule)} {rule_text(rule)}."
    if rule.allow and rule.argument is None:
        done += " Paths outside the workspace and protected ones, such as `.git` and AGENTS.md, still ask."
    return f"{done}{unknown} `/permissions forget {len(rules) + 1}` takes it back."


async def forget(desk: CommandContext, number: str) -> str:
    rules = list(rules_in(desk.branch.row.permissions))
    if number == "all" and rules:
        await keep(desk, ())
        return f"Forgotten: {len(rules)} rule{'s' * (len(rules) != 1)} of this session."
    if not number.isdecimal() or not 1 <= int(number) <= len(rules):
        there = f"a number from 1 to {len(rules)}, or all" if rules else "nothing, as this session has no rules"
        raise ArgumentError(f"There is no rule `{number}` of this session; expected {there}.")
    rule = rules.pop(int(number) - 1)
    await keep(desk, rules)
    return f"Forgotten: {verb_of(rule)} {rule_text(rule)}."


async def unknown_words(desk: CommandContext, tool: str) -> str:
    """What is to be said of a rule that covers no tool that is there now.

    :raises ~crow.domain.errors.ArgumentError: it can cover none that may come, either.
    """
    names = [spec.name for spec in (await desk.toolbox()).specs()]
    if any(fnmatchcase(name, tool) for name in names):
        return ""
    if "__" in tool or "*" in tool or "?" in tool or tool == "skill":  # of a server that is not there yet
        return " No tool that is there now has such a name."
    raise ArgumentError(f"There is no tool `{tool}`; there are {', '.join(f'`{name}`' for name in names)}.")


async def keep(desk: CommandContext, rules: Sequence[Rule]) -> None:
    await desk.branch.change(SessionChanges(permissions=tuple(rule.as_json() for rule in rules)))


def verb_of(rule: Rule) -> str:
    return "allow" if rule.allow else "deny"


PERMISSION_COMMANDS: Mapping[str, Handler] = {"permissions": permissions}

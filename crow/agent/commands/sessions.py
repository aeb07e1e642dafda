"""Commands that fork or archive a session, or change its title, tags, model, mode and permission rules."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

import anyio.to_thread

from crow.agent import new_session_id
from crow.agent.commands.branches import Place, find_place
from crow.agent.commands.context import CommandContext
from crow.agent.history.options import option_changes, options_at, usable_options
from crow.agent.permissions.decisions import may_attach
from crow.agent.permissions.rules import (
    MODES,
    PermissionRule,
    current_rules,
    rule_from,
    rule_text,
    rules_in,
    scope_text,
    typed_rule,
)
from crow.agent.workspace import describe_sandbox, describe_workspace, inspect_workspace
from crow.domain.errors import ArgumentError
from crow.domain.events import SessionChange, SessionListChanged, TitleChanged
from crow.domain.rendering import code
from crow.domain.text import is_number, plural, quote, safe
from crow.export.links import DEFAULT_AGE, PageLink
from crow.store import SessionChanges
from crow.store.codec import new_tag, tag_name, tags_of, tags_patch
from crow.store.transcript import time_text

_TITLE_CHARS = 200
_MAX_CHOICES = 40
_USAGE = (
    "`/permissions` shows the rules; `/permissions allow RULE`, `/permissions deny RULE` and "
    "`/permissions forget NUMBER` change them. Examples of rules: `write_file`, `shell(git status)`, "
    "`shell(make *)`, `edit_file(docs/**)`."
)


async def fork(context: CommandContext, argument: str) -> str:
    row = context.branch.row
    place = await find_place(context, argument) if argument else Place(entry=context.branch.leaf, words="here")
    if place.entry is None:
        raise ArgumentError("There is nothing to fork: nothing comes before that place. Open a new session instead.")
    made = await context.store.fork_session(
        row.id, new_session_id(), entry=place.entry, cwd=row.cwd, additional_directories=row.additional_directories
    )
    options = await options_at(context.store, row, context.branch.leaf, place.entry)
    if usable := usable_options(options, context.models):
        await context.store.update_session(made.id, option_changes(usable))
    titled = f", {quote(made.title)}" if made.title else ""
    await context.branch.publish(SessionListChanged(session_id=made.id, change="created", title=made.title))
    return f"Forked {place.words}: `{made.id}`{titled}. Open it from the list of sessions; this one is unchanged."


async def title(context: CommandContext, argument: str) -> str:
    wanted = " ".join(argument.split())
    if not wanted:
        current = context.branch.row.title
        return f"The title is {quote(current)}. `/title WORDS` changes it." if current else "There is no title yet."
    if len(wanted) > _TITLE_CHARS:
        raise ArgumentError(f"That title has {len(wanted)} characters; expected at most {_TITLE_CHARS}.")
    await context.branch.change(SessionChanges(title=wanted, title_by_user=True))
    await context.branch.publish(TitleChanged(title=wanted))
    return f"The title is now {quote(wanted)}."


async def tag(context: CommandContext, argument: str) -> str:
    branch = context.branch
    verb, *rest = argument.split() or [""]
    names = [tag_name(text) for text in rest] if verb == "remove" else [new_tag(text) for text in argument.split()]
    if verb == "remove" and not names:
        raise ArgumentError("`/tag remove` needs a tag, such as `/tag remove draft`.")
    metadata = (await context.store.session(branch.row.id)).metadata  # another process may have changed the tags
    if verb == "remove":
        unknown = [name for name in names if name not in tags_of(metadata)]
        if unknown:
            raise ArgumentError(f"This session has no tag {code(unknown[0])}. {_describe_tags(tags_of(metadata))}")
        await branch.merge_metadata(tags_patch(metadata, remove=names))
    elif names:
        await branch.merge_metadata(tags_patch(metadata, add=names))
    else:
        usage = "`/tag NAME` adds one, `/tag remove NAME` removes one."
        return f"{_describe_tags(tags_of(metadata))} {usage}"
    return _describe_tags(tags_of(branch.row.metadata))


def _describe_tags(tags: Sequence[str]) -> str:
    return f"Tags: {', '.join(code(safe(tag)) for tag in tags)}." if tags else "This session has no tags."


async def archive(context: CommandContext, argument: str) -> str:
    row = context.branch.row
    await context.branch.change(SessionChanges(archived=not argument))
    change: SessionChange = "unarchived" if argument else "archived"
    await context.branch.publish(SessionListChanged(session_id=row.id, change=change, title=row.title))
    if argument:
        return "This session is back on the list of sessions."
    return (
        "This session is archived: lists of sessions leave it out, but nothing is removed, and you can go on here. "
        "`/archive undo` puts it back."
    )


async def model(context: CommandContext, argument: str) -> str:
    current = context.branch.row.model
    offered = tuple(dict.fromkeys(name for name in (*context.models, current) if name))
    if not argument:
        return f"The model is `{current or 'not set'}`. {_choices(offered)}"
    # the endpoint will say whether it has this model
    name = _choose("model", argument, offered) if offered else argument
    await context.set_model(name)
    return f"The model is `{name}` from the next prompt on."


async def mode(context: CommandContext, argument: str) -> str:
    if not argument:
        return f"The mode is `{context.branch.row.mode}`. {_choices(MODES)}"
    name = _choose("mode", argument, MODES)
    if name == "auto" and context.workspace.is_bounded and not (await context.workspace.sandbox_status()).name:
        raise ArgumentError("Mode auto is not available: nothing confines commands on this server.")
    await context.set_mode(name)
    return f"The mode is `{name}`."


def _choose(kind: str, argument: str, offered: Sequence[str]) -> str:
    """Return the offered name that the user typed, or the only offered name that begins with the typed text."""
    if argument in offered:
        return argument
    matches = [name for name in offered if name.lower().startswith(argument.lower())]
    if len(matches) == 1:
        return matches[0]
    raise ArgumentError(f"No {kind} `{argument}`. {_choices(matches or offered)}")


def _choices(names: Sequence[str]) -> str:
    if not names:
        return "No model is configured; set CROW_MODEL, or run `crow login`."
    more = f", and {len(names) - _MAX_CHOICES} more" if len(names) > _MAX_CHOICES else ""
    return f"Choose one of {', '.join(code(name) for name in names[:_MAX_CHOICES])}{more}."


async def permissions(context: CommandContext, argument: str) -> str:
    """Show, add or remove permission rules. Added rules and "always" answers are stored with the session. Forks,
    exports and imports do not contain them."""
    verb, _, rest = argument.partition(" ")
    rest = rest.strip()
    rules, cwd = rules_in(context.branch.row.permissions), context.branch.row.cwd
    if not argument:
        lines = [f"The mode is `{context.branch.row.mode}`. Deny rules win over everything else."]
        if context.rules:
            lines += ["", "Rules in config.toml:", *(f"- {_describe_rule(rule, cwd)}" for rule in context.rules)]
        if rules:
            lines += ["", "Rules of this session:"]
            lines += [f"{number}. {_describe_rule(rule, cwd)}" for number, rule in enumerate(rules, 1)]
        return "\n".join([*lines, *await _describe_surroundings(context), "", _USAGE])
    if verb in ("allow", "deny") and rest:
        return await _add_rule(context, rules, typed_rule(rest, allow=verb == "allow", cwd=cwd))
    if verb == "forget" and rest:
        return await _forget_rules(context, rules, rest)
    raise ArgumentError(_USAGE)


async def _describe_surroundings(context: CommandContext) -> list[str]:
    """Describe what confines commands, and what the workspace contains for agents."""
    cwd = str(context.workspace.cwd)
    rules = current_rules(context.rules, context.branch.row)
    may_read = partial(may_attach, workspace=context.workspace, rules=rules)
    contents = await anyio.to_thread.run_sync(inspect_workspace, cwd, may_read)
    is_known = await context.store.is_known_directory((cwd, str(context.workspace.resolve("."))))
    toolbox = await context.toolbox()
    status = await context.workspace.sandbox_status()
    return [
        "",
        *describe_sandbox(status),
        "",
        *describe_workspace(contents, toolbox.skills(), toolbox.agents(), is_known=is_known),
    ]


async def _add_rule(context: CommandContext, rules: Sequence[PermissionRule], rule: PermissionRule) -> str:
    if rule in rules:
        return f"This rule exists already: {rules.index(rule) + 1}. {_verb_and_text(rule)}"
    toolbox = await context.toolbox()
    names = [spec.name for spec in toolbox.specs()]
    deferred = [spec.name for spec in toolbox.deferred()]
    note = ""
    if not any(fnmatchcase(name, rule.tool) for name in (*names, *deferred)):
        # a pattern, or a name such as `server__tool`, may refer to a server that is not running yet
        if not any(sign in rule.tool for sign in ("__", "*", "?")) and rule.tool != "skill":
            raise ArgumentError(f"There is no tool `{rule.tool}`; the tools are {', '.join(f'`{n}`' for n in names)}.")
        note = " No tool has such a name at present."
    stored = rules_in(await context.branch.change_rules(lambda known: (*known, rule.as_json())))
    if rule.allow and rule.argument is None:
        note += (
            " Paths outside the workspace and protected ones, such as `.git` and AGENTS.md, still need your permission."
        )
    return f"From now on in this session: {_verb_and_text(rule)}.{note} `/permissions forget {len(stored)}` removes it."


async def _forget_rules(context: CommandContext, rules: Sequence[PermissionRule], number: str) -> str:
    if number == "all" and rules:
        await _remove_rules(context, rules)
        return f"Removed: {plural(len(rules), 'rule')} of this session."
    if not is_number(number) or not 1 <= int(number) <= len(rules):
        expected = f"expected a number from 1 to {len(rules)}, or all" if rules else "it has no rules"
        raise ArgumentError(f"This session has no rule `{number}`; {expected}.")
    rule = rules[int(number) - 1]
    await _remove_rules(context, [rule])
    return f"Removed: {_verb_and_text(rule)}."


async def _remove_rules(context: CommandContext, rules: Sequence[PermissionRule]) -> None:
    await context.branch.change_rules(lambda known: [value for value in known if rule_from(value) not in rules])


def _describe_rule(rule: PermissionRule, cwd: str) -> str:
    """Return the rule in words, with its limits in parentheses."""
    scope = scope_text(rule, cwd)
    return f"{_verb_and_text(rule)}{f' ({scope})' if scope else ''}"


def _verb_and_text(rule: PermissionRule) -> str:
    return f"{'allow' if rule.allow else 'deny'} {rule_text(rule)}"


async def share(context: CommandContext, argument: str) -> str:
    """Make, list or revoke links to pages. The links are those of the session's owner."""
    links, row = context.links, context.branch.row
    if links is None:
        raise ArgumentError("This session cannot be shared as a page here.")
    if await context.store.shares(row.id):
        raise ArgumentError(
            "`/share` is not available while the session is shared with other principals, because each of them could "
            "publish it."
        )

    def is_own(link: PageLink) -> bool:
        return link.principal == row.principal

    verb, *rest = argument.split() or [""]
    if verb == "list" and not rest:
        own = [f"- `{link.id}`: {_describe_link(link)}" for link in await links.list() if is_own(link)]
        return "\n".join(own) or "There are no links. `/share` makes one."
    if verb == "revoke" and len(rest) == 1:
        return f"Revoked: {_describe_link(await links.revoke(rest[0].strip('`'), is_own=is_own))}."
    words = [each for each in (verb, *rest) if each != "redact"]
    if len(words) > 1:
        raise ArgumentError(f"`/share {argument}`: expected a lifetime such as 7d, `redact`, `list` or `revoke LINK`.")
    age = words[0] if words and words[0] else DEFAULT_AGE
    link, url = await links.add(context.store, row.id, age=age, is_strict="redact" in argument.split())
    return (
        f"Anyone with this link can read the session as it is now, until {time_text(link.expires_ms)}, while `crow "
        f"serve` runs on this machine: {url}\n\nRead the page before you pass the link on, because no pattern finds "
        f"every secret. `/share revoke {link.id}` ends it."
    )


def _describe_link(link: PageLink) -> str:
    return f"{quote(link.title) if link.title else code(link.session)}, until {time_text(link.expires_ms)}"


HANDLERS = (fork, title, tag, archive, share, model, mode, permissions)

"""Decides whether the command of a call may reach a host, from the mode and the rules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from crow.agent.permissions.decisions import Allow, Ask, Decision, Refuse, decide
from crow.agent.permissions.rules import NETWORK, NETWORK_WRITE, PermissionRule
from crow.tools import Coverage, PlannedCall
from crow.tools.network.hosts import PORTS, REGISTRIES, Host, covers_host, names_host
from crow.tools.network.registries import siblings_of
from crow.tools.network.uses import Use


def decide_about_host(
    name: str,
    call: PlannedCall,
    host: Host,
    mode: str,
    rules: Sequence[PermissionRule],
    *,
    use: Use | None = None,
    is_bounded: bool = False,
) -> tuple[Decision, PlannedCall]:
    """Decide whether the command of a call may reach a host, and use a credential there. Also return the host as a
    planned call, about which the user can be asked. If the command may change something with the credential, that
    change is decided on instead of the connection, so that the user is asked only once.

    Rules about hosts come first. A rule that lets the command run with full access also lets it reach hosts. The user
    is never asked about an IP address in place of a name: only a rule of the user can allow it.
    """
    asked = _plan_of_host(call, host, siblings_at(call, host, mode, rules), use)
    decision = decide(NETWORK, asked, mode, rules)
    if use is not None and use.place and not isinstance(decision, Refuse):
        change = _plan_of_write(call, use)
        about_change = decide(NETWORK_WRITE, change, mode, rules)
        if not (use.is_allowed and isinstance(about_change, Ask)):
            decision, asked = about_change, change
    if not isinstance(decision, Ask):
        return decision, asked
    whole = replace(call, command_access="full", requested_access="full", changed=())
    if isinstance(decide(name, whole, mode, rules, is_bounded=is_bounded), Allow):
        return Allow(why="the command may run with full access"), asked
    if is_bounded:
        return Refuse(words="on this server, commands reach only the hosts that config.toml allows"), asked
    if host.is_address:
        return Refuse(words=f"is a literal address; only a rule such as network({host}) of the user allows it"), asked
    return decision, asked


def siblings_at(call: PlannedCall, host: Host, mode: str, rules: Sequence[PermissionRule]) -> tuple[Host, ...]:
    """Return the other hosts of the package registry to which `host` belongs, without those that a rule denies. If the
    user allows a command to reach `host`, the command may reach these hosts, too."""
    others = (Host(name, PORTS[-1]) for name in siblings_of(str(host)))
    return tuple(
        other for other in others if not isinstance(decide(NETWORK, _plan_of_host(call, other), mode, rules), Refuse)
    )


def _plan_of_write(call: PlannedCall, use: Use) -> PlannedCall:
    """Return a planned call that stands for the changes that a command may make at a host with the user's
    credential."""
    return PlannedCall(
        announcement=call.announcement,
        access="fetch",
        review_text=f"The command runs. It wants to {use.words}\n\n{call.coverage.argument or ''}",
        coverage=Coverage(rule_tool=NETWORK_WRITE, argument=use.place),
    )


def _plan_of_host(call: PlannedCall, host: Host, others: Sequence[Host] = (), use: Use | None = None) -> PlannedCall:
    """Return a planned call that stands for the connection of a command to a host, and to the other hosts of the same
    registry."""
    words = f"connect to: {host}" if use is None else use.words
    also = f" (and {', '.join(map(str, others))}, of the same registry)" if others else ""
    return PlannedCall(
        announcement=call.announcement,
        access="fetch",
        review_text=f"The command runs. It wants to {words}{also}\n\n{call.coverage.argument or ''}",
        coverage=Coverage(rule_tool=NETWORK, argument=str(host)),
    )


def is_named_host(host: Host, rules: Sequence[PermissionRule]) -> bool:
    """Return whether a rule that the user wrote names exactly this host."""
    return any(
        rule.allow and rule.is_pattern and rule.argument is not None and rule.tool == NETWORK
        and names_host(rule.argument, str(host))
        for rule in rules
    )  # fmt: skip


def is_read_only_host(host: Host, rules: Sequence[PermissionRule]) -> bool:
    """Return whether only the rule `network(registries)` allows the host. Commands may then only read there."""
    covering = [
        rule
        for rule in rules
        if rule.allow and rule.tool == NETWORK and (rule.argument is None or covers_host(rule.argument, str(host)))
    ]
    return bool(covering) and all(rule.argument == REGISTRIES for rule in covering)


def rules_for_hosts(hosts: Sequence[str], cwd: str) -> tuple[PermissionRule, ...]:
    """Return the rules to store when the user allows several hosts at once. They apply only in `cwd`."""
    return tuple(PermissionRule(tool=NETWORK, argument=host, allow=True, cwd=os.path.normpath(cwd)) for host in hosts)

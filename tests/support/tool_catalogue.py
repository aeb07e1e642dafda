"""Tools of MCP servers in realistic domains, and what people would say to find them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow.domain.messages import ToolSpec
from crow.domain.tokens import MESSAGE_TOKENS, estimate_text, estimate_tools

SERVER = Path(__file__).parents[1] / "tools" / "servers" / "various.py"

DOMAINS = {
    "github": "issue, pull request, release, branch, workflow run, label, milestone, gist, deploy key, discussion",
    "jira": "epic, sprint, board, worklog, project component, issue link, filter, dashboard, fix version, watcher",
    "slack": "channel, direct message, reaction, reminder, user group, canvas, huddle, emoji, bookmark, thread reply",
    "postgres": "table, index, view, schema, role, sequence, materialized view, extension, trigger, foreign key",
    "stripe": "customer, invoice, subscription, refund, coupon, payment intent, payout, dispute, price, tax rate",
    "kubernetes": "pod, deployment, service, config map, secret, ingress, namespace, cron job, node, volume claim",
    "notion": "page, database row, block, comment, template, property, team space, backlink, synced block, tag",
    "calendar": "event, attendee, recurring meeting, free slot, room booking, time zone, shift, alarm, invite, holiday",
    "sentry": "error event, alert rule, release health, stack trace, monitor, replay, feedback, quota, owner, grouping",
    "shopify": "product, order, cart, variant, collection, gift card, inventory level, parcel, shipping zone, draft",
}
"""Ten things that each server works with."""

VERBS = {
    "list": ("List the {noun}s of a {place}, newest first, page by page.", "show me all the {noun}s in {server}"),
    "get": ("Get the details of one {noun} by its id.", "look up the details of a {noun} in {server}"),
    "create": ("Create a new {noun} in a {place}.", "add a new {noun} to {server}"),
    "update": ("Update the given fields of a {noun}; other fields stay.", "change a field of the {noun} in {server}"),
    "delete": ("Delete a {noun}. This cannot be undone.", "remove the {server} {noun}"),
}
PLACES = {"github": "repository", "jira": "project", "slack": "workspace", "postgres": "database", "stripe": "account"}
ARGUMENTS: dict[str, dict[str, tuple[str, str]]] = {
    "list": {"cursor": ("string", "Where the page begins."), "limit": ("integer", "How many to return at most.")},
    "get": {"id": ("string", "The id.")},
    "create": {"title": ("string", "What it is called."), "body": ("string", "The text in Markdown.")},
    "update": {"id": ("string", "The id."), "fields": ("object", "The fields to change, with their new values.")},
    "delete": {"id": ("string", "The id."), "force": ("boolean", "Whether dependent items are deleted too.")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A tool as its server lists it, and words that mean it."""

    server: str
    name: str
    description: str
    schema: dict[str, Any]
    words: str

    @property
    def full_name(self) -> str:
        return f"{self.server}__{self.name}"

    @property
    def listed(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "inputSchema": self.schema}


def catalogue() -> list[Listed]:
    """Five hundred tools of ten servers, server by server."""
    return [tool for server in DOMAINS for tool in tools_of(server)]


def first(count: int) -> dict[str, list[dict[str, Any]]]:
    """The first `count` tools, as each server lists its own."""
    servers: dict[str, list[dict[str, Any]]] = {}
    for tool in catalogue()[:count]:
        servers.setdefault(tool.server, []).append(tool.listed)
    return servers


def tools_of(server: str) -> Iterator[Listed]:
    place = PLACES.get(server, "workspace")
    for noun in DOMAINS[server].split(", "):
        for verb, (description, words) in VERBS.items():
            properties = {
                place: {"type": "string", "description": f"The {place} by its name or id."},
                **{name: {"type": kind, "description": what} for name, (kind, what) in ARGUMENTS[verb].items()},
            }
            yield Listed(
                server=server,
                name=f"{verb}_{noun.replace(' ', '_')}",
                description=f"{description.format(noun=noun, place=place)} Needs access to the {place}. Returns JSON "
                f"with the {noun}, its id, its state, and when it was created and changed.",
                schema={"type": "object", "properties": properties, "required": [place]},
                words=words.format(noun=noun, server=server),
            )


def with_servers(home: Path, count: int, limits: str = "") -> str:
    """The configuration of servers that have so many tools together. `limits` is added to the section of that name."""
    home.mkdir(exist_ok=True)
    tables = []
    for name, tools in first(count).items():
        file = home / f"{name}.json"
        file.write_text(json.dumps(tools))
        args = json.dumps(["-I", "-S", str(SERVER), "shifts", str(file)])
        tables.append(f'[mcp_servers.{name}]\ncommand = "{sys.executable}"\nargs = {args}\nstart_timeout_s = 300\n')
    return f"[limits]\nmcp_wait_s = 300\n{limits}" + "".join(tables)


def request_tokens(body: Mapping[str, Any]) -> int:
    """The estimated tokens of a whole request: tools and messages."""
    functions = [tool["function"] for tool in body.get("tools", ())]
    specs = [
        ToolSpec(name=each["name"], description=each["description"], input_schema=each["parameters"])
        for each in functions
    ]
    return estimate_tools(specs) + sum(MESSAGE_TOKENS + estimate_text(json.dumps(each)) for each in body["messages"])

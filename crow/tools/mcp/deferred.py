"""Tools of MCP servers that are not sent with each request: the model finds them by words, and calls them by name.

Everything here is pure. Names, descriptions and schemas come from servers, so each text has a limit.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolCall, ToolSpec
from crow.tools.builtin.tool import argument, check, parse, tool_spec

_MAX_FOUND = 10
FOUND_CHARS = 24_000
LISTED_CHARS = 1_200
_SUMMARY_CHARS = 100
_SEARCHED_CHARS = 600
_SEARCHED_ARGUMENTS = 40
_SEARCHED_WORDS = 30

FIND_TOOLS = tool_spec(
    "find_tools",
    "Find more tools by words. Returns the definitions of the best ten; call them with call_tool. Servers and tools:",
    required="query",
    query=argument("string", "What the tool should do, or its name.", minLength=1, maxLength=300),
)
CALL_TOOL = tool_spec(
    "call_tool",
    "Call a tool that find_tools has found.",
    required="name",
    name=argument("string", "The exact name of the tool."),
    arguments=argument("object", "Its arguments, as its schema says."),
)

_STOP_WORDS = (
    "a about all an and any are at be by can do for from has how i in into is it me my of on one or some that the "
    "their this to tool tools use using want what which with you"
)
# Each line has words that a query and a tool may use for the same thing.
_SYNONYMS = (
    "create add new open make insert register",
    "delete remove drop destroy erase",
    "list enumerate show get",
    "get read fetch show view retrieve load describe details",
    "search find query lookup look",
    "update edit modify change set patch",
    "send post publish notify",
    "run execute start launch trigger invoke",
    "stop cancel abort kill halt terminate",
    "upload attach import",
    "download export save",
    "issue ticket bug task",
    "repository repo",
    "pull pr merge",
    "database db",
    "email mail",
    "image picture photo",
    "document doc page",
    "directory folder",
    "event meeting appointment",
    "customer client contact",
    "message comment reply",
    "user member person",
)


def _words_in(text: str) -> list[str]:
    """Return the words of a name or sentence, without endings: `getIssues` and `get issue` have the same words."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", unicodedata.normalize("NFKC", text))
    return [_stem(word) for word in re.findall(r"[^\W\d_]+|\d+", plain.casefold())]


def _stem(word: str) -> str:
    """Return the word without the usual English endings. The result need not be a word."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    for ending in ("ing", "ed"):
        if len(word) > len(ending) + 2 and word.endswith(ending):
            word = word[: -len(ending)]
            if word[-1] == word[-2] and word[-1] not in "aeiouls":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def _alike() -> Mapping[str, frozenset[str]]:
    """Map each word in `_SYNONYMS` to the other words on its lines."""
    alike: dict[str, set[str]] = {}
    for line in _SYNONYMS:
        group = {_stem(word) for word in line.split()}
        for word in group:
            alike.setdefault(word, set()).update(group - {word})
    return {word: frozenset(others) for word, others in alike.items()}


_ALIKE = _alike()
_STOP_STEMS = frozenset(map(_stem, _STOP_WORDS.split()))


@dataclass(frozen=True, slots=True)
class _SearchedTool:
    """The words that a search finds in a tool, without endings: see `_stem`."""

    name: frozenset[str]
    server: frozenset[str]
    description: frozenset[str]
    arguments: frozenset[str]
    joined: str
    """The letters and digits of the name, without separators."""

    def match(self, word: str) -> float:
        """Return how well the tool matches one word, from 0 (not at all) to 5 (the word is in its name). The beginning
        of a word counts less than the whole word, and a synonym half as much."""
        sources = ((self.name, 5.0), (self.server, 4.0), (self.description, 2.0), (self.arguments, 1.5))
        best = max((weight for words, weight in sources if word in words), default=0.0)
        if len(word) >= 4 and best < 3 and (word in self.joined or _shares_beginning(word, self.name | self.server)):
            best = 3.0
        others = _ALIKE.get(word)
        if others is not None and best < 2.5:
            alike = max((weight / 2 for words, weight in sources if not others.isdisjoint(words)), default=0.0)
            best = max(best, alike)
        return best


def _searched_tool(spec: ToolSpec) -> _SearchedTool:
    """Return the words of a tool. Only the beginning of a long description, and the first arguments, are read."""
    properties = spec.input_schema.get("properties")
    names = list(properties)[:_SEARCHED_ARGUMENTS] if isinstance(properties, Mapping) else []
    arguments = " ".join(str(name)[:_SUMMARY_CHARS] for name in names)
    return _searched(spec.name, spec.description[:_SEARCHED_CHARS], arguments)


@lru_cache(maxsize=4_000)
def _searched(name: str, description: str, arguments: str) -> _SearchedTool:
    server, _, short = name.partition("__")
    return _SearchedTool(
        name=frozenset(_words_in(short)),
        server=frozenset(_words_in(server)),
        description=frozenset(_words_in(description)),
        arguments=frozenset(_words_in(arguments)),
        joined=re.sub(r"[\W_]", "", short).casefold(),
    )


def _shares_beginning(word: str, words: Iterable[str]) -> bool:
    return any(each.startswith(word) or (len(each) >= 4 and word.startswith(each)) for each in words)


def best_tools(query: str, specs: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Return the tools that match the query, best first. Those with equal scores keep their order.

    A word that few tools have counts more than a frequent one. A tool that matches more of the words has a higher
    score. A tool whose name is in the query comes before all others.
    """
    found = _words_in(query)
    words = list(dict.fromkeys(word for word in found if word not in _STOP_STEMS) or dict.fromkeys(found))
    words = words[:_SEARCHED_WORDS]
    tools = [_searched_tool(spec) for spec in specs]
    scores = [0.0] * len(specs)
    matched = [0] * len(specs)
    for word in words:
        matches = [tool.match(word) for tool in tools]
        rarity = math.log(1 + len(specs) / (1 + sum(1 for match in matches if match)))
        for at, match in enumerate(matches):
            if match:
                scores[at] += match * rarity
                matched[at] += 1
    named = set(re.findall(r"[A-Za-z0-9_-]+", query))
    for at, (spec, tool) in enumerate(zip(specs, tools, strict=True)):
        if scores[at]:
            covered = len(tool.name.intersection(words)) / max(1, len(tool.name))
            scores[at] *= (matched[at] / len(words)) * (1 + covered / 2)
        if spec.name in named:
            scores[at] += 1e6
        elif (short := spec.name.partition("__")[2]) in named and "_" in short:
            scores[at] += 1e3
    order = sorted((at for at, score in enumerate(scores) if score), key=lambda at: (-scores[at], at))
    return [specs[at] for at in order]


def find_tools(query: str, specs: Sequence[ToolSpec]) -> str:
    """Return a text with the definitions of the tools that match the query best. A definition that would make the text
    too long is replaced by its first words."""
    best = best_tools(query, specs)
    if not best:
        listed = list_servers(specs)
        return f'None of {len(specs)} tools matches "{query}". Try other words. Servers and tools:\n{listed}'
    blocks: list[str] = []
    left = FOUND_CHARS
    for spec in best[:_MAX_FOUND]:
        block = definition(spec)
        if len(block) > left:
            block = f"{spec.name}: {_summary(spec)} [its definition is long; find_tools with this name alone shows it]"
            if not blocks:
                block = f"{definition(spec)[:FOUND_CHARS]}\n[the definition is cut here]"
        left -= len(block)
        blocks.append(block)
    more = f"\n[{len(best) - _MAX_FOUND} more match; narrow the query]" if len(best) > _MAX_FOUND else ""
    return "\n\n".join(blocks) + more


def definition(spec: ToolSpec) -> str:
    """Return the name, description and schema of a tool."""
    schema = json.dumps(spec.input_schema, ensure_ascii=False, separators=(",", ":"))
    return f"{spec.name}: {spec.description}\n{schema}"


def _summary(spec: ToolSpec) -> str:
    """Return the beginning of a tool's description on one line."""
    return " ".join(spec.description[: 2 * _SUMMARY_CHARS].split())[:_SUMMARY_CHARS]


def find_spec(specs: Sequence[ToolSpec]) -> ToolSpec:
    """Return the spec of `find_tools`, which lists the servers and tools that it can find."""
    return replace(FIND_TOOLS, description=f"{FIND_TOOLS.description}\n{list_servers(specs)}")


def list_servers(specs: Sequence[ToolSpec]) -> str:
    """Return one line for each server, with the number of its tools and as many of their names as fit into
    `LISTED_CHARS`. The servers take turns, so that one with many tools leaves room for the others."""
    servers: dict[str, list[str]] = {}
    for spec in specs:
        server, _, short = spec.name.partition("__")
        servers.setdefault(server, []).append(short)
    heads = {server: f"{server} ({len(names)})" for server, names in servers.items()}
    left = LISTED_CHARS
    lines: dict[str, list[str]] = {}
    for server, head in heads.items():
        left -= len(head) + 6
        if left < 0:
            break
        lines[server] = []
    growing = list(lines)
    while growing:
        for server in tuple(growing):
            names, listed = servers[server], lines[server]
            if len(listed) == len(names) or len(names[len(listed)]) + 2 > left:
                growing.remove(server)
                continue
            listed.append(names[len(listed)])
            left -= len(listed[-1]) + 2
    texts = [_server_line(heads[server], listed, len(servers[server])) for server, listed in lines.items()]
    if len(lines) < len(servers):
        texts.append(f"and {len(servers) - len(lines)} more servers")
    return "\n".join(texts)


def _server_line(head: str, listed: Sequence[str], count: int) -> str:
    if not listed:
        return head
    return f"{head}: {', '.join(listed)}{', ...' if len(listed) < count else ''}"


def query_of(call: ToolCall) -> str:
    """Return the query of a `find_tools` call. :raises ~crow.domain.errors.ArgumentError: the call has no valid
    query."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    query: str = check(call.name, FIND_TOOLS.input_schema, parse(call.name, call.arguments))["query"]
    return query


def inner_call(call: ToolCall) -> ToolCall:
    """Return the call inside a `call_tool` call. :raises ~crow.domain.errors.ArgumentError: there is no valid call
    inside."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    values = parse(call.name, call.arguments)
    name, arguments = values.get("name"), values.get("arguments") or {}
    if not isinstance(name, str) or not name:
        raise ArgumentError("call_tool: name is missing; expected the name of a tool that find_tools has found")
    if "__" not in name:
        raise ArgumentError(f"call_tool: {name} is not a tool of an MCP server; call it directly")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=call.id, name=name, arguments=text)


def understood_inner(call: ToolCall, specs: Mapping[str, ToolSpec]) -> ToolCall:
    """Return a `call_tool` call in its proper form: with the full name of the tool in `name`, and the tool's arguments
    in `arguments`. Models often write `tool` or `args` instead, or the arguments beside the name. If it is not clear
    what the model means, return the call as it is. `specs` has all tools of external servers by name."""
    try:
        values: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call
    if call.fault is not None or not isinstance(values, dict):
        return call
    given = dict(values)
    own: dict[str, Any] = {}
    for key, others in (("name", ("tool_name", "tool")), ("arguments", ("args", "parameters", "params", "input"))):
        present = [each for each in (key, *others) if each in given]
        if present and (present[0] == key or len(present) == 1):
            own[key] = given.pop(present[0])
    if not isinstance(own.get("name"), str):
        return call
    if given and "arguments" not in own:  # the arguments stand beside the name
        own["arguments"], given = given, {}
    own["name"] = full_name(own["name"], specs)
    if own["name"] in specs and isinstance(own.get("arguments"), dict):
        own["arguments"] = _with_decoded_members(own["arguments"], specs[own["name"]].input_schema)
    if {**own, **given} == values:
        return call
    return replace(call, arguments=json.dumps({**own, **given}, ensure_ascii=False))


def _with_decoded_members(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Decode lists and objects that the model wrote as JSON in a string, although the schema wants no string."""
    properties = schema.get("properties")
    decoded = dict(arguments)
    for name, value in arguments.items():
        wanted = properties.get(name) if isinstance(properties, Mapping) else None
        kind = {"array": list, "object": dict}.get(str(wanted.get("type"))) if isinstance(wanted, Mapping) else None
        if kind is None or not isinstance(value, str):
            continue
        with suppress(ValueError, RecursionError):
            if isinstance(meant := json.loads(value), kind):
                decoded[name] = meant
    return decoded


def full_name(name: str, names: Collection[str]) -> str:
    """Return the full name of the tool that `name` means, even if `name` lacks the server's prefix. If there is no such
    tool, or several, return `name`."""
    if name in names:
        return name
    meant = [each for each in names if each.partition("__")[2] == name]
    return meant[0] if len(meant) == 1 else name

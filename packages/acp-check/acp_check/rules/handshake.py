"""Rules about `initialize` and authentication."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from acp_check.rules.rule import (
    MUST,
    SHOULD,
    Finding,
    Outcome,
    Rule,
    answered_by_error,
    answered_by_result,
    describe,
    every,
    offers,
    page,
)
from acp_check.run import Connection, Exchange, Run

_ONLY_LIVE = "only a check that drives the agent sends this"


def _first_lines(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        exchange = connection.initialize
        if exchange is not None and exchange.response is not None:
            has_any = True
            early = (line for line in connection.agent_messages if line.line < exchange.response.line)
            found += [
                Finding(words="the agent sent this before it answered initialize", lines=(line,))
                for line in early
                if "method" in line.message
            ]
    return found if has_any else "initialize was not answered"


def _initialized(run: Run) -> list[Exchange]:
    first = (connection.initialize for connection in run.connections)
    return [exchange for exchange in first if exchange is not None and exchange.result is not None]


def _of_version_1(run: Run) -> list[Exchange]:
    return [exchange for exchange in _initialized(run) if not exchange.is_of_later_version]


def _version(exchange: Exchange) -> Any:
    return (exchange.result or {}).get("protocolVersion")


def _version_type(exchange: Exchange) -> str | None:
    version = _version(exchange)
    is_whole = isinstance(version, int) and not isinstance(version, bool) and 0 <= version <= 65535
    return None if is_whole else f"protocolVersion is {version!r}"


def _same_version(exchange: Exchange) -> str | None:
    return None if _version(exchange) == 1 else f"the client asked for 1, the agent answered {_version(exchange)!r}"


def _latest(run: Run) -> Outcome:
    newer = [each for each in run.exchanges("initialize-newer", "initialize-zero") if each.result is not None]
    usual = [each for each in _initialized(run) if each.params.get("protocolVersion") == 1]
    supported = [_version(each) for each in usual if isinstance(_version(each), int)]
    if not newer:
        return _ONLY_LIVE
    return [
        Finding(words=f"the agent also speaks version {max(supported)}", lines=each.lines)
        for each in newer
        if supported and isinstance(_version(each), int) and _version(each) < max(supported)
        if _version(each) != each.params.get("protocolVersion")  # an echo is another rule's finding
    ]


def _negotiated(exchange: Exchange) -> str | None:
    if exchange.result is None:
        return f"expected a version that the agent supports; {describe(exchange)}"
    asked = exchange.params.get("protocolVersion")
    return f"the agent claims to speak version {asked}" if _version(exchange) == asked else None


def _older(run: Run) -> Outcome:
    asked = run.exchanges("initialize-zero")
    echoes_all = any(_version(each) == each.params.get("protocolVersion") for each in run.exchanges("initialize-newer"))
    found = []
    for each in asked:
        is_known = echoes_all and _version(each) == 0  # the rule about newer versions has said so
        if not is_known and (words := _negotiated(each)):
            found.append(Finding(words=words, lines=each.lines))
    return found if asked else _ONLY_LIVE


def _agent_info(exchange: Exchange) -> str | None:
    info = (exchange.result or {}).get("agentInfo")
    return None if isinstance(info, dict) and info.get("name") and info.get("version") else f"agentInfo is {info!r}"


def _has_capabilities(exchange: Exchange) -> str | None:
    capabilities = (exchange.result or {}).get("agentCapabilities")
    return None if isinstance(capabilities, dict) else f"agentCapabilities is {capabilities!r}"


def _methods_of(run: Run) -> Iterable[Connection]:
    return (connection for connection in run.connections if connection.auth_methods)


def _auth_ids(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in _methods_of(run):
        has_any = True
        ids = [method.get("id") for method in connection.auth_methods]
        if len({str(each) for each in ids}) < len(ids) and connection.initialize is not None:
            found.append(
                Finding(words=f"two authentication methods have the same id: {ids}", lines=connection.initialize.lines)
            )
    return found if has_any else "the agent offers no authentication method"


def _terminal_auth(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        exchange = connection.initialize
        if exchange is not None and exchange.result is not None and not offers(connection, "auth.terminal"):
            has_any = True
            if any(method.get("type") == "terminal" for method in connection.auth_methods):
                words = "the client did not offer auth.terminal, but an authentication method needs it"
                found.append(Finding(words=words, lines=exchange.lines))
    return found if has_any else "the client offered auth.terminal"


RULES = (
    Rule(
        "initialize.answered",
        MUST,
        "initialize is answered with a result.",
        page("initialization"),
        every(
            lambda run: [each for each in run.asked_for("initialize") if each.is_answered or each.gave_up],
            lambda exchange: None if exchange.result is not None else describe(exchange),
            "the recording has no initialize",
        ),
    ),
    Rule(
        "initialize.version",
        MUST,
        "protocolVersion is a whole number.",
        page("initialization#protocol-version"),
        every(_initialized, _version_type, "initialize was not answered"),
    ),
    Rule(
        "initialize.same-version",
        MUST,
        "If the client asks for version 1, the agent answers 1.",
        page("initialization#version-negotiation"),
        every(
            lambda run: [each for each in _initialized(run) if each.params.get("protocolVersion") == 1],
            _same_version,
            "the client did not ask for version 1",
        ),
    ),
    Rule(
        "initialize.newer-version",
        MUST,
        "If the client asks for a version that does not exist yet, the agent answers one that it supports.",
        page("initialization#version-negotiation"),
        every(lambda run: run.exchanges("initialize-newer"), _negotiated, _ONLY_LIVE),
    ),
    Rule(
        "initialize.older-version",
        MUST,
        "If the client asks for version 0, the agent answers one that it supports.",
        page("initialization#version-negotiation"),
        _older,
    ),
    Rule(
        "initialize.latest-version",
        MUST,
        "If the client asks for a version that the agent does not support, the agent answers its latest.",
        page("initialization#version-negotiation"),
        _latest,
    ),
    Rule(
        "initialize.minimal",
        MUST,
        "A client that offers no capabilities is accepted.",
        page("initialization#capabilities"),
        answered_by_result("expected a result", _ONLY_LIVE, "initialize-minimal"),
    ),
    Rule(
        "initialize.agent-info",
        SHOULD,
        "The agent says its name and version.",
        page("initialization#implementation-information"),
        every(_of_version_1, _agent_info, "initialize was not answered"),
    ),
    Rule(
        "initialize.agent-capabilities",
        SHOULD,
        "The agent says which capabilities it has.",
        page("initialization#agent-capabilities"),
        every(_of_version_1, _has_capabilities, "initialize was not answered"),
    ),
    Rule(
        "initialize.first",
        SHOULD,
        "The agent sends no request and no notification before it has answered initialize.",
        page("initialization"),
        _first_lines,
    ),
    Rule(
        "auth.method-ids",
        MUST,
        "Authentication methods have different ids.",
        page("schema#authmethod"),
        _auth_ids,
    ),
    Rule(
        "auth.terminal",
        MUST,
        "An authentication method that needs a terminal is offered only to a client with auth.terminal.",
        page("authentication#terminal-authentication"),
        _terminal_auth,
    ),
    Rule(
        "auth.unknown-method",
        SHOULD,
        "authenticate with an unknown method fails.",
        page("authentication#protocol-driven-authentication"),
        answered_by_error("expected an error", "the agent offers no authentication method", "auth-unknown"),
    ),
)

"""Defines rules of the protocol, their findings and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from acp_check.recording import Recorded
from acp_check.rules.sentences import OF_SHAPES, SENTENCES
from acp_check.run import Connection, Exchange, Run

Severity: TypeAlias = Literal["MUST", "SHOULD"]
MUST: Severity = "MUST"
SHOULD: Severity = "SHOULD"

_PAGES = "https://agentclientprotocol.com/protocol/v1/"
JSON_RPC = "https://www.jsonrpc.org/specification"
JSON = "https://www.rfc-editor.org/rfc/rfc8259"


def page(name: str) -> str:
    """Return the URL of a page about the protocol. An example of `name` is `prompt-turn#cancellation`."""
    return _PAGES + name


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violation of a rule."""

    words: str
    lines: tuple[Recorded, ...] = ()
    """The messages that show the violation."""


Outcome: TypeAlias = "list[Finding] | str"
"""The findings of a rule, or the reason why the rule does not apply."""

Check: TypeAlias = Callable[[Run], Outcome]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for agents."""

    id: str
    severity: Severity
    says: str
    """The text of the rule."""
    link: str
    """The rule's place in the specification."""
    check: Check
    """Applies the rule to a run."""

    @property
    def sentence(self) -> str:
        """The words of the specification from which the rule takes its severity."""
        return SENTENCES[self.id] if not self.id.startswith("shape.") else OF_SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of applying a rule."""

    rule: Rule
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    """Why the rule does not apply, or empty if it applies."""

    @property
    def state(self) -> Literal["passed", "failed", "not applicable"]:
        """The verdict as text."""
        return "failed" if self.findings else "not applicable" if self.reason else "passed"


class _HasLines(Protocol):
    @property
    def lines(self) -> tuple[Recorded, ...]: ...


Item = TypeVar("Item", bound=_HasLines)


def every(items: Callable[[Run], Iterable[Item]], problem: Callable[[Item], str | None], nothing: str) -> Check:
    """Return a check that examines each of the `items`.

    `problem` returns the words of a finding, or None if nothing is wrong with the item. If there are no items, the rule
    does not apply, and `nothing` is the reason.
    """

    def check(run: Run) -> Outcome:
        found, is_empty = [], True
        for item in items(run):
            is_empty = False
            words = problem(item)
            if words:
                found.append(Finding(words=words, lines=item.lines))
        return nothing if is_empty else found

    return check


def every_line(
    lines: Callable[[Run], Iterable[Recorded]], problem: Callable[[Recorded], str | None], nothing: str
) -> Check:
    """Return a check that examines each line. See `every`."""
    return every(lambda run: (Shown(line) for line in lines(run)), lambda shown: problem(shown.line), nothing)


@dataclass(frozen=True, slots=True)
class Shown:
    """A single line as an item for `every`."""

    line: Recorded

    @property
    def lines(self) -> tuple[Recorded, ...]:
        """The line."""
        return (self.line,)


def answered_by_result(words: str, nothing: str, *purposes: str) -> Check:
    """Return a check for the requests with one of these purposes: each must have been answered with a result."""
    return every(
        lambda run: run.exchanges(*purposes),
        lambda exchange: None if exchange.result is not None else f"{words}: {describe(exchange)}",
        nothing,
    )


def answered_by_error(
    words: str, nothing: str, *purposes: str, codes: tuple[int, ...] = (), if_refused: bool = False
) -> Check:
    """Return a check for the requests with one of these purposes: each must have been answered with an error.

    With `codes`, the error must have one of these codes. With `if_refused`, a request that was answered with a result
    passes too.
    """

    def problem(exchange: Exchange) -> str | None:
        if exchange.error is None:
            return None if if_refused and exchange.is_answered else f"{words}: {describe(exchange)}"
        if codes and exchange.code not in codes:
            return f"{words}: {describe(exchange)}"
        return None

    return every(lambda run: run.exchanges(*purposes), problem, nothing)


def answered(words: str, nothing: str, *purposes: str) -> Check:
    """Return a check for the requests with one of these purposes: each must have been answered with a result or an
    error."""
    return every(
        lambda run: run.exchanges(*purposes),
        lambda exchange: None if exchange.is_answered else words,
        nothing,
    )


def describe(exchange: Exchange) -> str:
    """Say in words how a request was answered."""
    if not exchange.is_answered:
        return f"{exchange.method} was not answered"
    if exchange.error is not None:
        return (
            f"{exchange.method} failed with {exchange.error.get('code')!r} ({str(exchange.error.get('message'))[:120]})"
        )
    return f"{exchange.method} was answered with a result"


def advertised(connection: Connection, path: str) -> bool:
    """Return whether the agent advertises a capability, such as `sessionCapabilities.list`."""
    return _is_on(connection.agent_capabilities, path)


def offers(connection: Connection, path: str) -> bool:
    """Return whether the client offers a capability, such as `fs.readTextFile`."""
    return _is_on(connection.offered, path)


def _is_on(capabilities: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(capabilities, dict):
            return False
        capabilities = capabilities.get(name)
    return capabilities is not None and capabilities is not False


def is_absolute(path: object) -> bool:
    """Return whether a path is absolute on POSIX or on Windows."""
    return isinstance(path, str) and (path.startswith(("/", "\\\\")) or path[1:3] in (":\\", ":/"))

"""Every rule of `acp-check` finds the agent that breaks it, and nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections import deque
from pathlib import Path
from random import Random
from typing import Any, Literal
from xml.etree import ElementTree

import pytest

from acp_check.client import TimeLimits
from acp_check.drive import Drive
from acp_check.recording import Recorded
from acp_check.report import Report
from acp_check.rules import RULES, Rule, judge
from acp_check.rules.sentences import SENTENCES
from acp_check.run import Connection, EndpointLog, Exit, Run
from tests.agent import Agent
from tests.scripts import Disk

AT_ONCE = TimeLimits(answer_s=0, settle_s=0, optional_s=0, slow_s=0)
"""The agent answers before a write returns, so nothing has to be waited for."""

STARTED = {"arguments": ["one", "two words"], "variable": "ACP check ☕"}
NOT_DRIVEN = {"shape.authenticate", "shape.logout"}
"""No check logs in or out. Recordings may."""


class InProcess:
    """The stdin and stdout of an agent in this process."""

    def __init__(self, disk: Disk, endpoint: EndpointLog, *broken: str) -> None:
        self._output = bytearray()
        self._lines: deque[bytes] = deque()
        self._agent = Agent(self._wrote, disk, endpoint, *broken)
        self._is_paused = False

    def _wrote(self, data: bytes) -> None:
        self._output += data
        *lines, rest = bytes(self._output).split(b"\n")
        self._lines += [line + b"\n" for line in lines]
        self._output = bytearray(rest)

    def write(self, data: bytes) -> None:
        self._agent.feed(data)

    def read_line(self, timeout_s: float) -> bytes | None:
        if self._is_paused:
            return None
        if self._lines:
            return self._lines.popleft()
        if self._agent.is_dead and self._output:
            rest, self._output = bytes(self._output), bytearray()
            return rest
        return b"" if self._agent.is_dead else None

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def close(self, timeout_s: float) -> Exit:
        self._agent.close()
        is_stuck = self._agent.breaks("exit.idle", "exit.busy")
        return Exit(code=None if is_stuck else 0, leftovers=self._agent.breaks("exit.leftovers"))


class Mutating(InProcess):
    """The same agent, but some values in its messages are replaced by others, or removed."""

    def __init__(self, disk: Disk, endpoint: EndpointLog, random: Random) -> None:
        super().__init__(disk, endpoint)
        self._random = random

    def read_line(self, timeout_s: float) -> bytes | None:
        line = super().read_line(timeout_s)
        if line is None or not line.endswith(b"}\n") or len(line) > 5000 or self._random.random() > 0.03:
            return line
        return json.dumps(mutated(json.loads(line), self._random)).encode() + b"\n"


ODD: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", [], {}, [1], [[]], [None], {"id": 5})


def mutated(value: Any, random: Random) -> Any:
    """The value, with one part of it replaced or removed."""
    places: list[tuple[Any, Any]] = []

    def visit(part: Any) -> None:
        for key, inner in list(part.items() if isinstance(part, dict) else enumerate(part)):
            places.append((part, key))
            if isinstance(inner, dict | list):
                visit(inner)

    visit(value)
    part, key = random.choice(places)
    if isinstance(part, dict) and random.random() < 0.3:
        del part[key]
    else:
        part[key] = copy.deepcopy(random.choice(ODD))
    return value


def driven(place: Path, *broken: str, random: Random | None = None) -> Run:
    disk, endpoint = Disk(), EndpointLog()

    def start(_: str) -> InProcess:
        return InProcess(disk, endpoint, *broken) if random is None else Mutating(disk, endpoint, random)

    run = Drive(
        start=start,
        workspace=place,
        endpoint=endpoint,
        limits=AT_ONCE,
        server={"name": "s", "command": "/bin/true", "args": [], "env": []},
    ).run()
    environments: dict[str, list[dict[str, Any]]] = {
        "session.mcp-connected": [],
        "session.mcp-environment": [STARTED | {"variable": ""}],
    }
    run.servers_started = next((environments[rule] for rule in broken if rule in environments), [STARTED])
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("workspace")
    (directory / "acp-check.txt").write_text("A file.\n")
    return directory


def test_an_agent_that_keeps_the_rules_has_no_finding_and_exercises_all(place: Path) -> None:
    verdicts = judge(driven(place))
    assert [(verdict.rule.id, verdict.findings[0].words) for verdict in verdicts if verdict.findings] == []
    assert {verdict.rule.id for verdict in verdicts if verdict.reason} == NOT_DRIVEN


APART = {"cancel", "framing", "initialize", "jsonrpc", "list", "load", "options", "permission", "session", "tool"}
"""An agent that breaks one rule of these groups often has no chance to break another."""
ALONE = {
    *("delete.unlisted", "extensibility.no-custom-fields", "message.roles", "modes.in-sync", "prompt.not-cancelled"),
    *("prompt.text-shown", "resume.continues", "resume.no-replay", "shape.session/update", "terminal.after-release"),
}
"""Other rules with the same effect."""


def broken_together() -> dict[str, list[Rule]]:
    """Return the rules that one agent breaks at once. An agent costs about as much as all of them."""
    found: dict[str, list[Rule]] = {}
    for rule in RULES:
        group = rule.id.partition(".")[0]
        name = rule.id if group in APART or rule.id in ALONE else group
        if rule.id not in NOT_DRIVEN:
            found.setdefault(name, []).append(rule)
    return found


@pytest.mark.parametrize("rules", [pytest.param(rules, id=name) for name, rules in broken_together().items()])
def test_a_rule_finds_the_agent_that_breaks_it(place: Path, rules: list[Rule]) -> None:
    verdicts = judge(driven(place, *(rule.id for rule in rules)), tuple(rules))
    assert [verdict.rule.id for verdict in verdicts if verdict.state != "failed"] == []
    assert all(finding.words for verdict in verdicts for finding in verdict.findings)
    assert len(verdicts) == len(rules)


@pytest.mark.parametrize("seed", range(8))
def test_no_message_of_an_agent_breaks_the_check(place: Path, seed: int) -> None:
    run = driven(place, random=Random(seed))
    report = Report(run=run, verdicts=tuple(judge(run)))
    assert report.failed()
    assert len(list(report.text(everything=True))) > len(RULES)
    assert len(list(report.rows())) == len(ElementTree.fromstring(report.junit("x"))[0])


def test_rules_have_ids_of_their_own_a_sentence_and_a_link() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES) >= 120
    assert [rule.id for rule in RULES if not rule.says.endswith(".") or "\n" in rule.says] == []
    allowed = (
        "https://agentclientprotocol.com/protocol/v1/",
        "https://www.jsonrpc.org/",
        "https://www.rfc-editor.org/",
    )
    assert [rule.id for rule in RULES if not rule.link.startswith(allowed)] == []


def test_no_rule_is_a_must_where_the_protocol_says_nothing_or_only_should() -> None:
    assert {rule.id for rule in RULES if not rule.id.startswith("shape.")} == set(SENTENCES)
    weak = [rule.id for rule in RULES if rule.severity == "MUST" and re.match("No sentence|.*SHOULD", rule.sentence)]
    assert weak == []
    strong = [rule.id for rule in RULES if rule.severity == "SHOULD" and "MUST" in rule.sentence]
    assert strong == ["framing.no-carriage-return", "initialize.first"]


def failed(run: Run) -> list[str]:
    return [verdict.rule.id for verdict in judge(run) if verdict.findings]


@pytest.mark.parametrize(
    "broken", ["load.works", "prompt.resource-link", "tool.title", "list.times", "modes.unique-ids"]
)
def test_one_fault_is_one_failed_rule(place: Path, broken: str) -> None:
    assert failed(driven(place, broken)) == [broken]


@pytest.mark.parametrize("broken", ["jsonrpc.unknown-response", "jsonrpc.unknown-notification"])
def test_an_agent_that_dies_fails_where_it_died(place: Path, broken: str) -> None:
    assert failed(driven(place, broken)) == [broken]


def test_every_wait_is_in_proportion_to_the_wait_for_an_answer() -> None:
    usual, patient = TimeLimits.of(30), TimeLimits.of(120)
    assert usual == TimeLimits()
    assert (patient.settle_s, patient.optional_s, patient.slow_s, patient.total_s) == (1.2, 8, 6, 2400)


def test_an_agent_that_echoes_every_version_breaks_one_rule(place: Path) -> None:
    run = driven(place)
    for exchange in run.exchanges("initialize-newer", "initialize-zero"):
        assert exchange.response is not None
        exchange.response.message["result"]["protocolVersion"] = exchange.params["protocolVersion"]
    assert failed(run) == ["initialize.newer-version"]


def replayed(*kinds: str) -> list[str]:
    """The failed rules about a load that replays `user` and `agent` texts in this order, after two equal answers."""
    lines: list[Recorded] = []

    def say(sender: Literal["agent", "client"], message: dict[str, Any], purpose: str = "") -> None:
        lines.append(
            Recorded(line=len(lines) + 1, at=None, sender=sender, message={"jsonrpc": "2.0"} | message, purpose=purpose)
        )

    def show(kind: str, text: str) -> None:
        update = {"sessionUpdate": f"{kind}_message_chunk", "content": {"type": "text", "text": text}}
        say("agent", {"method": "session/update", "params": {"sessionId": "s", "update": update}})

    for number in (1, 2):
        params = {"sessionId": "s", "prompt": [{"type": "text", "text": f"prompt {number}"}]}
        say("client", {"id": number, "method": "session/prompt", "params": params}, "prompt-say")
        show("agent", "ok")
        say("agent", {"id": number, "result": {"stopReason": "end_turn"}})
    say("client", {"id": 3, "method": "session/load", "params": {"sessionId": "s", "cwd": "/w", "mcpServers": []}})
    for place, kind in enumerate(kinds):
        show(kind, f"prompt {kinds[:place].count('user') + 1}" if kind == "user" else "ok")
    say("agent", {"id": 3, "result": {}})
    return failed(Run(connections=[Connection(lines=lines)]))


def test_equal_answers_to_two_prompts_are_in_order_unless_one_comes_first() -> None:
    assert replayed("user", "agent", "user", "agent") == []
    assert replayed("agent", "user", "user", "agent") == ["load.order"]

"""Reports what a check found, as text, JSON or JUnit XML."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from acp_check.recording import Recorded
from acp_check.rules import Finding, Verdict, judge
from acp_check.run import Connection, Run, split
from acp_check.schema import SchemaChecker, Violation

_MAX_FINDINGS = 5
_MAX_CHARACTERS = 300
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdicts about a run."""

    run: Run
    verdicts: tuple[Verdict, ...]
    client_faults: tuple[str, ...] = ()
    """The client's errors as `line 12: text`. They do not count as errors of the agent."""
    unanswered: tuple[str, ...] = ()
    """The requests that had no response when a recording ended, as `method (id)`. They do not count as errors of the
    agent."""

    def failed(self, *, strict: bool = False) -> bool:
        """Return whether a rule of severity MUST failed or, with `strict`, whether any rule failed."""
        return any(verdict.findings and (strict or verdict.rule.severity == "MUST") for verdict in self.verdicts)

    def text(self, *, everything: bool = False) -> Iterator[str]:
        """Yield the lines to print: each failed rule with its findings, and a summary. With `everything`, rules that
        did not fail are listed too."""
        for verdict in self.verdicts:
            if verdict.findings:
                yield f"FAILED {verdict.rule.severity:<6} {verdict.rule.id}: {verdict.rule.says}"
                yield f"       {verdict.rule.link}"
                yield f"       {verdict.rule.sentence}"
                for finding in verdict.findings[:_MAX_FINDINGS]:
                    yield f"       {self._place(finding)}{_safe(finding.words)}"
                    yield from (f"         {_quote(line)}" for line in finding.lines[:_MAX_FINDINGS])
                if len(verdict.findings) > _MAX_FINDINGS:
                    yield f"       and {len(verdict.findings) - _MAX_FINDINGS} more"
            elif everything:
                reason = f" ({_safe(verdict.reason)})" if verdict.reason else ""
                yield f"{verdict.state:<14} {verdict.rule.severity:<6} {verdict.rule.id}: {verdict.rule.says}{reason}"
        yield from (f"(the client, {_safe(fault)})" for fault in self.client_faults)
        if self.unanswered:
            yield f"(not answered when the recording ended: {_safe(', '.join(self.unanswered))})"
        yield self.summary()

    def summary(self) -> str:
        """Return one line with the number of messages and the numbers of rules that passed or failed."""
        states = Counter(verdict.state for verdict in self.verdicts)
        binding = sum(1 for verdict in self.verdicts if verdict.findings and verdict.rule.severity == "MUST")
        lines = sum(len(connection.lines) for connection in self.run.connections)
        return (
            f"{lines} messages, {len(self.verdicts)} rules: {states['passed']} passed, {states['failed']} failed"
            f" ({binding} MUST, {states['failed'] - binding} SHOULD), {states['not applicable']} not applicable"
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one JSON object for each rule."""
        for verdict in self.verdicts:
            rule = verdict.rule
            yield {
                "rule": rule.id,
                "severity": rule.severity,
                "says": rule.says,
                "link": rule.link,
                "sentence": rule.sentence,
                "state": verdict.state,
                "reason": verdict.reason or None,
                "findings": [
                    {
                        "words": finding.words,
                        "connection": self._connection(finding),
                        "lines": [
                            {"line": line.line, "from": line.sender}
                            | ({"text": line.text} if line.text is not None else {"message": line.message})
                            for line in finding.lines
                        ],
                    }
                    for finding in verdict.findings
                ],
            }

    def junit(self, name: str) -> bytes:
        """Return JUnit XML with a test case for each rule. `name` is the name of the suite."""
        states = Counter(verdict.state for verdict in self.verdicts)
        totals = {"tests": str(len(self.verdicts)), "failures": str(states["failed"]), "errors": "0"}
        totals["skipped"] = str(states["not applicable"])
        root = ElementTree.Element("testsuites", totals)
        suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(name)} | totals)
        for verdict in self.verdicts:
            area, _, _ = verdict.rule.id.partition(".")
            case = ElementTree.SubElement(suite, "testcase", {"classname": area, "name": verdict.rule.id})
            if verdict.findings:
                words = f"{verdict.rule.severity}: {verdict.rule.says}"
                failure = ElementTree.SubElement(
                    case, "failure", {"type": verdict.rule.severity, "message": _xml(words)}
                )
                failure.text = _xml("\n".join((verdict.rule.link, verdict.rule.sentence, *self._evidence(verdict))))
            elif verdict.reason:
                ElementTree.SubElement(case, "skipped", {"message": _xml(verdict.reason)})
        ElementTree.indent(root)
        return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"

    def _evidence(self, verdict: Verdict) -> Iterator[str]:
        for finding in verdict.findings[:_MAX_FINDINGS]:
            yield f"{self._place(finding)}{finding.words}"
            yield from (f"  {_quote(line)}" for line in finding.lines[:_MAX_FINDINGS])

    def _connection(self, finding: Finding) -> str | None:
        for connection in self.run.connections:
            if finding.lines and connection.name and finding.lines[0].line in _lines_of(connection):
                return connection.name
        return None

    def _place(self, finding: Finding) -> str:
        if not finding.lines:
            return ""
        connection = self._connection(finding)
        numbers = f"line {finding.lines[-1].line}: "
        return f"{connection}, {numbers}" if connection else numbers


def check(recording: Iterable[Recorded]) -> Report:
    """Apply the rules to a recording, and return a report."""
    lines = tuple(recording)
    run = Run(connections=split(lines))
    schema, faults = SchemaChecker(), []
    for recorded in lines:
        try:
            if recorded.text is None:
                schema.check(recorded.sender, recorded.message)
        except Violation as error:
            if recorded.sender == "client":
                faults.append(f"line {recorded.line}: {error}")
    verdicts = tuple(judge(run))
    return Report(run=run, verdicts=verdicts, client_faults=tuple(faults), unanswered=schema.unanswered())


def _lines_of(connection: Connection) -> range:
    """Return the line numbers of a connection, which are consecutive."""
    first = connection.lines[0].line if connection.lines else 0
    return range(first, first + len(connection.lines))


def _quote(line: Recorded) -> str:
    arrow = "->" if line.sender == "client" else "<-"
    text = line.text if line.text is not None else json.dumps(line.message, ensure_ascii=False)
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return f"{line.line} {arrow} {_safe(text)}"


def _xml(text: str) -> str:
    """Return `text`, with a replacement for each character that XML does not allow."""
    return _NOT_XML.sub("�", text)


def _safe(text: str) -> str:
    """Return `text` with an escape such as `\\u202e` for each character that could hide, reorder or forge text."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)

"""Measures what a model reads again after compaction: `python -m benchmarks.working_set [seeds]`.

A scripted agent works on a long task. It needs facts from files, changes files, runs commands and uses their results.
It repeats a call exactly when its context no longer shows what it needs. The files in use take a given share of half of
the target, and change gradually. The rows compare crow with the same compactor without files in its checkpoints, with
one that knows the odds, and with one that knows the future. The one that knows the future hides last and shows first
what is needed next (Belady's rule). The one that knows the odds goes by the probability with which the next step needs
a file. No rule that knows neither can be better than that one.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio

from benchmarks.retention import PROMPT, Session
from benchmarks.rows import Row, arguments, report
from crow.agent.compaction import compactor, planner
from crow.agent.compaction.checkpoint import FileInUse, call_arguments, files_in_use, masking_order
from crow.domain.entries import Assistant, Checkpoint, Entry, ToolResult, TurnEnd
from crow.domain.messages import AssistantMessage, Message, ToolMessage, UserMessage
from crow.domain.rendering import parts_text
from crow.domain.tokens import estimate_text
from crow.llm import ModelInfo, Request
from tests.support.compaction import AnsweringModel, compactor_on
from tests.support.scripted_model import Say

__all__ = ["Task", "Work", "run"]

WINDOWS = (16_000, 32_000, 64_000, 128_000)
SHARES = (0.5, 1.0, 2.0)
PHASES = 8
USES = 10
"""How often a file is used in a phase, on average."""

MAX_AGAIN = 5
"""If the files in use fit into half of the target, at most so many percent of the bytes read may be read again."""

FILLER = "the parser reads one byte at a time and never looks back, whatever the server sends; "
Kind = Literal["need", "edit", "run", "use", "rule"]
Policy = Literal["crow", "no files shown", "knows the odds", "knows the future"]


@dataclass(frozen=True, slots=True)
class Step:
    """Something that the task needs: the fact `index` of the file `name`, a change of that fact, a run of the command
    `name`, the result of that command, or a prompt with a rule."""

    kind: Kind
    name: str
    index: int = 0


class Task:
    """A task made from a seed. In each phase, files of about `used_bytes` are in use. Half of them stay in use in the
    next phase, and the others are not needed again."""

    def __init__(self, seed: int, used_bytes: int) -> None:
        chance = random.Random(seed)
        self.facts: dict[str, tuple[str, ...]] = {}
        self.steps = [Step("rule", "0")]
        self.odds: list[dict[str, float]] = [{}]
        """For each step, how likely it was to need each file, in proportion."""
        self._uses: dict[str, list[int]] = {}
        mean = used_bytes / 10 / len(text_of_file("", [""]))
        using: list[str] = []
        commands = 0
        for _ in range(PHASES):
            chance.shuffle(using)
            del using[len(using) // 2 :]
            while sum(len(text_of_file(name, self.facts[name])) for name in using) < used_bytes:
                name = f"/repo/src/module_{len(self.facts)}.py"
                count = max(1, min(round(mean * 2), round(mean * chance.lognormvariate(0, 0.5))))
                self.facts[name] = tuple(random_word(chance) for _ in range(count))
                using.append(name)
            weights = [(1 + place) ** -0.5 for place in range(len(using))]
            for _ in range(USES * len(using)):
                draw, (name,) = chance.random(), chance.choices(using, weights)
                if draw < 0.7:
                    index = chance.randrange(len(self.facts[name]))
                    self.steps.append(Step("need" if draw < 0.55 else "edit", name, index))
                elif draw < 0.97:
                    commands += 1
                    self.steps += [Step("run", f"check-{commands}")]
                    self.steps += [Step("use", f"check-{commands}")] * (chance.random() < 0.5)
                else:
                    self.steps.append(Step("rule", str(len(self.steps))))
            odds = dict(zip(using, weights, strict=True))
            self.odds += [odds] * (len(self.steps) - len(self.odds))
        for place, step in enumerate(self.steps):
            self._uses.setdefault(step.name, []).append(place)

    def next_use(self, name: str, now: int) -> float:
        """The next step that needs this file or command; infinite if there is none."""
        return next((place for place in self._uses.get(name, ()) if place >= now), math.inf)


@dataclass(slots=True)
class Work:
    """What was done. Sizes are in bytes. The lost rules and decisions are those that the model does not see at the
    end."""

    read: int = 0
    read_again: int = 0
    calls: int = 0
    calls_repeated: int = 0
    lost_rules: int = 0
    lost_decisions: int = 0
    passes: Counter[str] = field(default_factory=Counter)


class Agent:
    """Works on a task."""

    def __init__(self, task: Task, seed: int, window: int, policy: Policy) -> None:
        self.task = task
        self.work = Work()
        self._policy = policy
        self._chance = random.Random(seed)
        self._session = Session()
        info = ModelInfo(name="scripted", endpoint="scripted", context_window=window)
        self._session.model = AnsweringModel(self._summarise, info)
        self._facts = {name: list(facts) for name, facts in task.facts.items()}
        self._now = 0
        self._read: set[str] = set()
        self._rules: list[str] = []
        self._decisions: list[str] = []

    async def run(self) -> None:
        """Do all steps of the task."""
        await self._session.record(PROMPT)
        for place, step in enumerate(self.task.steps):
            self._now = place
            await self._do(step)
            if self._chance.random() < 0.04 and self._has_room_for_decisions():
                await self._decide()
        self.work.lost_rules = sum(not self._sees(rule) for rule in self._rules)
        self.work.lost_decisions = sum(not self._sees(decision) for decision in self._decisions)

    async def _do(self, step: Step) -> None:
        match step.kind:
            case "rule":
                await self._prompt(step.name)
            case "need" | "edit":
                facts = self._facts[step.name]
                fact = fact_line(step.name, step.index, facts[step.index])
                if not self._sees(fact):
                    await self._read_file(step.name)
                if step.kind == "edit":
                    facts[step.index] = random_word(self._chance)
                    new = fact_line(step.name, step.index, facts[step.index])
                    await self._call("edit_file", "Edited.", path=step.name, old_text=fact, new_text=new)
                elif self._chance.random() < 0.5:
                    await self._say(f"As {step.name} says.")
            case "run":
                await self._execute(step.name)
            case "use":
                if not self._sees(f"RESULT {step.name} = "):
                    self.work.calls_repeated += 1
                    await self._execute(step.name)

    async def _prompt(self, name: str) -> None:
        if self._rules:
            await self._session.record(TurnEnd(stop="end_turn"))
        rule = f"RULE {name} is {random_word(self._chance)}."
        self._rules.append(rule)
        await self._session.say(f"{rule} {FILLER * self._chance.randrange(1, 6)}")

    async def _read_file(self, name: str) -> None:
        text = text_of_file(name, self._facts[name])
        self.work.read += len(text)
        self.work.read_again += len(text) if name in self._read else 0
        self._read.add(name)
        await self._call("read_file", text, path=name)

    async def _execute(self, command: str) -> None:
        output = FILLER * self._chance.choice([2, 10, 40, 80]) + f"\nRESULT {command} = done\n"
        await self._call("shell", output, command=f"make {command}")

    async def _decide(self) -> None:
        self._decisions.append(f"DECISION {len(self._decisions)} is {random_word(self._chance)}.")
        await self._say(self._decisions[-1])

    async def _say(self, text: str) -> None:
        await self._make_room()
        await self._session.record(Assistant(text=text, message_id="m", endpoint="scripted"))

    async def _call(self, tool: str, output: str, **fields: str) -> None:
        await self._make_room()
        self.work.calls += 1
        await self._session.step(tool, output, fields, edits=tool == "edit_file")

    async def _make_room(self) -> None:
        before = self._session.branch.leaf
        await self._compactor().make_room()
        if self._session.branch.leaf != before:
            self.work.passes[type(self._session.branch.entries[-1].body).__name__] += 1

    def _compactor(self) -> compactor.Compactor:
        async def read_file(path: str) -> str | None:
            return text_of_file(path, self._facts[path])

        more: dict[str, Any] = {} if self._policy == "no files shown" else {"read_file": read_file}
        return compactor_on(self._session.branch, self._session.model, **more)

    def _has_room_for_decisions(self) -> bool:
        return estimate_text("\n".join(self._decisions)) * 4 < self._compactor().gauge.limits().summary

    def _sees(self, words: str) -> bool:
        return any(words in text_of(message) for message in self._session.branch.context().messages)

    @staticmethod
    def _summarise(request: Request) -> Say:
        """The ideal model. It copies all rules and decisions, then as many results as fit."""
        text = "\n".join(map(text_of, request.messages))  # the last one may have the transcript, too
        words = int(re.findall(r"at most (\d+) words", text)[-1])
        lines = [*dict.fromkeys(re.findall(r"(?:RULE|DECISION) \d+ is \w+\.", text))]
        for result in reversed(dict.fromkeys(re.findall(r"RESULT \S+ = \w+", text))):
            if estimate_text("\n".join([*lines, result])) > words:
                break
            lines.append(result)
        return Say(text=["\n".join(["## Facts", *lines])])

    def masking_order(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Like crow's, but files and results that are needed next, or most likely, come last."""
        arguments_of = call_arguments(entries)
        results = {entry.id: entry.body for entry in entries if isinstance(entry.body, ToolResult)}
        newest: set[str] = set()
        ranked = []
        for entry in sorted(masking_order(entries), reverse=True):
            result = results[entry]
            found = re.search(r"/repo/\S+\.py|check-\d+", arguments_of.get(result.call, "{}"))
            is_useful = found is not None and result.name != "edit_file" and found[0] not in newest
            if found is not None and is_useful:
                newest.add(found[0])
            ranked.append((-self._distance(found[0]) if found and is_useful else -math.inf, entry))
        return tuple(entry for _, entry in sorted(ranked))

    def files_in_use(self, previous: Checkpoint | None, entries: Sequence[Entry]) -> tuple[FileInUse, ...]:
        """All files that were read, those that are needed next, or most likely, first."""
        seen = {file.path: file for file in files_in_use(previous, entries)}
        uses = {name: self._distance(name) for name in self._read}
        return tuple(
            seen.get(name) or FileInUse(path=name, tokens=len(text_of_file(name, self._facts[name])) // 4, entry=None)
            for name in sorted(uses, key=uses.__getitem__)
        )

    def _distance(self, name: str) -> float:
        """How far away the next use of a file or a result is, as far as the policy knows; infinite if there is none."""
        if self._policy == "knows the future" or name not in self.task.facts:
            return self.task.next_use(name, self._now)
        odds = self.task.odds[self._now]
        return sum(odds.values()) / odds[name] if name in odds else math.inf


def fact_line(name: str, index: int, fact: str) -> str:
    return f"FACT {name} {index} = {fact}"


def text_of_file(name: str, facts: Sequence[str]) -> str:
    return "".join(f"{FILLER * 9}\n{fact_line(name, index, fact)}\n" for index, fact in enumerate(facts))


def random_word(chance: random.Random) -> str:
    return f"{chance.getrandbits(48):012x}"


def text_of(message: Message) -> str:
    match message:
        case AssistantMessage(text=text, calls=calls):
            return text + "".join(call.arguments for call in calls)
        case UserMessage(parts=parts):
            return parts_text(parts)
        case ToolMessage(text=text):
            return text
        case _:
            return ""


async def run(seed: int, window: int, share: float, policy: Policy = "crow") -> Work:
    """Run a task whose files in use take `share` of half of the target."""
    empty = Session()
    empty.model = AnsweringModel(
        lambda _: Say(), ModelInfo(name="scripted", endpoint="scripted", context_window=window)
    )
    await empty.record(PROMPT)
    limits = compactor_on(empty.branch, empty.model).gauge.limits()
    task = Task(seed, int((limits.target - limits.fixed) / 2 * 4 * share))
    agent = Agent(task, seed, window, policy)
    if policy in ("crow", "no files shown"):
        await agent.run()
        return agent.work
    # There is no other way to tell the compactor what it cannot know.
    changed: Any = planner
    changed.masking_order, changed.files_in_use = agent.masking_order, agent.files_in_use
    changed = compactor
    changed.files_in_use = agent.files_in_use
    try:
        await agent.run()
    finally:
        changed.files_in_use = files_in_use
        changed = planner
        changed.masking_order, changed.files_in_use = masking_order, files_in_use
    return agent.work


def rows_of(share: float, window: int, policy: Policy, works: Sequence[Work], optimum: Sequence[Work]) -> list[Row]:
    name = f"{share:g} of half of the target, window {window // 1000}k, {policy}"
    again = [100 * work.read_again / work.read for work in works]
    whole = 100 * sum(work.read_again for work in works) / sum(work.read for work in works)
    limit = MAX_AGAIN if policy == "crow" and share <= 1 else None
    made = [Row(f"{name}: bytes read again, of those read", whole, max(again), "%", limit)]
    if least := sum(work.read_again for work in optimum):
        ratio = sum(work.read_again for work in works) / least
        made.append(Row("  as a multiple of what knowing the future takes", ratio, ratio, "×"))
    if policy == "crow":
        repeated = [100 * work.calls_repeated / work.calls for work in works]
        lost = [work.lost_rules + work.lost_decisions for work in works]
        passes = [work.passes.total() for work in works]
        made += [
            Row("  commands repeated, of all calls", sum(repeated) / len(repeated), max(repeated), "%", 2),
            Row("  rules and decisions not in view at the end", sum(lost), max(lost), "", 0),
            Row("  masks and checkpoints", sum(passes) / len(passes), max(passes), ""),
        ]
    return made


async def main(seeds: int, file: Path | None) -> int:
    rows: list[Row] = []
    policies: tuple[Policy, ...] = ("crow", "no files shown", "knows the odds", "knows the future")
    for share in SHARES:
        for window in WINDOWS:
            works = {policy: [await run(seed, window, share, policy) for seed in range(seeds)] for policy in policies}
            for policy in policies:
                rows += rows_of(share, window, policy, works[policy], works["knows the future"])
    report(rows, file)
    return any(row.is_over for row in rows)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=3, help="tasks for each row")
    options = parser.parse_args()
    sys.exit(anyio.run(main, options.seeds, options.json))

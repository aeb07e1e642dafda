"""Measures what survives compaction, without a language model: `python -m benchmarks.retention [seeds]`.

A scripted session states a fact in every user message and is compacted 1, 3 and 10 times by a summariser that says
nothing. Then every fact must be in the context, every modified file must be listed, and `recall` must return every
covered entry whole. The exit code is 1 if something was lost.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from benchmarks.rows import Row, arguments, report
from crow.agent.compaction.compactor import Compactor
from crow.agent.history.recall import BranchLog, text_of
from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Diff,
    Entry,
    Location,
    NewEntry,
    Prompt,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import Text, ToolSpec
from crow.domain.tokens import estimate_text
from crow.llm import ModelInfo
from crow.store import Store
from crow.tools import RecallQuery
from tests.support.compaction import AnsweringModel, Notes, branch_of, compactor_on
from tests.support.memory_store import MemoryStore
from tests.support.scripted_model import Say, call

__all__ = ["Retention", "Session", "retention"]

COMPACTIONS = (1, 3, 10)
PIN_TOKENS = 14
"""Tokens of the lines around a pinned message."""

INFO = ModelInfo(name="silent", endpoint="scripted silent", context_window=32_000)
TOOLS = tuple(
    ToolSpec(name=name, description="What it does. " * 12, input_schema={"type": "object"})
    for name in ("read_file", "edit_file", "shell")
)
PROMPT = Prompt(system="You are a coding agent. " * 60, tools=TOOLS, cwd="/repo", model="silent")
FILLER = "The parser reads one byte at a time and never looks back, whatever the server sends. "
SUMMARY = Say(text=["## Done\nThe tests were run."])


class Session:
    """A branch in memory, and the steps of a turn on it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.branch = branch_of(self.store, Notes())
        self.model = AnsweringModel(lambda _: SUMMARY, INFO)

    def compactor(self) -> Compactor:
        return compactor_on(self.branch, self.model)

    async def record(self, body: Body) -> Entry:
        (entry,) = await self.branch.record([NewEntry(body=body, estimate=self.branch.context().estimate)])
        return entry

    async def say(self, text: str) -> Entry:
        cut = self.compactor().gauge.cut_prompt(text)
        return await self.record(User(parts=(Text(text=text),), message_id="m", cut=cut))

    async def step(self, name: str, output: str, fields: dict[str, str], *, edits: bool = False) -> Entry:
        """The model calls a tool, which returns `output`."""
        called = call(name, call_id=f"c{self.branch.leaf}", **fields)
        text = f"Entry {self.branch.leaf}."
        asked = await self.record(Assistant(text=text, message_id="m", calls=(called,), endpoint=INFO.endpoint))
        path = fields.get("path")
        return await self.record(
            ToolResult(
                call=CallRef(assistant=asked.id, index=0),
                name=name,
                text=output,
                announcement=Announcement(
                    title=name,
                    locations=(Location(path=path),) if path else (),
                    diffs=(Diff(path=path, old_text="a", new_text="b"),) if path and edits else (),
                ),
                cut=self.compactor().gauge.cut_result(output),
            )
        )


@dataclass(slots=True)
class Retention:
    """What was lost after some compactions. `facts` and `covered` count what there was."""

    compactions: int
    facts: int = 0
    covered: int = 0
    lost_facts: list[str] = field(default_factory=list)
    lost_files: list[str] = field(default_factory=list)
    lost_entries: list[int] = field(default_factory=list)


async def retention(compactions: int, seed: int) -> Retention:
    """Run turns of up to six steps until the session was compacted this often."""
    chance, session = random.Random(seed), Session()
    facts: dict[int, str] = {}
    modified: dict[int, str] = {}
    done = 0

    async def prompt() -> None:
        fact = f"fact-{chance.getrandbits(32):08x}"
        facts[(await session.say(f"Please do the next thing. {fact} holds.")).id] = fact

    await session.record(PROMPT)
    while done < compactions:
        session.branch.turn += 1
        await prompt()
        if session.branch.turn == 4:
            await session.say(FILLER * 400)
        for _ in range(chance.randint(1, 6)):
            before = session.branch.projection.checkpoint
            await session.compactor().make_room()
            done += session.branch.projection.checkpoint is not before
            name, path = chance.choice(("read_file", "edit_file", "shell")), f"/src/{chance.randrange(200)}.py"
            edits = name == "edit_file"
            entry = await session.step(name, FILLER * chance.choice([4, 16, 80]), {"path": path}, edits=edits)
            if edits:
                modified[entry.id] = path
        await session.record(TurnEnd(stop="end_turn"))
    await prompt()
    return await measured(session, Retention(compactions), facts, modified)


async def measured(session: Session, result: Retention, facts: dict[int, str], modified: dict[int, str]) -> Retention:
    """Look for all facts and files in the context, and recall every covered entry."""
    checkpoint = session.branch.projection.checkpoint
    assert checkpoint is not None
    body = checkpoint.body
    assert isinstance(body, Checkpoint)
    beyond, context = beyond_budget(session), repr(session.branch.context().messages)
    planted = [fact for entry, fact in facts.items() if entry not in beyond]
    result.facts, result.lost_facts = len(planted), [fact for fact in planted if fact not in context]
    paths = {path for entry, path in modified.items() if entry < (body.first_kept or checkpoint.id)}
    result.lost_files = sorted(paths - set(body.files_modified))
    store: Store = session.store  # type: ignore[assignment]  # recall of an entry needs no more of it
    log = BranchLog(store, session.branch)
    for entry in session.store.path("s"):
        if (body.first_covered or 0) <= entry.id <= (body.last_covered or 0):
            result.covered += 1
            if text_of(entry) not in await log.recall(RecallQuery(entry=entry.id), limit=1):
                result.lost_entries.append(entry.id)
    return result


def beyond_budget(session: Session) -> set[int]:
    """User messages that do not fit among the pins if all newer ones are kept, each within half of the room."""
    budget = session.compactor().gauge.limits().pins
    first, *users, last = [entry for entry in session.store.path("s") if isinstance(entry.body, User)]
    costs = {entry.id: min(budget // 2, PIN_TOKENS + estimate_text(text_of(entry))) for entry in (first, *users, last)}
    left = budget - costs[first.id] - costs[last.id]
    beyond = set()
    for entry in reversed(users):
        left -= costs[entry.id]
        if left < 0:
            beyond.add(entry.id)
    return beyond


def retention_rows(results: Sequence[Retention]) -> list[Row]:
    made = []
    for count in COMPACTIONS:
        column = [result for result in results if result.compactions == count]
        after = f"after {count} compaction{'s' * (count > 1)}"
        lost = {
            "facts of the user not in view": [len(each.lost_facts) for each in column],
            "modified files not listed": [len(each.lost_files) for each in column],
            "covered entries that recall does not give": [len(each.lost_entries) for each in column],
        }
        made += [Row(f"{after}: {what}", sum(each), max(each), "", 0) for what, each in lost.items()]
    return made


async def main(seeds: int, file: Path | None) -> int:
    kept = retention_rows([await retention(count, seed) for count in COMPACTIONS for seed in range(seeds)])
    report(kept, file)
    return any(row.is_over for row in kept)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=10, help="sessions for each number of compactions")
    options = parser.parse_args()
    sys.exit(anyio.run(main, options.seeds, options.json))

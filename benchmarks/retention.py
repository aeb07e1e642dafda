"""What survives compaction, and what it costs, without a language model: `python -m benchmarks.retention [seeds]`.

A scripted session plants a fact in every prompt, in the head, middle and tail of every tool output and at the start
and end of every answer, and is compacted 1, 3 and 10 times by a summariser that only extracts the beginning of each
message. Then each fact is looked for in the context, and through `recall`. The same session goes through the naive
algorithm (a summary and the last ten messages) for comparison of cost. Another script works on the same few files again
and again, and counts how many stay in view after a mask. Ends with 1 if what must survive did not.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeGuard

import anyio

from benchmarks.rows import Row, arguments, report
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.recall import BranchLog, text_of
from crow.domain.entries import (
    Announcement,
    Assistant,
    CallRef,
    Checkpoint,
    Diff,
    Entry,
    Location,
    Mask,
    NewEntry,
    Prompt,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from crow.domain.rendering import parts_text
from crow.domain.tokens import estimate_message, estimate_text, estimate_tools
from crow.llm import ModelInfo, Request
from crow.store import Store
from tests.support.compaction import AnsweringModel, Notes, branch_of, compactor_on
from tests.support.memory_store import MemoryStore
from tests.support.paths import problems
from tests.support.scripted_model import Say, call

__all__ = ["Found", "Retention", "WorkingSet", "retention", "working_set"]

WINDOW = 32_000
KEPT_BY_NAIVE = 10
COMPACTIONS = (1, 3, 10)
PIN_TOKENS = 14
"""Tokens of the lines around a pinned message."""

INFO = ModelInfo(name="extractive", endpoint="scripted extractive", context_window=WINDOW)
TOOLS = tuple(
    ToolSpec(name=name, description="What it does. " * 12, input_schema={"type": "object"})
    for name in ("read_file", "edit_file", "shell")
)
SYSTEM = "You are a coding agent. " * 60
FILLER = "The parser reads one byte at a time and never looks back, whatever the server sends. "

BranchTarget: TypeAlias = Literal[
    "user",
    "user, beyond the budget",
    "user, huge",
    "tool output, head",
    "tool output, middle",
    "tool output, tail",
    "answer, first line",
    "answer, last line",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A word that occurs once in the session; `entry` holds it."""

    word: str
    place: BranchTarget
    entry: int


@dataclass(slots=True)
class Found:
    """How many facts of one place there are, and where they were found."""

    planted: int = 0
    in_context: int = 0
    by_recall: int = 0


@dataclass(slots=True)
class Cost:
    """`tokens` sent, of which `for_summaries`; `kept_bytes` of `sent_bytes` were the prefix of the request before."""

    tokens: int = 0
    for_summaries: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0
    requests: int = 0
    invalid: int = 0
    last: bytes = b""

    def sent(self, messages: Sequence[Message]) -> None:
        data = "\n".join(map(repr, messages)).encode()
        self.tokens += estimate_tools(TOOLS) + sum(map(estimate_message, messages))
        self.sent_bytes += len(data)
        self.kept_bytes += common_prefix(self.last, data)
        self.requests += 1
        self.invalid += bool(problems(messages))
        self.last = data


@dataclass(slots=True)
class Retention:
    """After so many compactions. `covered` entries are no longer in view; `reached` of them `recall` gives whole."""

    compactions: int
    found: dict[BranchTarget, Found] = field(default_factory=lambda: defaultdict(Found))
    modified: int = 0
    modified_listed: int = 0
    covered: int = 0
    reached: int = 0
    steps: int = 0
    crow: Cost = field(default_factory=Cost)
    naive: Cost = field(default_factory=Cost)

    def failures(self) -> list[str]:
        """What must survive and did not."""
        failed = []
        users = self.found["user"]
        if users.in_context < users.planted:
            failed.append(
                f"{users.planted - users.in_context} facts in user messages within the budget are not in view"
            )
        if self.modified_listed < self.modified:
            failed.append(f"{self.modified - self.modified_listed} modified files are not listed")
        if self.reached < self.covered:
            failed.append(f"{self.covered - self.reached} covered entries are not reached by recall")
        lost = sum(found.planted - found.by_recall for found in self.found.values())
        return [*failed, *([f"{lost} facts are not found by recall"] if lost else [])]


async def retention(compactions: int, seed: int) -> Retention:
    """One session of `seed`, until it was compacted so many times."""
    session = Session(compactions, seed)
    await session.run()
    return session.result


class Session:
    """A scripted session on a branch in memory, and beside it the naive list of messages."""

    def __init__(self, compactions: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.result = Retention(compactions)
        self.facts: list[Fact] = []
        self.modified: dict[int, str] = {}
        self.store = MemoryStore()
        self.branch: Branch = branch_of(self.store, Notes())
        self.model = AnsweringModel(self.summary, INFO)
        self.naive: list[Message] = [SystemMessage(text=SYSTEM)]
        self.checkpoints = 0

    async def run(self) -> None:
        """Turns of one to six steps until the last compaction, then half a turn more."""
        await self.branch.record([NewEntry(body=Prompt(system=SYSTEM, tools=TOOLS, cwd="/work", model="extractive"))])
        while self.checkpoints < self.result.compactions:
            await self.turn()
        await self.say("One more thing.", "user")
        await self.measure()

    async def turn(self) -> None:
        compactor = compactor_on(self.branch, self.model)
        self.branch.turn += 1
        await self.say("Please do the next thing.", "user")
        if self.branch.turn == 4:
            await self.say(FILLER * 400, "user, huge")
        for _ in range(self.random.randint(1, 6)):
            await self.ask(compactor)
            await self.step(compactor)
            if self.checkpoints >= self.result.compactions:
                return
        await self.ask(compactor)
        await self.record(Assistant(text=self.answer_text(), message_id="m", endpoint=INFO.endpoint), "answer")
        await self.branch.record([NewEntry(body=TurnEnd(stop="end_turn"))])

    async def ask(self, compactor: Compactor) -> None:
        """What is sent to the model, by either algorithm."""
        before = self.branch.projection.checkpoint
        await compactor.make_room()
        self.checkpoints += self.branch.projection.checkpoint is not before
        self.result.crow.sent(self.branch.context().messages)
        self.compact_naively(compactor.gauge.limits().threshold)
        self.result.naive.sent(self.naive)
        self.result.steps += 1

    async def step(self, compactor: Compactor) -> None:
        name = self.random.choice([tool.name for tool in TOOLS])
        path = f"/proj/src/{name}/module_{self.random.randrange(200)}.py"
        called = call(name, call_id=f"c{len(self.store.entries)}", path=path)
        entry = await self.record(
            Assistant(text=self.answer_text(), message_id="m", calls=(called,), endpoint=INFO.endpoint), "answer"
        )
        text = self.output_text()
        diffs = (Diff(path=path, old_text="a", new_text="b"),) if name == "edit_file" else ()
        result = ToolResult(
            call=CallRef(assistant=entry.id, index=0),
            name=name,
            text=text,
            announcement=Announcement(title=f"{name} {path}", locations=(Location(path=path),), diffs=diffs),
            cut=compactor.gauge.cut_result(text),
        )
        stored = await self.record(result, "tool output", called)
        if diffs:
            self.modified[stored.id] = path

    async def say(self, text: str, place: BranchTarget) -> None:
        compactor = compactor_on(self.branch, self.model)
        half = len(text) // 2
        words = f"{text[:half]} {self.word()} {text[half:]}"
        body = User(parts=(Text(text=words),), message_id="m", cut=compactor.gauge.cut_prompt(words))
        await self.record(body, place)

    async def record(self, body: User | Assistant | ToolResult, place: str, called: ToolCall | None = None) -> Entry:
        (entry,) = await self.branch.record([NewEntry(body=body, estimate=self.branch.context().estimate)])
        found = re.findall(r"fact-[0-9a-f]{8}", text_of(entry))
        depths: Sequence[str] = {3: (", head", ", middle", ", tail"), 2: (", first line", ", last line")}.get(
            len(found), ("",)
        )
        for word, depth in zip(found, depths, strict=True):
            self.facts.append(Fact(word=word, place=place + depth, entry=entry.id))  # type: ignore[arg-type]
        match body:
            case User(parts=parts):
                self.naive.append(UserMessage(parts=parts))
            case Assistant(text=text, calls=calls):
                self.naive.append(AssistantMessage(text=text, calls=calls))
            case ToolResult(text=text) if called is not None:
                self.naive.append(ToolMessage(call_id=called.id, text=text))
        return entry

    def word(self) -> str:
        return f"fact-{self.random.getrandbits(32):08x}"

    def answer_text(self) -> str:
        return f"I note {self.word()} first.\n{FILLER * 3}\nAnd {self.word()} last."

    def output_text(self) -> str:
        filler = FILLER * self.random.choice([2, 8, 40])
        return f"{self.word()}\n{filler}\n{self.word()}\n{filler}\n{self.word()}"

    def summary(self, request: Request) -> Say:
        """The beginnings of the messages, the newest that fit, under the fixed headings."""
        self.result.crow.tokens += estimate_tools(request.tools) + sum(map(estimate_message, request.messages))
        self.result.crow.for_summaries += 1
        instruction = text_in(request.messages[-1])
        words = re.search(r"in at most (\d+) words", instruction)
        assert words is not None
        return Say(text=["## Done\n" + extract(request.messages[1:-1], int(words[1]) * 4)])

    def compact_naively(self, threshold: int) -> None:
        """The last ten messages stay, wherever that cuts; the summary follows them as a system message."""
        tokens = estimate_tools(TOOLS) + sum(map(estimate_message, self.naive))
        if tokens < threshold or len(self.naive) <= 2 * KEPT_BY_NAIVE:
            return
        head, tail = self.naive[1:-KEPT_BY_NAIVE], self.naive[-KEPT_BY_NAIVE:]
        self.result.naive.tokens += sum(map(estimate_message, head))
        self.result.naive.for_summaries += 1
        self.naive = [self.naive[0], *tail, SystemMessage(text=extract(head, 1_200))]

    async def measure(self) -> None:
        """Look for everything that was planted."""
        context = "\n".join(map(text_in, self.branch.context().messages))
        store: Store = self.store  # type: ignore[assignment]  # recall of an entry needs no more of it
        log = BranchLog(store, self.branch)
        beyond = self.beyond_the_budget()
        for fact in self.facts:
            found = self.result.found["user, beyond the budget" if fact.entry in beyond else fact.place]
            found.planted += 1
            found.in_context += fact.word in context
            found.by_recall += fact.word in await log.recall(query=None, entry=fact.entry, limit=1)
        checkpoint = self.branch.projection.checkpoint
        assert checkpoint is not None
        assert isinstance(checkpoint.body, Checkpoint)
        modified = {path for entry, path in self.modified.items() if entry < checkpoint.id}
        self.result.modified = len(modified)
        self.result.modified_listed = len(modified & set(checkpoint.body.files_modified))
        for entry in covered_by(checkpoint.body, self.store.path("s")):
            self.result.covered += 1
            self.result.reached += text_of(entry) in await log.recall(query=None, entry=entry.id, limit=1)

    def beyond_the_budget(self) -> set[int]:
        """Messages of the user, but the first, the last and the huge one, for which there is no room among the pins
        when all newer ones are kept, each of at most half of them."""
        budget = compactor_on(self.branch, self.model).gauge.limits().pins
        first, *users, last = [entry for entry in self.store.path("s") if isinstance(entry.body, User)]
        costs = {
            entry.id: min(budget // 2, PIN_TOKENS + estimate_text(text_of(entry))) for entry in (first, *users, last)
        }
        left = budget - costs[first.id] - costs[last.id]
        huge = {fact.entry for fact in self.facts if fact.place == "user, huge"}
        beyond = set()
        for entry in reversed(users):
            left -= costs[entry.id]
            if left < 0:
                beyond.add(entry.id)
        return beyond - huge


FILES = 7
ROUNDS = 10
COMMANDS = 6
FILE_BYTES = (4_000, 6_000, 8_000)


@dataclass(slots=True)
class WorkingSet:
    """How a model fared that needs the same files again and again and reads those that are not whole in view. Sizes in
    bytes; `whole`: files whole in view right after each mask."""

    file_bytes: int
    needed: int = 0
    read_again: int = 0
    whole: list[int] = field(default_factory=list)
    checkpoints: int = 0


async def working_set(file_bytes: int, seed: int) -> WorkingSet:
    """`ROUNDS` rounds that need all of `FILES` files, in any order, and then run `COMMANDS` commands."""
    chance = random.Random(seed)
    result = WorkingSet(file_bytes)
    branch = branch_of(MemoryStore(), Notes())
    await branch.record([NewEntry(body=Prompt(system=SYSTEM, tools=TOOLS, cwd="/work", model="extractive"))])
    await branch.record([NewEntry(body=User(parts=(Text(text="Make the tests pass."),), message_id="m"))])
    model = AnsweringModel(lambda _: Say(text=["## Done\nThe tests were run."]), INFO)
    contents = {
        f"/work/file_{number}.py": (f"# {number}\n" + FILLER * (file_bytes // len(FILLER) + 1))[:file_bytes]
        for number in range(FILES)
    }

    def in_view(path: str) -> bool:
        return any(contents[path] in message.text for message in branch.context().messages if is_output(message))

    async def run(name: str, text: str, **arguments: str) -> None:
        compactor = compactor_on(branch, model)
        await compactor.make_room()
        match branch.entries[-1].body:
            case Mask():
                result.whole.append(sum(map(in_view, contents)))
            case Checkpoint():
                result.checkpoints += 1
        called = call(name, call_id=f"c{branch.leaf}", **arguments)
        asked = Assistant(text="I go on.", message_id="m", calls=(called,), endpoint=INFO.endpoint)
        (entry,) = await branch.record([NewEntry(body=asked, estimate=branch.context().estimate)])
        announcement = Announcement(
            title=name, kind="read" if name == "read_file" else "execute", locations=locations_of(arguments)
        )
        ref = CallRef(assistant=entry.id, index=0)
        cut = compactor.gauge.cut_result(text)
        await branch.record(
            [NewEntry(body=ToolResult(call=ref, name=name, text=text, announcement=announcement, cut=cut))]
        )

    read: set[str] = set()
    for _ in range(ROUNDS):
        for path in chance.sample(sorted(contents), FILES):
            result.needed += file_bytes
            if not in_view(path):
                result.read_again += file_bytes if path in read else 0
                read.add(path)
                await run("read_file", contents[path], path=path)
        for _ in range(COMMANDS):
            command = f"pytest -k {chance.randrange(40)}"
            await run("shell", f"{command}\n" + FILLER * chance.randrange(40, 80), command=command)
    return result


def is_output(message: Message) -> TypeGuard[ToolMessage]:
    return isinstance(message, ToolMessage)


def locations_of(arguments: Mapping[str, str]) -> tuple[Location, ...]:
    return (Location(path=arguments["path"]),) if "path" in arguments else ()


def covered_by(checkpoint: Checkpoint, path: Sequence[Entry]) -> Iterator[Entry]:
    """The entries that a checkpoint says it stands for."""
    first, last = checkpoint.first_covered, checkpoint.last_covered
    assert first is not None
    assert last is not None
    return (entry for entry in path if first <= entry.id <= last)


def text_in(message: Message) -> str:
    return parts_text(message.parts) if isinstance(message, UserMessage) else message.text


def extract(messages: Sequence[Message], chars: int) -> str:
    """The first 90 characters of the messages, the newest that fit into `chars`, oldest first."""
    lines: list[str] = []
    for message in reversed(messages):
        line = f"- {' '.join(text_in(message).split())[:90]}"
        chars -= len(line) + 1
        if chars < 0:
            break
        lines.append(line)
    return "\n".join(reversed(lines))


def common_prefix(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "      –"


def tables(results: Sequence[Retention]) -> list[str]:
    """The tables, and what failed."""
    columns: dict[int, list[Retention]] = {count: [] for count in COMPACTIONS}
    for result in results:
        columns[result.compactions].append(result)
    places = sorted({place for result in results for place in result.found})
    print(
        f"{len(results)} sessions, window {WINDOW:,} tokens; still in context / found by recall, of what was planted\n"
    )
    print(f"{'after compactions':<24}" + "".join(f"{count:>22}" for count in columns))
    for place in places:
        cells = []
        for column in columns.values():
            found = [result.found[place] for result in column if place in result.found]
            planted = sum(each.planted for each in found)
            seen, recalled = sum(each.in_context for each in found), sum(each.by_recall for each in found)
            cells.append(f"{share(seen, planted)} / {share(recalled, planted)}")
        print(f"{place:<24}" + "".join(f"{cell:>22}" for cell in cells))
    for name, part, whole in (
        ("modified files listed", "modified_listed", "modified"),
        ("covered entries recalled", "reached", "covered"),
    ):
        sums = [
            (sum(getattr(r, part) for r in column), sum(getattr(r, whole) for r in column))
            for column in columns.values()
        ]
        print(f"{name:<24}" + "".join(f"{share(*each):>22}" for each in sums))
    print_costs(columns)
    return sorted({failure for result in results for failure in result.failures()})


def print_costs(columns: dict[int, list[Retention]]) -> None:
    print(f"\nper session: crow / the naive algorithm (a summary and the last {KEPT_BY_NAIVE} messages)\n")
    print(f"{'after compactions':<24}" + "".join(f"{count:>22}" for count in columns))
    rows: dict[str, list[str]] = defaultdict(list)
    for column in columns.values():
        count, crow, naive = len(column), [each.crow for each in column], [each.naive for each in column]
        rows["requests"].append(f"{sum(each.steps for each in column) / count:,.0f}")
        for name, one, other in (
            ("tokens sent", *(sum(cost.tokens for cost in costs) / count for costs in (crow, naive))),
            ("requests for summaries", *(sum(cost.for_summaries for cost in costs) / count for costs in (crow, naive))),
            ("invalid requests", *(sum(cost.invalid for cost in costs) / count for costs in (crow, naive))),
        ):
            rows[name].append(f"{one:,.1f} / {other:,.1f}" if one < 100 else f"{one:,.0f} / {other:,.0f}")
        kept = [
            share(sum(cost.kept_bytes for cost in costs), sum(cost.sent_bytes for cost in costs))
            for costs in (crow, naive)
        ]
        rows["bytes of same prefix"].append(" / ".join(kept))
    for name, cells in rows.items():
        print(f"{name:<24}" + "".join(f"{cell:>22}" for cell in cells))


def rows(results: Sequence[Retention]) -> list[Row]:
    """What must survive and did not, and the cost beside the naive algorithm's."""
    made = []
    for count in COMPACTIONS:
        column = [result for result in results if result.compactions == count]
        after = f"after {count} compaction{'s' * (count > 1)}"
        lost = {
            "facts of the user not in view": [
                found.planted - found.in_context
                for each in column
                for place, found in each.found.items()
                if place == "user"
            ],
            "facts that recall does not find": [
                found.planted - found.by_recall for each in column for found in each.found.values()
            ],
            "modified files not listed": [each.modified - each.modified_listed for each in column],
            "covered entries that recall does not give": [each.covered - each.reached for each in column],
        }
        made += [Row(f"{after}: {what}", sum(each), max(each), "", 0) for what, each in lost.items()]
        ratios = [each.crow.tokens / each.naive.tokens for each in column]
        what = f"{after}: tokens sent, of the naive algorithm's"
        made.append(Row(what, statistics.median(ratios), max(ratios), "×"))
    return made


def working_rows(results: Sequence[WorkingSet]) -> list[Row]:
    """How many of the files stay in view, and what is read again."""
    made = []
    for size in FILE_BYTES:
        column = [result for result in results if result.file_bytes == size]
        whole = [count for result in column for count in result.whole]
        again = [100 * result.read_again / result.needed for result in column]
        name = f"{FILES} files of {size / 1000:g} kB"
        made.append(Row(f"{name}: whole in view after a mask", statistics.mean(whole), min(whole), "files"))
        made.append(Row(f"{name}: bytes read again, of those needed", statistics.median(again), max(again), "%"))
    return made


async def main(seeds: int, file: Path | None) -> int:
    results = [await retention(count, seed) for count in COMPACTIONS for seed in range(seeds)]
    sets = [await working_set(size, seed) for size in FILE_BYTES for seed in range(seeds)]
    failures = tables(results)
    print()
    report([*rows(results), *working_rows(sets)], file)
    print("\n" + ("\n".join(f"FAILED: {failure}" for failure in failures) or "Everything that must survive did."))
    return 1 if failures else 0


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=10, help="sessions for each number of compactions")
    options = parser.parse_args()
    sys.exit(anyio.run(main, options.seeds, options.json))

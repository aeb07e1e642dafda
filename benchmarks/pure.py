"""Measures pure functions as a session grows: `python -m benchmarks.pure`.

The session has turns with one tool call each, and 10, 1,000 or 100,000 entries. The cost per entry and per request
should be the same for all sizes. Without checkpoints a long session's context is far larger than any window, so a
request costs as much as the bytes of its context. The rows with a checkpoint every 400 entries show real sessions.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.rows import Row, arguments, report
from crow.agent.compaction.budget import CompactionPolicy, Measure, limits_for
from crow.agent.compaction.planner import plan
from crow.domain.conversation import Projection
from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    Prompt,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.events import EntryStored
from crow.domain.messages import Text, ToolCall, ToolSpec, Usage
from crow.frontend.view import View
from crow.protocol.params import client_capabilities

__all__: Sequence[str] = ()

SIZES = (10, 1_000, 100_000)
ROUNDS = 7
PER_CHECKPOINT = 400
WORDS = "The nest is built of twigs, string and whatever else the wind has left. " * 4
TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object"})
SYSTEM = Prompt(system=WORDS * 20, tools=(TOOL,), cwd="/repo", model="m")
ANNOUNCED = Announcement(title="Read notes.txt", kind="read")


def path(entries: int, *, compacted: bool = False) -> list[Entry]:
    """A prompt entry and turns: user, a call, its start and result, an answer, the end."""
    made: list[Entry] = []

    def add(body: Body, usage: Usage | None = None) -> None:
        number = len(made) + 1
        made.append(
            Entry(
                id=number,
                parent=number - 1 or None,
                turn=number // 6 + 1,
                session="s",
                conversation=1,
                model="m",
                usage=usage,
                created_ms=0,
                body=body,
            )
        )

    add(SYSTEM)
    due = (
        entries % PER_CHECKPOINT or PER_CHECKPOINT
    )  # sessions of any length end equally far after their last checkpoint
    while len(made) < entries:
        if compacted and len(made) >= due:
            due += PER_CHECKPOINT
            add(
                Checkpoint(
                    compaction_id="c",
                    summary=WORDS,
                    first_kept=len(made),
                    method="prefix",
                    tokens_before=9,
                    tokens_after=1,
                )
            )
            add(SYSTEM)
        at = len(made) + 2
        call = ToolCall(id=f"c{at}", name="read_file", arguments='{"path": "notes.txt"}')
        ref = CallRef(assistant=at, index=0)
        add(User(parts=(Text(text=WORDS),), message_id="u"))
        add(
            Assistant(text="", message_id="a", calls=(call,), endpoint="here m"),
            Usage(input_tokens=900, output_tokens=9),
        )
        add(Started(call=ref, why="mode auto", announcement=ANNOUNCED))
        add(ToolResult(call=ref, name="read_file", text=WORDS, announcement=ANNOUNCED))
        add(Assistant(text=WORDS, message_id="b", endpoint="here m"), Usage(input_tokens=999, output_tokens=9))
        add(TurnEnd(stop="end_turn"))
    return made[:entries]


def ending(entries: Sequence[Entry]) -> Entry:
    """One more entry."""
    leaf = entries[-1]
    return replace(leaf, id=leaf.id + 1, parent=leaf.id, body=TurnEnd(stop="end_turn"), usage=None)


def times_s(work: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    taken = []
    for _ in range(rounds):
        gc.collect()
        since = time.perf_counter()
        work()
        taken.append(time.perf_counter() - since)
    return taken


def per_entry(what: str, work: Callable[[], object], entries: int) -> list[Row]:
    """Total in ms and time per entry in µs."""
    taken = times_s(work)
    middle, worst = statistics.median(taken), max(taken)
    return [
        Row(f"{what}, {entries:,} entries", middle * 1e3, worst * 1e3, "ms"),
        Row("  each", middle / entries * 1e6, worst / entries * 1e6, "µs"),
    ]


def each_us(what: str, work: Callable[[], object], times: int) -> Row:
    """µs per `work` when it runs `times` times in a row."""

    def again() -> None:
        for _ in range(times):
            work()

    taken = [took / times * 1e6 for took in times_s(again)]
    return Row(what, statistics.median(taken), max(taken), "µs")


def projections(entries: Sequence[Entry]) -> list[Row]:
    """The fold of a whole path, and the cost of one more entry and the next context."""
    count = len(entries)

    rows = per_entry("project a path for the model", lambda: Projection(entries), count)
    projection = Projection(entries)
    end = ending(entries)
    rows.append(each_us("  add an entry", lambda: projection.add(end), 2_000))

    def add_and_look() -> None:
        projection.add(end)
        projection.context()

    return [*rows, each_us("  add an entry and take the context", add_and_look, max(3, 20_000 // count))]


def replays(entries: Sequence[Entry]) -> list[Row]:
    """The history as client updates."""
    count = len(entries)

    def updates() -> None:
        view = View(client_capabilities({"clientCapabilities": {}}), session_id="s", is_reading=True)
        for entry in entries:
            view.apply(EntryStored(entry=entry))
        view.end_reading(is_running=False)

    return per_entry("log as updates", updates, count)


def plans(entries: Sequence[Entry]) -> list[Row]:
    """The decision before each request, with and without room in the window."""
    projection = Projection(entries)
    context = projection.context()
    roomy = limits_for(max(64_000, context.estimate * 4), None, context.fixed_estimate, CompactionPolicy())
    found = Measure(used=context.estimate, fixed=context.fixed_estimate, scale=1.0, is_reported=False)
    tight = limits_for(max(8_000, context.estimate), None, context.fixed_estimate, CompactionPolicy())
    full = Measure(used=tight.threshold + 1, fixed=context.fixed_estimate, scale=1.0, is_reported=False)
    count = len(entries)
    return [
        each_us(
            f"plan a compaction, {count:,} entries: there is room",
            lambda: plan(projection, roomy, found, "threshold"),
            100,
        ),
        *per_entry("plan a compaction, the window is full", lambda: plan(projection, tight, full, "threshold"), count),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows: list[Row] = []
    for size in SIZES:
        entries = path(size)
        rows += [*projections(entries), *replays(entries), *plans(entries)]
    for size in SIZES[1:]:
        projection = Projection(path(size, compacted=True))
        end = ending(projection.entries)

        def turn(projection: Projection = projection, end: Entry = end) -> None:
            projection.add(end)
            projection.context()

        rows.append(each_us(f"add an entry and take the context, {size:,} entries, compacted", turn, 500))
    report(rows, options.json)


if __name__ == "__main__":
    main()

"""Where the tokens and the time of a path went."""

from __future__ import annotations

from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    Mask,
    Prompt,
    Restore,
    Started,
    ToolResult,
    User,
)
from crow.domain.messages import Text, Usage
from crow.domain.spending import CacheBreak, Spending


class Path:
    """Feeds the entries of one path to a `Spending`."""

    def __init__(self) -> None:
        self.spending, self.id, self.now = Spending(), 0, 0
        self.model = "m"
        self.spending.begin()

    def add(self, body: Body, after_ms: int = 0, usage: Usage | None = None, cost: float | None = None) -> int:
        self.now += after_ms
        parent, self.id = self.id or None, self.id + 1
        self.spending.add(
            Entry(
                id=self.id,
                conversation=1,
                session="s",
                parent=parent,
                turn=1,
                body=body,
                model=self.model if isinstance(body, Assistant) else "",
                usage=usage,
                cost=cost,
                created_ms=self.now,
            )
        )
        return self.id

    def ask(self, sent: int, cached: int | None, after_ms: int = 0) -> int:
        usage = Usage(input_tokens=sent, output_tokens=10, cached_tokens=cached)
        return self.add(Assistant(text="", message_id="m"), after_ms, usage, 0.5)

    def use(self, answer: int, chars: int, *, wait_ms: int = 0, run_ms: int = 0, name: str = "grep") -> int:
        ref = CallRef(assistant=answer, index=0)
        self.add(Started(call=ref, why="allow once by the user" if wait_ms else "mode auto"), wait_ms)
        shown = Announcement(title=f"{name} {chars}")
        return self.add(
            ToolResult(call=ref, name=name, text="x" * chars, announcement=shown, duration_ms=run_ms), run_ms
        )


USER = User(parts=(Text(text="hi"),), message_id="u")


def test_each_break_has_its_cause_and_what_it_cost() -> None:
    path = Path()
    path.add(Prompt(system="s", tools=(), cwd="/", model="m", reason="first"))
    path.add(USER)
    path.ask(10_000, 0)
    path.ask(12_000, 9_984)
    path.add(Mask(before=2))
    masked = path.ask(11_000, 2_000)
    lost = path.ask(12_000, 0, after_ms=600_000)
    path.ask(12_500, 11_900)
    common = {"session": "s", "cost": 0.5}
    assert path.spending.breaks == [
        CacheBreak(entry=masked, cause="a compaction hid old tool outputs", tokens=9_000, created_ms=0, **common),  # type: ignore[arg-type]
        CacheBreak(
            entry=lost,
            cause="the endpoint did not find it in its cache, 10 min after the request before",
            tokens=11_000,
            created_ms=600_000,
            **common,  # type: ignore[arg-type]
        ),
    ]


def test_an_output_costs_as_often_as_it_is_sent_and_not_after_it_was_hidden() -> None:
    path = Path()
    path.add(USER)
    old = path.use(path.ask(100, None), 4_000, name="shell")
    path.ask(100, None)
    path.use(path.ask(100, None), 400)
    path.add(Checkpoint(compaction_id="c", summary="s", first_kept=old + 1))
    for _ in range(3):
        path.ask(100, None)
    path.spending.finish()
    found = [(each.title, each.tokens, each.sent, each.sent_tokens) for each in path.spending.outputs]
    assert found == [("shell 4000", 1_000, 2, 2_000), ("grep 400", 100, 3, 300)]
    assert [(use.name, use.calls, use.sent_tokens) for use in path.spending.top_tools()] == [
        ("shell", 1, 2_000),
        ("grep", 1, 300),
    ]


def test_an_output_counts_again_after_its_compaction_was_undone() -> None:
    path = Path()
    path.add(USER)
    path.use(path.ask(100, None), 4_000)
    path.add(Checkpoint(compaction_id="c", summary="s", first_kept=None))
    covered = path.use(path.ask(100, None), 400)
    checkpoint = path.add(Checkpoint(compaction_id="c", summary="s", first_kept=None))
    path.ask(100, None)
    path.add(Restore(entry=0, skill="review"))
    path.ask(100, None)
    path.add(Restore(entry=checkpoint))
    path.ask(100, None)
    path.spending.finish()
    assert [(each.entry, each.sent, each.sent_tokens) for each in path.spending.outputs] == [(covered, 1, 100)]


def test_the_calls_and_requests_of_other_models_do_not_count() -> None:
    path = Path()
    path.spending.model = "small"
    path.model = "big"
    path.use(path.ask(100, None), 4_000, run_ms=100)
    path.model = "small-1"
    path.use(path.ask(100, None), 400, run_ms=10)
    path.ask(100, None)
    path.model = "big"
    path.ask(100, None)
    path.spending.finish()
    assert [(use.calls, use.ms, use.sent_tokens) for use in path.spending.top_tools()] == [(1, 10, 100)]
    assert path.spending.tools_ms == 10


def test_only_the_ten_most_expensive_outputs_are_kept() -> None:
    path = Path()
    path.add(USER)
    for number in range(50):
        path.use(path.ask(100, None), 40 * (number + 1))
    path.ask(100, None)
    path.spending.finish()
    sizes = [each.sent_tokens for each in path.spending.outputs]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)


def test_time_is_the_models_the_tools_or_yours() -> None:
    path = Path()
    path.add(USER)
    path.use(path.ask(100, None, after_ms=2_000), 10, wait_ms=30_000, run_ms=500)
    path.ask(100, None, after_ms=1_000)
    spent = path.spending
    assert (spent.model_ms, spent.waiting_ms, spent.tools_ms) == (3_000, 30_000, 500)
    assert "3.0 s for the model, 0.5 s for tools, 30.0 s for your answers" in spent.text()


def test_an_entry_that_two_paths_share_counts_once() -> None:
    path = Path()
    path.ask(100, 50)
    path.spending.begin()
    path.id = 0
    path.ask(100, 50)
    assert (path.spending.requests, path.spending.tokens_in, path.spending.cached_share) == (1, 100, 0.5)

"""A fake endpoint that keeps its own accounts, and a driver that compares crow's accounts with them.

The driver sends random turns to a real process: answers, tool calls, retries, broken and continued streams, cancelled
turns, subagents, compactions and changed models. After each turn, every request that the endpoint charged for must be
stored once, under its session and model, with the numbers that the endpoint reported. Numbers that it did not report
must be marked as estimates.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from tests.support import fake_endpoint as fake
from tests.support.acp_client import Call, CrowProcess, RpcError
from tests.support.fake_endpoint import CUT, FakeEndpoint, Gate, Recorded, Reply
from tests.support.fork_server import command

__all__ = ["MODELS", "Driver", "Ledger", "settings_for", "stats_of"]

MODELS: Mapping[str, Mapping[str, float]] = {
    "alpha": {"input_price": 3.0, "cached_price": 0.3, "cache_write_price": 3.75, "output_price": 15.0},
    "beta": {"input_price": 0.5, "output_price": 1.5},
}
"""Two models and their prices in USD per million tokens."""


def settings_for(wire: str) -> str:
    """The `config.toml` that the driver needs, with the models on this wire."""
    return "".join(
        f'[models.{name}]\ncontext_window = 24000\nwire = "{wire}"\n'
        + "".join(f"{key} = {price}\n" for key, price in prices.items())
        for name, prices in MODELS.items()
    )


STYLES = ("end", "details", "each", "text", "input", "never", "junk")
"""How an endpoint reports usage: at the end, with details, with each chunk, as text, only the input, never, or with
numbers that mean nothing."""

COLUMNS = ("input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "reasoning_tokens")
MARK = re.compile(r"mark:(\w+)")
SUMMARY_REQUEST = "Your summary will replace the conversation"
Script = Callable[[Recorded], Reply]


@dataclass(kw_only=True)
class Charge:
    """A request that the endpoint charges for. `mark` names its session. `reported` has a number for each of `COLUMNS`
    that the endpoint has reported."""

    mark: str
    model: str
    sent: int
    made: int = 0
    reported: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Answers requests and keeps their charges, oldest first. Requests for a summary are answered at any time; all
    others take the next script."""

    def __init__(self, chance: random.Random) -> None:
        self.charges: list[Charge] = []
        self.scripts: list[Script] = []
        self._chance = chance

    def reply(self, request: Recorded) -> Reply:
        """Answer a request; an argument of `FakeEndpoint`."""
        if SUMMARY_REQUEST in json.dumps(request.body["messages"][-1]):
            if self._chance.random() < 0.2:
                # It does not repeat itself: crow would stop reading, and the endpoint may be some chunks ahead.
                return self.answer(" ".join(f"No summary {number}." for number in range(1_500)))(request)
            return self.answer(f"## Goal\nmark:{mark_of(request)}\n## Next\nGo on.")(request)
        assert self.scripts, f"an unexpected request: {request.body['messages'][-1]}"
        return self.scripts.pop(0)(request)

    def answer(
        self,
        text: str,
        *,
        thought: str = "",
        call: tuple[str, Mapping[str, object]] | None = None,
        before_end: Gate | None = None,
        ending: str = "whole",
    ) -> Script:
        """Return a script for an answer. At `before_end`, the endpoint waits after the text. An `ending` other than
        `whole` is `cut` (the connection breaks there), `broken` (the stream ends without a finish reason) or `hang`."""

        def script(request: Recorded) -> Reply:
            charge = Charge(mark=mark_of(request), model=request.body["model"], sent=len(request.raw) // 4)
            self.charges.append(charge)
            return Reply(steps=self._steps(charge, text, thought, call, before_end, ending))

        return script

    def _steps(
        self,
        charge: Charge,
        text: str,
        thought: str,
        call: tuple[str, Mapping[str, object]] | None,
        before_end: Gate | None,
        ending: str,
    ) -> Iterator[Any]:
        style = self._chance.choice(STYLES)
        deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": thought}] if thought else []
        deltas += [{"content": text[at : at + 500]} for at in range(0, len(text), 500)]
        for delta in deltas:
            charge.made += 3
            piece = fake.chunk(delta)
            if style == "each":
                piece["usage"] = self._report(charge, style)
            yield fake.sse(piece, done=False)
        if before_end is not None:
            yield before_end
        if ending == "cut":
            yield CUT
        if ending == "hang":
            yield fake.HANG
        if ending != "whole":
            return
        if call is not None:
            function = {"name": call[0], "arguments": json.dumps(call[1])}
            fragment = {"index": 0, "id": "c1", "type": "function", "function": function}
            yield fake.sse(fake.chunk({"tool_calls": [fragment]}), done=False)
        charge.made += 5
        usage = {"choices": [], "usage": self._report(charge, style)} if style != "never" else {"choices": []}
        yield fake.sse(fake.chunk(finish="stop" if call is None else "tool_calls"), usage)

    def _report(self, charge: Charge, style: str) -> dict[str, object]:
        """Return the usage that is sent, and note what it says."""
        counts: dict[str, int] = {"input_tokens": charge.sent}
        if style != "input":
            counts["output_tokens"] = charge.made
        sent: dict[str, object] = {"prompt_tokens": charge.sent, "completion_tokens": counts.get("output_tokens")}
        match style:
            case "details":
                counts |= {"cached_tokens": charge.sent // 2, "cache_write_tokens": charge.sent // 4}
                counts["reasoning_tokens"] = charge.made // 2
                cached = {key: counts[key] for key in ("cached_tokens", "cache_write_tokens")}
                sent |= {"prompt_tokens_details": cached}
                sent |= {"completion_tokens_details": {"reasoning_tokens": counts["reasoning_tokens"]}}
            case "text":
                sent = {key: str(value) for key, value in sent.items()}
            case "junk":
                junk: Sequence[object] = (-1, float("nan"), 10**30, "many", None, True, [7], {"tokens": 7}, "-5", "1e3")
                sent = {key: self._chance.choice(junk) for key in ("prompt_tokens", "completion_tokens")}
                counts = {}
        charge.reported = counts
        return sent


async def stats_of(env: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
    """Return what `crow sessions stats` prints in this environment, by session and model."""
    argv = [*command(), "sessions", "stats", "--by", "session,model", "--json"]
    done = await anyio.run_process(argv, env=env)
    return [json.loads(line) for line in done.stdout.splitlines()]


def mark_of(request: Recorded) -> str:
    """Return the mark of the session that sent the request. A session also has the marks of its subagents in its
    messages, and a summary may name one of them first."""
    found: list[str] = MARK.findall(json.dumps(request.body["messages"][1:]))
    assert found, "a request without a mark"
    return next((mark for mark in found if mark.startswith("s")), found[0])


class Driver:
    """Sends random turns to `agent` and compares the accounts after each. `home` is the process's `CROW_HOME`."""

    def __init__(self, agent: CrowProcess, endpoint: FakeEndpoint, home: Path, place: Path, seed: int) -> None:
        self.ledger = Ledger(random.Random(seed))
        self.turns = 0
        self.kinds: dict[str, int] = {}
        self.estimated = 0
        self._chance = random.Random(seed + 1)
        self._agent = agent
        self._home = home
        self._place = place
        self._sessions: dict[str, str] = {}  # mark to id
        self._checked = 0
        self._newest_entry = 0
        self._since = 0
        endpoint.wires = ("chat", "responses", "messages")
        endpoint.answer_with(self.ledger.reply)

    async def run(self, turns: int, *, sessions: int = 3) -> None:
        """Run `turns` random turns in `sessions` sessions."""
        for number in range(sessions):
            self._sessions[f"s{number}"] = await self._agent.new_session(self._place)
        ways = {
            "plain": self._plain,
            "tool": self._tool,
            "refused": self._refused,
            "broken": self._broken,
            "empty": self._empty,
            "continued": self._continued,
            "cancelled": self._cancelled,
            "task": self._task,
            "cancelled_task": self._cancelled_task,
            "failed": self._failed,
            "compact": self._compact,
            "undo": self._undo,
            "switch": self._switch,
        }
        names = list(ways)
        for number in range(turns):
            kind = names[number] if number < len(names) else self._chance.choice(names)
            mark = self._chance.choice([f"s{at}" for at in range(sessions)])
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            self._since = len(self._agent.log)
            try:
                call = await ways[kind](mark)
                with suppress(RpcError) if kind == "failed" else nullcontext():
                    await call.result()
                assert self.ledger.scripts == []
                self._check(mark, call)
            except BaseException as error:
                error.add_note(f"in turn {number} ({kind}) of session {mark}")
                raise
            self.turns += 1

    async def _plain(self, mark: str) -> Call:
        self._script(self.ledger.answer(self._text(), thought=self._chance.choice(("", "Let me think."))))
        return await self._start(mark)

    async def _tool(self, mark: str) -> Call:
        read = ("read_file", {"path": "README.md"})
        self._script(self.ledger.answer("I look.", call=read), self.ledger.answer(self._text()))
        return await self._start(mark)

    async def _refused(self, mark: str) -> Call:
        self._script(
            lambda _: fake.failing(503, "Overloaded", headers={"Retry-After": "0"}), self.ledger.answer(self._text())
        )
        return await self._start(mark)

    async def _broken(self, mark: str) -> Call:
        self._script(self.ledger.answer("", ending="broken"), self.ledger.answer(self._text()))
        return await self._start(mark)

    async def _empty(self, mark: str) -> Call:
        self._script(self.ledger.answer(""), self.ledger.answer(self._text()))
        return await self._start(mark)

    async def _continued(self, mark: str) -> Call:
        gate, words = Gate(), f"A part of number {self.turns} ends here."
        self._script(
            self.ledger.answer(words, before_end=gate, ending="cut"), self.ledger.answer(f" And on. {self._text()}")
        )
        call = await self._start(mark)
        await self._agent.wait_for_text(self._sessions[mark], words, since=self._since)
        gate.open()
        return call

    async def _cancelled(self, mark: str) -> Call:
        words = f"Number {self.turns} is about to be cancelled."
        self._script(self.ledger.answer(words, ending="hang"))
        call = await self._start(mark)
        await self._agent.wait_for_text(self._sessions[mark], words, since=self._since)
        await self._agent.notify("session/cancel", {"sessionId": self._sessions[mark]})
        return call

    async def _task(self, mark: str) -> Call:
        self._script(
            self.ledger.answer("I delegate.", call=self._task_call()),
            self.ledger.answer("", ending="broken"),
            self.ledger.answer("I look.", call=("read_file", {"path": "README.md"})),
            self.ledger.answer(self._text()),
            self.ledger.answer("The task is done."),
        )
        return await self._start(mark)

    async def _cancelled_task(self, mark: str) -> Call:
        words = f"Task {self.turns} is about to be cancelled."
        self._script(
            self.ledger.answer("I delegate.", call=self._task_call()), self.ledger.answer(words, ending="hang")
        )
        call = await self._start(mark)
        await self._agent.wait_for(lambda message: words in json.dumps(message), since=self._since)
        await self._agent.notify("session/cancel", {"sessionId": self._sessions[mark]})
        return call

    async def _failed(self, mark: str) -> Call:
        self._script(lambda _: fake.failing(400, "That is no good"))
        return await self._start(mark)

    async def _compact(self, mark: str) -> Call:
        return await self._agent.start_prompt(self._sessions[mark], "/compact")

    async def _undo(self, mark: str) -> Call:
        return await self._agent.start_prompt(self._sessions[mark], "/undo")

    async def _switch(self, mark: str) -> Call:
        option = {"sessionId": self._sessions[mark], "configId": "model", "value": self._chance.choice(list(MODELS))}
        await self._agent.request("session/set_config_option", option)
        return await self._plain(mark)

    def _script(self, *scripts: Script) -> None:
        self.ledger.scripts.extend(scripts)

    def _task_call(self) -> tuple[str, Mapping[str, object]]:
        return "task", {"description": "Look", "prompt": f"mark:c{self.turns} look into it"}

    def _text(self) -> str:
        return "words and more words " * self._chance.choice((1, 5, 50, 400))

    async def _start(self, mark: str) -> Call:
        return await self._agent.start_prompt(self._sessions[mark], f"mark:{mark} number {self.turns}")

    def _check(self, mark: str, call: Call) -> None:
        """Compare what the last turn added."""
        charges, self._checked = self.ledger.charges[self._checked :], len(self.ledger.charges)
        rows = self._rows(f"id > {self._newest_entry}")
        for name in {charge.mark for charge in charges} | {mark}:
            session = self._session_of(name)
            expected = [expected_row(charge) for charge in charges if charge.mark == name]
            found = [row for row in rows if row["session"] == session]
            assert [row["model"] for row in found] == [model for model, _, _ in expected]
            counted = [known_counts(row) for row in found]
            assert counted == [counts for _, counts, _ in expected], f"{counted} is not {expected}"
            assert [row["estimated"] for row in found] == [estimated for _, _, estimated in expected]
        assert len(rows) == len(charges)
        self._newest_entry = max([self._newest_entry, *(row["id"] for row in rows)])
        self.estimated += sum(row["estimated"] is not None for row in rows)
        if call.outcome.exception() is None:
            assert self._agent.usage(call) == usage_of(rows)
        self._check_cost(mark)

    def _check_cost(self, mark: str) -> None:
        session = self._sessions[mark]
        family = f"session IN (SELECT '{session}' UNION SELECT id FROM sessions WHERE parent_id = '{session}')"
        cost = sum(price_of(row) for row in self._rows(family))
        told = self._agent.updates(session, "usage_update")[-1].get("cost", {}).get("amount", 0.0)
        assert abs(told - cost) < 1e-9, f"told {told}, but it cost {cost}"

    def check_sums(self, stats: Sequence[Mapping[str, Any]]) -> None:
        """Compare `crow sessions stats --json --by session,model` and the views with the entries, which were compared
        with the ledger before."""
        rows = self._rows("1")
        with closing(self._open()) as sql:
            parents = dict(sql.execute("SELECT id, coalesce(parent_id, id) FROM sessions"))
            view = sql.execute(
                "SELECT session, model, requests, input_tokens, output_tokens, cached_tokens, cache_write_tokens,"
                " reasoning_tokens, estimated_requests, day FROM usage"
            ).fetchall()
            listed = sql.execute("SELECT session_id, tokens_in, tokens_out, tokens_cached, cost FROM session_list")
            by_session = {session: (*counts, cost) for session, *counts, cost in listed}
        assert {(each["session"], each["model"]): sums_of_stats(each) for each in stats} == {
            key: sums([row for row in rows if (parents[row["session"]], row["model"]) == key])
            for key in {(parents[row["session"]], row["model"]) for row in rows}
        }
        in_view: dict[tuple[str, str], tuple[int, ...]] = {}
        for session, model, *counts, _ in view:
            old = in_view.get((session, model), (0,) * len(counts))
            in_view[session, model] = tuple(a + (b or 0) for a, b in zip(old, counts, strict=True))
        assert in_view == {
            key: sums([row for row in rows if (row["session"], row["model"]) == key])
            for key in {(row["session"], row["model"]) for row in rows}
        }
        assert {(session, day) for session, *_, day in view} == {(row["session"], row["day"]) for row in rows}
        for session, (*tokens, cost) in by_session.items():
            own = [row for row in rows if parents[row["session"]] == session]
            assert tuple(tokens) == sums(own)[1:4]
            assert abs(cost - sum(map(price_of, own))) < 1e-9

    async def check_command(self, mark: str) -> None:
        """Compare the answer of `/usage` in a live session."""
        session, since = self._sessions[mark], len(self._agent.log)
        await self._agent.prompt(session, "/usage")
        answer = self._agent.text(session, since=since)
        family = f"session IN (SELECT '{session}' UNION SELECT id FROM sessions WHERE parent_id = '{session}')"
        requests, sent, made, *_, estimated = sums(self._rows(family))
        assert answer.startswith(f"This session used {sent:,} input tokens")
        assert f" {made:,} output tokens" in answer.partition(";")[0]
        assert f" in {requests:,} request" in answer.partition(";")[0]
        assert ("estimated" in answer) == bool(estimated)

    def _session_of(self, mark: str) -> str:
        """Return the id of the session, or of the subagent, with this mark."""
        if mark not in self._sessions:
            query = "SELECT session FROM messages WHERE role = 'user' AND session LIKE 'task-%' AND content LIKE ?"
            with closing(self._open()) as sql:
                ((self._sessions[mark],),) = sql.execute(query, (f"mark:{mark} %",)).fetchall()
        return self._sessions[mark]

    def _rows(self, where: str) -> list[dict[str, Any]]:
        """The entries with usage, oldest first."""
        with closing(self._open()) as sql:
            sql.row_factory = sqlite3.Row
            found = sql.execute(
                "SELECT *, date(created_ms / 1000, 'unixepoch') AS day FROM entries WHERE kind <> 'tool'"
                f" AND (input_tokens IS NOT NULL OR output_tokens IS NOT NULL OR cost IS NOT NULL) AND {where}"
                " ORDER BY id"
            )
            return [dict(row) for row in found]

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{(self._home / 'crow.db').as_uri()}?mode=ro", uri=True)


def expected_row(charge: Charge) -> tuple[str, dict[str, int], int | None]:
    """Return the model of a charge, its reported counts, and what must be estimated: 1 for the input, 2 for the output,
    3 for both."""
    estimated = ("input_tokens" not in charge.reported) + 2 * ("output_tokens" not in charge.reported)
    return charge.model, charge.reported, estimated or None


def known_counts(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of a row that are not estimates. Estimates must be positive or, for the output, zero."""
    estimated = row["estimated"] or 0
    assert row["input_tokens"] > 0
    assert row["output_tokens"] >= 0
    without = {name for bit, name in ((1, "input_tokens"), (2, "output_tokens")) if estimated & bit}
    return {name: row[name] for name in COLUMNS if row[name] is not None and name not in without}


def usage_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the usage that the response to a prompt with these requests must have."""
    if not rows:
        return None
    _, sent, made, *_ = sums(rows)
    optional = {
        name: sum(row[column] for row in rows if row[column] is not None)
        for name, column in (
            ("thoughtTokens", "reasoning_tokens"),
            ("cachedReadTokens", "cached_tokens"),
            ("cachedWriteTokens", "cache_write_tokens"),
        )
        if any(row[column] is not None for row in rows)
    }
    mark = {"_meta": {"crow": {"estimated": True}}} if any(row["estimated"] for row in rows) else {}
    return {"totalTokens": sent + made, "inputTokens": sent, "outputTokens": made, **optional, **mark}


def sums(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the number of requests, the sum of each of `COLUMNS`, and the number of estimated requests."""
    counts = (sum(row[name] or 0 for row in rows) for name in COLUMNS)
    return (len(rows), *counts, sum(row["estimated"] is not None for row in rows))


def sums_of_stats(total: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the same numbers from a row of `crow sessions stats --json`."""
    names = ("requests", "tokens_in", "tokens_out", "tokens_cached", "tokens_cache_written", "tokens_reasoning")
    return (*(total[name] for name in names), total["estimated"])


def price_of(row: Mapping[str, Any]) -> float:
    """Return what a request cost, and check that crow stored the same."""
    prices = MODELS[row["model"]]
    cached, written, stored = row["cached_tokens"] or 0, row["cache_write_tokens"] or 0, float(row["cost"])
    price = prices["input_price"]
    cost = (row["input_tokens"] - cached - written) * price + row["output_tokens"] * prices["output_price"]
    cost += cached * prices.get("cached_price", price) + written * prices.get("cache_write_price", price)
    assert abs(stored - cost / 1e6) < 1e-12
    return stored

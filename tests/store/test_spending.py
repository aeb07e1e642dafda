"""Where tokens went, beside the store's own sums."""

from __future__ import annotations

import random

import pytest

from crow.domain.entries import Checkpoint, Entry, ModelRequest, NewEntry, TurnEnd
from crow.domain.messages import Usage
from crow.store import Store, UsageTotal
from crow.store.spending import session_spending
from tests.store.scenes import begin, new_session, result, said

SESSIONS = 6


async def _turn(store: Store, session_id: str, rng: random.Random) -> None:
    start = await begin(store, session_id, f"p{rng.random()}")
    leaf, turn = start.id, start.turn
    for _ in range(rng.randrange(1, 4)):
        sent = rng.choice((None, rng.randrange(5_000)))
        usage = Usage(
            input_tokens=sent,
            output_tokens=rng.choice((None, rng.randrange(500))),
            cached_tokens=None if sent is None else rng.choice((None, rng.randrange(sent + 1))),
        )
        cost = rng.choice((None, rng.random()))
        answer = NewEntry(body=said("look", calls=1), model=rng.choice(("m1", "m2")), usage=usage, cost=cost)
        (stored,) = await store.append(session_id, leaf=leaf, turn=turn, entries=[answer])
        more = [NewEntry(body=result(stored.id, "x" * rng.randrange(9_000)), usage=usage, cost=cost)]
        if rng.random() < 0.3:
            more.append(NewEntry(body=ModelRequest(purpose="summary"), model="m1", usage=usage, cost=cost))
            more.append(NewEntry(body=Checkpoint(compaction_id="c", summary="so far", first_kept=None)))
        leaf = (await store.append(session_id, leaf=stored.id, turn=turn, entries=more))[-1].id
    end = NewEntry(body=TurnEnd(stop="end_turn"))
    (stored,) = await store.append(session_id, leaf=leaf, turn=turn, entries=[end], release=True)
    if rng.random() < 0.5:  # counts on a branch without another answer, too
        title = NewEntry(body=ModelRequest(purpose="title"), model="m1", usage=Usage(input_tokens=100), cost=0.1)
        await store.append(session_id, leaf=stored.id, turn=turn, entries=[title])


async def _answer(store: Store) -> Entry:
    leaf, usage = (await store.session("s1")).leaf, Usage(input_tokens=5_000, cached_tokens=0)
    (stored,) = await store.append(
        "s1", leaf=leaf, turn=1, entries=[NewEntry(body=said("look"), model="m1", usage=usage)]
    )
    return stored


async def test_a_cache_break_after_moves_names_the_last_move(store: Store) -> None:
    await store.create_session(new_session())
    await begin(store, "s1", "one")
    first = await _answer(store)
    for reason in ("undo", "retry"):
        left = await _answer(store)
        await store.move_leaf("s1", leaf=left.id, to=first.id, reason=reason)
    last = await _answer(store)
    causes = {found.entry: found.cause for found in (await session_spending(store, "s1")).breaks}
    assert causes[last.id] == "the session moved to another entry (retry)"


@pytest.mark.long
async def test_the_sums_of_random_sessions_equal_those_of_the_store(store: Store) -> None:
    rng = random.Random(1)
    for number in range(SESSIONS):
        session_id = f"s{number}"
        await store.create_session(new_session(session_id))
        await store.create_session(new_session(f"task{number}", parent_id=session_id))
        for _ in range(rng.randrange(1, 4)):
            await _turn(store, session_id, rng)
        await _turn(store, f"task{number}", rng)
        tail = await store.tail(session_id)
        if rng.random() < 0.7:  # an undone turn, whose requests were paid for
            await store.move_leaf(session_id, leaf=tail.row.leaf, to=tail.entries[0].id, reason="undo")
            await _turn(store, session_id, rng)
        await store.fork_session(session_id, f"fork{number}", entry=None, cwd="/repo", additional_directories=())
        await _turn(store, f"fork{number}", rng)
        for each in (session_id, f"fork{number}"):
            assert await _sums(store, each) == _sum_of(await store.usage_by_model(each))


async def _sums(store: Store, session_id: str) -> tuple[float, ...]:
    found = await session_spending(store, session_id)
    return (found.requests, found.tokens_in, found.tokens_cached, found.tokens_out, round(found.cost, 9))


def _sum_of(totals: tuple[UsageTotal, ...]) -> tuple[float, ...]:
    names = ("requests", "tokens_in", "tokens_cached", "tokens_out")
    sums = [sum(getattr(total, name) for total in totals) for name in names]
    return (*sums, round(sum(total.cost or 0.0 for total in totals), 9))

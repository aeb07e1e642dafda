"""Ceilings: never exceeded, fair between holders, and left clean by every order of ends and cancellations."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.tools.limits import FairLimiter
from tests.support.amounts import examples


@dataclass(eq=False)
class Request:
    """Somebody who wants a slot, and what has become of that."""

    holder: str | None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    end: anyio.Event = field(default_factory=anyio.Event)
    state: str = "waiting"

    async def run(self, limiter: FairLimiter, order: list[Request]) -> None:
        with self.scope:
            async with limiter.slot(self.holder):
                self.state = "running"
                order.append(self)
                await self.end.wait()
        self.state = "over"


async def settle() -> None:
    for _ in range(200):  # a slot may be handed on from one request to the next
        await checkpoint()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(["a", "b", None])),
        st.tuples(st.sampled_from(["end", "cancel", "end and cancel", "cancel twice"]), st.integers(0, 40)),
        st.tuples(st.just("rest"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=examples(20))
@given(ACTIONS, st.integers(1, 4), st.integers(1, 4))
def test_no_order_of_ends_and_cancels_exceeds_or_loses_a_slot(
    actions: list[tuple[str, str | int | None]], total: int, each: int
) -> None:
    async def play() -> None:
        limiter, requests, order = FairLimiter(total, each=each), list[Request](), list[Request]()
        async with anyio.create_task_group() as tasks:
            for action, which in actions:
                if action == "ask":
                    requests.append(Request(None if which is None else str(which)))
                    tasks.start_soon(requests[-1].run, limiter, order)
                elif action == "rest" or not requests:
                    await settle()
                else:
                    chosen = [requests[(int(which or 0) + step) % len(requests)] for step in (0, 1)]
                    if action.startswith("end"):
                        chosen[0].end.set()
                    if action.endswith("cancel"):
                        chosen[1].scope.cancel()
                    if action == "cancel twice":
                        chosen[0].scope.cancel()
                        chosen[1].scope.cancel()
                assert limiter.taken <= total
            await settle()
            running = [request.holder for request in requests if request.state == "running"]
            waiting = [request.holder for request in requests if request.state == "waiting"]
            assert (limiter.taken, limiter.waiting) == (len(running), len(waiting))
            assert all(running.count(holder) <= each for holder in ("a", "b", None))
            assert len(running) == total or all(running.count(holder) == each for holder in waiting)
            assert all(request.state == "over" for request in requests if request.scope.cancel_called)
            for request in requests:
                request.end.set()
        assert (limiter.taken, limiter.waiting) == (0, 0)
        for holder in ("a", "b", None):  # one holder's requests run in the order in which they were made
            mine = [requests.index(request) for request in order if request.holder == holder]
            assert mine == sorted(mine)

    anyio.run(play)


async def test_a_holder_with_many_requests_does_not_delay_the_others() -> None:
    limiter, order = FairLimiter(1), list[Request]()
    requests = [Request(holder) for holder in "aaaaaaaabc"]
    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(request.run, limiter, order)
            await settle()
        while len(order) < len(requests):
            order[-1].end.set()
            await settle()
        order[-1].end.set()
    assert "".join(str(request.holder) for request in order) == "aabcaaaaaa"


async def test_a_holder_takes_only_its_share_while_others_find_a_slot() -> None:
    limiter, order = FairLimiter(3, each=2), list[Request]()
    requests = [Request(holder) for holder in "aaab"]
    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(request.run, limiter, order)
        await settle()
        assert [request.state for request in requests] == ["running", "running", "waiting", "running"]
        tasks.cancel_scope.cancel()
    assert (limiter.taken, limiter.waiting) == (0, 0)


async def test_a_cancelled_task_gets_no_slot_even_if_one_is_free() -> None:
    limiter, order = FairLimiter(1), list[Request]()
    request = Request("a")
    request.scope.cancel()
    await request.run(limiter, order)
    assert (request.state, order, limiter.taken) == ("over", [], 0)


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_cancelled_wait_ends_at_once_even_if_the_slot_was_just_granted(is_granted: bool) -> None:
    limiter, order = FairLimiter(1), list[Request]()
    first, second = Request("a"), Request("b")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run, limiter, order)
        await settle()
        tasks.start_soon(second.run, limiter, order)
        await settle()
        if is_granted:
            first.end.set()
        second.scope.cancel()
        await settle()
        assert second.state == "over"
        assert limiter.taken == (0 if is_granted else 1)
        first.end.set()
    assert (limiter.taken, limiter.waiting, order) == (0, 0, [first])

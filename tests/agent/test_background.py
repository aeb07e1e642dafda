"""after_delay starts its work only if the block takes long."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from crow.agent.background import after_delay


async def test_a_short_block_starts_no_work() -> None:
    begun: list[str] = []

    async def work() -> None:
        begun.append("work")

    async with after_delay(0.0, work, again=True):
        pass
    await anyio.wait_all_tasks_blocked()
    assert begun == []


async def test_a_long_block_starts_the_work_once_and_waits_for_it() -> None:
    order: list[str] = []
    begun = anyio.Event()

    async def work() -> None:
        begun.set()
        with anyio.CancelScope():  # as only tasks may
            await anyio.lowlevel.checkpoint()
        order.append("work")

    async with after_delay(0.0, work):
        await begun.wait()
        order.append("block")
    order.append("behind")
    assert order == ["block", "work", "behind"]


async def test_repeated_work_never_overlaps() -> None:
    running = most = times = 0
    enough = anyio.Event()

    async def work() -> None:
        nonlocal running, most, times
        running, times = running + 1, times + 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        if times == 3:
            enough.set()

    async with after_delay(0.0, work, again=True):
        await enough.wait()
    assert (running, most) == (0, 1)
    assert times >= 3


async def test_a_cancelled_block_still_waits_for_the_work() -> None:
    ended: list[str] = []
    begun = anyio.Event()

    async def work() -> None:
        begun.set()
        await anyio.lowlevel.checkpoint()
        ended.append("work")

    with anyio.CancelScope() as scope:
        async with after_delay(0.0, work):
            await begun.wait()
            scope.cancel()
            await anyio.sleep_forever()
    assert ended == ["work"]

"""Tasks that were woken together go on one by one."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel

from crow.store.sqlite.connection import FairWakeup


class Passes:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()

    def _tick(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)


async def test_one_task_goes_on_in_each_pass_of_the_loop_in_the_order_they_came() -> None:
    wakeup, passes, gone = FairWakeup(), Passes(), list[tuple[int, int]]()

    async def go(number: int) -> None:
        await wakeup.wait()
        gone.append((number, passes.count))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(go, number)
    passes.stop()
    assert [number for number, _ in gone] == list(range(20))
    assert len({at for _, at in gone}) == 20


async def test_whoever_comes_alone_does_not_wait_and_one_who_was_cancelled_holds_up_nobody() -> None:
    wakeup, passes = FairWakeup(), Passes()
    await wakeup.wait()
    assert passes.count == 0
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wakeup.wait()
    await wakeup.wait()
    while passes.count < 4:
        await anyio.lowlevel.checkpoint()
    alone = passes.count
    await wakeup.wait()
    assert passes.count == alone
    passes.stop()

"""Tidying happens between turns, never during one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from crow.agent.idle import IdleTimer
from crow.domain.errors import StoreUnavailable


class Room:
    """Counts tidying; each one waits for `gate`."""

    def __init__(self) -> None:
        self.begun, self.ended = 0, 0
        self.has_begun = anyio.Event()
        self.gate = anyio.Event()
        self.error: Exception | None = None

    async def tidy(self) -> None:
        self.begun += 1
        self.has_begun.set()
        self.has_begun = anyio.Event()
        if self.error is not None:
            raise self.error
        await self.gate.wait()
        self.ended += 1


@asynccontextmanager
async def idling(room: Room, *, after_s: float = 0.0) -> AsyncIterator[IdleTimer]:
    idle = IdleTimer(room.tidy, after_s=after_s)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(idle.run)
            yield idle
            tasks.cancel_scope.cancel()


async def settled(wanted: int, room: Room) -> None:
    while room.begun < wanted:
        await room.has_begun.wait()
    await anyio.wait_all_tasks_blocked()


async def test_tidies_once_after_the_last_turn_and_not_before_the_first() -> None:
    room = Room()
    room.gate.set()
    async with idling(room) as idle:
        await anyio.wait_all_tasks_blocked()
        assert room.begun == 0
        with idle.turn():
            with idle.turn():
                await anyio.wait_all_tasks_blocked()
            await anyio.wait_all_tasks_blocked()
            assert room.begun == 0
        await settled(1, room)
        assert (room.begun, room.ended) == (1, 1)


async def test_a_new_turn_cancels_tidying_which_is_repeated_afterwards() -> None:
    room = Room()
    async with idling(room) as idle:
        idle.tidy_soon()
        await settled(1, room)
        with idle.turn():
            await anyio.wait_all_tasks_blocked()
            room.gate.set()
            await anyio.wait_all_tasks_blocked()
            assert (room.begun, room.ended) == (1, 0)
        await settled(2, room)
        assert (room.begun, room.ended) == (2, 1)


async def test_does_not_tidy_between_turns_in_quick_succession() -> None:
    room = Room()
    async with idling(room, after_s=60) as idle:
        for _ in range(3):
            with idle.turn():
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
        assert room.begun == 0


@pytest.mark.parametrize("error", [StoreUnavailable("crow.db is locked."), ZeroDivisionError("a fault of crow")])
async def test_failed_tidying_is_retried_after_the_next_turn(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    room = Room()
    room.error = error
    async with idling(room) as idle:
        idle.tidy_soon()
        await settled(1, room)
        assert "Tidying failed" in caplog.text
        assert str(error) in caplog.text
        room.error = None
        room.gate.set()
        with idle.turn():
            pass
        await settled(2, room)
        assert room.ended == 1


async def test_does_not_tidy_after_stop() -> None:
    room = Room()
    async with idling(room) as idle:
        idle.tidy_soon()
        await settled(1, room)
        idle.stop()
        room.gate.set()
        await anyio.wait_all_tasks_blocked()
        idle.tidy_soon()
        await anyio.wait_all_tasks_blocked()
        assert (room.begun, room.ended) == (1, 0)

"""Requests that end early."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import anyio
import pytest

from crow.frontend.requester import Requester
from crow.frontend.v2 import VersionTwo
from crow.store import Access, Store
from crow.store.principals import PrincipalStore
from tests.support.scripted_model import Say
from tests.support.shared_host import shared

pytestmark = pytest.mark.anyio


class SlowAccess(PrincipalStore):
    """A store that answers whether a session may be changed only after `answered` is set."""

    def __init__(self, store: Store, asked: anyio.Event, answered: anyio.Event) -> None:
        super().__init__(store, None)
        self._asked, self._answered = asked, answered

    async def require(self, session_id: str, need: Access) -> Access:
        self._asked.set()
        await self._answered.wait()
        return await super().require(session_id, need)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_prompt_that_is_cancelled_while_its_access_is_checked_does_not_run(
    tmp_path: Path, version: int
) -> None:
    asked, answered = anyio.Event(), anyio.Event()
    view = partial(SlowAccess, asked=asked, answered=answered)
    async with shared(tmp_path, Say(text=("Hi.",)), Say(text=("Hi.",))) as host:
        ann = await host.client(requester=Requester(view=view), negotiate=VersionTwo, version=version)
        session = await ann.new()
        prompt = asyncio.create_task(ann.prompt(session, "hello"))
        await asked.wait()
        prompt.cancel()
        await asyncio.wait([prompt])
        answered.set()
        await ann.prompt(session, "again")
        await ann.until(lambda updates: "Hi." in str(updates))
        assert len(host.model.requests) == 1

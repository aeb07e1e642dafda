"""Whatever happens to its connection, a client shows what a load shows."""

from __future__ import annotations

import pytest

from crow.agent.feed import Feed
from crow.domain.events import TextShown, ThoughtShown
from tests.support.feed_orders import check_order

pytestmark = pytest.mark.anyio


@pytest.mark.long
@pytest.mark.parametrize("first", range(1, 101, 10))
async def test_in_any_order_every_client_shows_what_a_fresh_load_shows(first: int) -> None:
    for seed in range(first, first + 10):
        await check_order(seed)


def test_a_draft_of_another_process_adds_only_what_is_new() -> None:
    feed = Feed("s", 7)
    first = feed.growth("m", text="One", thought="hm")
    for item in first:
        feed.put(item)
    assert first == (
        ThoughtShown(message_id="m", offset=0, text="hm"),
        TextShown(message_id="m", offset=0, text="One"),
    )
    assert feed.growth("m", text="One two", thought="hm") == (TextShown(message_id="m", offset=3, text=" two"),)
    assert feed.open_items() == (
        ThoughtShown(message_id="m", offset=0, text="hm", after=7),
        TextShown(message_id="m", offset=0, text="One", after=7),
    )

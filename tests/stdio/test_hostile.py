"""Sends hundreds of hostile messages to the real process; `make soak` sends more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.hostile import HostileClient, HostileClientV2, batches, batches_v2

BATCH, BATCHES = 100, 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("client_type", "batches_of"), [(HostileClient, batches), (HostileClientV2, batches_v2)], ids=["v1", "v2"]
)
def test_hundreds_of_hostile_messages_do_no_harm(
    home: Path, place: Path, client_type: type[HostileClient], batches_of: Callable[..., st.SearchStrategy[list[bytes]]]
) -> None:
    client = client_type(home, place)
    try:

        @settings(
            max_examples=BATCHES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(batches_of(place, BATCH))
        def send_batch(lines: list[bytes]) -> None:
            client.send(lines)

        send_batch()
    finally:
        client.close()
    assert client.sent >= BATCH * BATCHES

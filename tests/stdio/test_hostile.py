"""Sends hundreds of hostile messages to the real process; `make soak` sends more."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from tests.support.hostile import HostileClient, batches

BATCH, BATCHES = 100, 8


def test_hundreds_of_hostile_messages_do_no_harm(home: Path, place: Path) -> None:
    client = HostileClient(home, place)
    try:

        @settings(
            max_examples=BATCHES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(batches(place, BATCH))
        def send_batch(lines: list[bytes]) -> None:
            client.send(lines)

        send_batch()
    finally:
        client.close()
    assert client.sent >= BATCH * BATCHES

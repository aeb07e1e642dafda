"""Sends hundreds of hostile messages to the real process; `make soak` sends more."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from tests.support.hostile import Besieged, batches

BATCH, BATCHES = 100, 8


def test_hundreds_of_hostile_messages_do_no_harm(home: Path, place: Path) -> None:
    besieged = Besieged(home, place)
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
        def siege(lines: list[bytes]) -> None:
            besieged.send(lines)

        siege()
    finally:
        besieged.close()
    assert besieged.sent >= BATCH * BATCHES

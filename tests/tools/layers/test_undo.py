"""Random destructive command lines are kept, undone and redone without a difference."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.amounts import some
from tests.tools.layers.trees import LINES, check_round


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on the disk, as users have their work; the other tests of layers are in memory."""
    return tmp_path_factory.mktemp("layers")


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_destructive_line_is_undone_and_redone_to_the_byte(number: int, tmp_path: Path) -> None:
    check_round(tmp_path, random.Random(number), LINES[number], kills=False)


@pytest.mark.long
@pytest.mark.parametrize("number", some(range(20), 3))
def test_a_kill_leaves_what_the_next_start_completes_or_takes_back(number: int, tmp_path: Path) -> None:
    rng = random.Random(1_000 + number)
    check_round(tmp_path, rng, rng.choice(LINES), kills=True)

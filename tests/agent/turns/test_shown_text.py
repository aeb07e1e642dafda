"""What a client was shown is stored, replayed and sent back, whatever the stream was and wherever it broke."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.llm.streams import FIXTURES
from tests.soak.parser import mutated
from tests.support.amounts import examples
from tests.support.shown_text import Stream, check_draft, check_session, pieces_of

SHORT = [fixture for fixture in FIXTURES if 0 < len(fixture.stream) < 20_000]


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
async def test_shown_text_is_stored_replayed_and_sent_back(tmp_path: Path, part: int) -> None:
    chance = random.Random(part)
    fixtures = [*SHORT[part::8], *(mutated(chance, SHORT) for _ in range(examples(5)))]
    chance.shuffle(fixtures)
    streams = [(fixture.stream, fixture.tools) for fixture in fixtures if fixture.stream]
    await check_session(tmp_path, streams, chance)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
async def test_a_stream_cut_anywhere_shows_what_its_draft_has(part: int) -> None:
    chance = random.Random(part)
    for fixture in SHORT[part::4]:
        whole = await check_draft(Stream(pieces=pieces_of(fixture.stream, chance)), fixture.tools)
        for _ in range(examples(1)):
            at = chance.randrange(len(fixture.stream))
            cut = Stream(pieces=pieces_of(fixture.stream[:at], chance), is_cut=True)
            shown = await check_draft(cut, fixture.tools)
            again = Stream(pieces=pieces_of(fixture.stream, chance))
            await check_draft(again, fixture.tools, before=shown)
            assert len(shown) <= len(fixture.stream)
        assert whole is not None

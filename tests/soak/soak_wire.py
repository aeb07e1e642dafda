"""Sends fifty thousand hostile messages to one process, and fuzzes the wire readers guided by coverage.

Run by `make soak`. SOAK_MESSAGES and SOAK_SECONDS make it longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from crow.domain.errors import CrowError
from crow.frontend.options import option_value
from crow.frontend.questions import elicitation_answer, permission_answer
from crow.protocol.content import parts_from
from crow.protocol.frames import FrameError, LineSplitter, RequestError, encode, parse
from crow.protocol.params import client_capabilities, open_request_from
from tests.support.hostile import HostileClient, batches

MESSAGES = int(os.environ.get("SOAK_MESSAGES", "50000"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))
BATCH = 100

SEEDS = (
    b'{"jsonrpc":"2.0","id":1,"method":"session/new","params":{"cwd":"/","mcpServers":[{"name":"a","command":"b"}]}}',
    b'{"jsonrpc":"2.0","id":"x","method":"session/prompt","params":{"prompt":[{"type":"text","text":"hi"}]}}',
    b'{"jsonrpc":"2.0","id":2,"result":{"outcome":{"outcome":"selected","optionId":"allow_once"}}}',
    b'{"jsonrpc":"2.0","id":3,"error":{"code":1,"message":"m"}}',
    b'{"jsonrpc":"2.0","id":4,"method":"x","params":{"prompt":[{"type":"resource","resource":{"uri":"u","blob":"aGk="}}]}}',
    b'{"jsonrpc":"2.0","id":5,"method":"x","params":{"clientCapabilities":{"fs":{"readTextFile":true}}}}',
    b'{"jsonrpc":"2.0","id":6,"method":"x","params":{"cwd":"/","configId":"mode","value":"\\ud800"}}',
)
PIECES = (
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"1e999",
    b"-0",
    b"\\u0000",
    b"\\ud800",
    b"[",
    b"]",
    b'"_meta":',
    b"\xff",
    b"\xef\xbb\xbf",
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def test_crow_outlives_a_long_siege(tmp_path: Path, place: Path) -> None:
    client = HostileClient(tmp_path / "home", place)
    try:

        @settings(
            max_examples=-(-MESSAGES // BATCH),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(batches(place, BATCH))
        def send_batch(lines: list[bytes]) -> None:
            client.send(lines)

        while client.sent < MESSAGES:
            send_batch()
    finally:
        client.close()


def read(data: bytes) -> None:
    """Pass bytes through the wire and parameter readers, without a process."""
    splitter = LineSplitter(limit=10_000)
    for line in [*splitter.feed(data), *splitter.finish()]:
        message = line if isinstance(line, FrameError) else parse(line)
        if isinstance(message, FrameError):
            message = message.response()
        if message is None:
            continue
        assert json.loads(encode(message)) is not None
        readers: tuple[Callable[[Any], object], ...] = (
            client_capabilities,
            open_request_from,
            lambda given: parts_from(given.get("prompt")),
            lambda given: option_value(given.get("configId"), given.get("value"), model="a", models=["b"]),
        )
        params = message.get("params")
        if isinstance(params, dict):
            for reader in readers:
                with contextlib.suppress(CrowError, RequestError):
                    reader({"cwd": "/", **params})
        permission_answer(message.get("result"))
        elicitation_answer(message.get("result"))


def mutated(data: bytes, corpus: list[bytes], chance: random.Random) -> bytes:
    """`data` with a few changes: a byte, an inserted piece, or a range removed, doubled or taken from another input."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        end = min(len(made), at + chance.randint(1, 12))
        match chance.randrange(5):
            case 0:
                made[at:at] = chance.choice(PIECES)
            case 1:
                del made[at:end]
            case 2:
                made[at:at] = made[at:end]
            case 3:
                made[at:end] = chance.randbytes(end - at)
            case _:
                other = chance.choice(corpus)
                start = chance.randrange(len(other) + 1)
                made[at:end] = other[start : start + 40]
    return bytes(made[:4000])


def test_no_input_that_reaches_new_code_breaks_the_readers() -> None:
    here = str(Path(parse.__code__.co_filename).parent)
    arcs: set[tuple[str, int, int]] = set()
    found: set[tuple[str, int, int]] = set()

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(here):
            return None
        previous = frame.f_lineno

        def line(inner: FrameType, what: str, _: object) -> Any:
            nonlocal previous
            if what == "line":
                found.add((inner.f_code.co_filename, previous, inner.f_lineno))
                previous = inner.f_lineno
            return line

        return line

    corpus, chance = list(SEEDS), random.Random(20260701)
    until, runs, before = time.monotonic() + SECONDS, 0, sys.gettrace()
    while time.monotonic() < until:
        data = mutated(chance.choice(corpus), corpus, chance) if runs >= len(SEEDS) else SEEDS[runs]
        found.clear()
        sys.settrace(tracer)
        try:
            read(data)
        except Exception as error:
            raise AssertionError(f"{data!r} breaks a reader") from error
        finally:
            sys.settrace(before)
        if not found <= arcs:
            arcs.update(found)
            corpus.append(data)
        runs += 1
    print(f"{runs} inputs, {len(corpus)} kept, {len(arcs)} steps between lines reached")
    assert len(corpus) > len(SEEDS)

"""Whatever a network does at whatever byte, the editor's transcript equals the server's log."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.bridged import BridgedEditor, QuickTimes
from tests.support.fake_server import FakeServer
from tests.support.fault_proxy import FaultProxy


class FaultTimes(QuickTimes):
    """Notices a stalled connection soon."""

    ping, pong, connect = 0.1, 0.15, 0.3


async def run_turns(path: Path, *, seed: int, faults: int) -> dict[str, int]:
    """Runs turns in two sessions until there were this many faults. Returns the faults by kind."""
    choice = random.Random(seed)
    async with (
        FakeServer(path) as server,
        FaultProxy(path, seed=seed) as proxy,
        BridgedEditor(proxy.url, times=FaultTimes) as editor,
    ):
        proxy.is_hostile = False
        sessions = [await editor.new_session() for _ in range(2)]
        proxy.is_hostile = True
        sent = 0
        while proxy.faults.total() < faults:
            running = []
            for session in sessions:
                sent += 1
                words = f"{choice.randrange(1, 40)} w{sent}-" if choice.random() < 0.8 else "ask"
                running.append(await editor.start_prompt(session, words))
            for answer in running:
                assert (await answer)["result"] == {"stopReason": "end_turn"}
            assert "result" in await editor.request("session/list")
        for session in sessions:
            assert editor.text(session) == server.text(session)
        assert server.prompts.total() == sent
        assert len(editor.asks()) == server.prompts["ask"]
    return dict(proxy.faults)


async def test_any_fault_at_any_byte_leaves_the_transcript_equal_to_the_log(tmp_path: Path) -> None:
    assert sum((await run_turns(tmp_path / "crow.sock", seed=1, faults=60)).values()) >= 60

"""Compaction in the real process: updates, requests and learned windows."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply

SUMMARY = "## Goal\nBuild a nest.\n## Next\nFind twigs."
ASKS: dict[str, Any] = {"session": {"compaction": {}}}


def configure(home: Path, window: int = 24_000) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[model]\nname = "fake-model"\ncontext_window = {window}\n', "utf-8")


def script(endpoint: FakeEndpoint) -> None:
    """Three long answers, a summary, an answer."""
    long = fake.text("a" * 12_000)
    endpoint.script(long, long, long, fake.text(SUMMARY[:20], SUMMARY[20:]), fake.text("Twigs it is."))


async def test_an_editor_that_supports_it_sees_compaction_updates_live_and_after_a_load(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home)
    script(endpoint)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**ASKS)
        session = await agent.new_session(place)
        for _ in range(4):
            await agent.prompt(session, "q" * 12_000)
        shown = agent.updates(session, "compaction_update", "compaction_summary_chunk")
        identity = shown[0]["compactionId"]
        text = {"type": "text", "text": SUMMARY}
        assert shown == [
            {"sessionUpdate": "compaction_update", "compactionId": identity, "status": "in_progress"},
            {"sessionUpdate": "compaction_summary_chunk", "compactionId": identity, "content": text},
            {
                "sessionUpdate": "compaction_update",
                "compactionId": identity,
                "status": "completed",
                "summary": [text],
            },
        ]
        empty, *used = [update["used"] for update in agent.updates(session, "usage_update")]
        assert (empty < used[0], len(used)) == (True, 5)
        assert used[3] < used[2] / 2
        await agent.prompt(session, "/context")
        picture = agent.updates(session, "agent_message_chunk")[-1]["content"]["text"]
        assert "of 24,000 tokens" in picture
        assert "█" in picture
    before, summarised = endpoint.asked[2].body, endpoint.asked[3].body
    assert summarised["messages"][: len(before["messages"])] == before["messages"]  # the provider has cached these
    assert summarised["tools"] == before["tools"]
    sent = endpoint.asked[4].body["messages"]
    assert SUMMARY in str(sent[1]["content"])
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**ASKS)
        await agent.load_session(session, place)
        replayed = agent.updates(session, "compaction_update")
        assert [(update["compactionId"], update["status"]) for update in replayed] == [(identity, "completed")]
        assert len(agent.updates(session, "user_message_chunk")) >= 5


async def test_a_summary_is_followed_by_the_files_in_use_as_they_are_on_disk(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home)
    outside = place.parent / "outside.txt"
    outside.write_text("from outside", "utf-8")
    names = ("nest.txt", "later_denied.txt", "gone.txt")
    for name in names:
        (place / name).write_text(f"{name}: one twig", "utf-8")
    (place / "link.txt").symlink_to(outside)
    reads = [("read_file", {"path": name}) for name in (*names, "link.txt")]
    long = fake.text("a" * 12_000)
    endpoint.script(fake.calls(*reads), fake.text("Read."), long, long, long, fake.text(SUMMARY), fake.text("Yes."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "Read them.")
        for _ in range(3):
            await agent.prompt(session, "q" * 12_000)
        (place / "nest.txt").write_text("nest.txt: two twigs", "utf-8")
        (place / "gone.txt").unlink()
        with (home / "config.toml").open("a", encoding="utf-8") as config:
            config.write('[permissions]\ndeny = ["read_file(later_denied.txt)"]\n')
        await agent.prompt(session, "q" * 12_000)
    checkpoint = str(endpoint.asked[-1].body["messages"][1]["content"])
    assert SUMMARY in checkpoint
    assert f'<file path="{place / "nest.txt"}">' in checkpoint
    assert "nest.txt: two twigs" in checkpoint
    for words in ("one twig", "from outside", "gone.txt: "):
        assert words not in checkpoint


async def test_other_editors_see_a_compaction_as_one_short_message(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home)
    script(endpoint)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(4):
            await agent.prompt(session, "q" * 12_000)
        assert agent.updates(session, "compaction_update", "compaction_summary_chunk") == []
        said = [update["content"]["text"] for update in agent.updates(session, "agent_message_chunk")]
        quiet = [text for text in said if "Context compacted" in text]
        assert len(quiet) == 1
        assert "tokens" in quiet[0]


HOOKS = """
def good(event):
    return {"context": f"The ticket is 17, the kind {event['kind']}."}

def broken(event):
    raise LookupError("no such ticket")

def after(event):
    raise ValueError
"""
ENTRY_POINTS = """
[crow.before_compact]
broken = ours:broken
good = ours:good
[crow.after_compact]
late = ours:after
"""


def installed(packages: Path) -> Path:
    """A directory of installed packages, one of which registers hooks."""
    (packages / "ours-1.dist-info").mkdir(parents=True)
    (packages / "ours.py").write_text(HOOKS)
    (packages / "ours-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1\n")
    (packages / "ours-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return packages


async def test_hooks_take_part_and_failing_ones_are_reported(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    configure(home)
    script(endpoint)
    before = f"import sys; sys.path.append({str(installed(tmp_path / 'packages'))!r})"
    async with crow(endpoint=endpoint, before=before) as agent:
        await agent.initialize(session={"compaction": {}, "notices": {}})
        session = await agent.new_session(place)
        for _ in range(4):
            await agent.prompt(session, "q" * 12_000)
        notices = [one["title"] for one in agent.updates(session, "notice") if one["severity"] == "warning"]
        assert agent.updates(session, "compaction_update")[-1]["status"] == "completed"
    assert notices == [
        "The before_compact hook broken (ours:broken) failed (LookupError: no such ticket) and is skipped.",
        "The after_compact hook late (ours:after) failed (ValueError) and is skipped.",
    ]
    assert "The ticket is 17, the kind summary." in str(endpoint.asked[3].body["messages"][-1])


async def test_kill_during_a_summary_leaves_the_conversation_unchanged(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home)
    long, gate = fake.text("a" * 12_000), Gate()
    endpoint.script(long, long, long, fake.text(SUMMARY * 20, "never", between=[gate]))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**ASKS)
        session = await agent.new_session(place)
        for _ in range(3):
            await agent.prompt(session, "q" * 12_000)
        await agent.start_prompt(session, "q" * 12_000)
        await gate.reached()
        await agent.kill()
    endpoint.script(fake.text(SUMMARY), fake.text("Twigs it is."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**ASKS)
        await agent.load_session(session, place)
        assert agent.updates(session, "compaction_update") == []
        assert len(agent.updates(session, "user_message_chunk")) == 4
        assert (await agent.prompt(session, "go on"))["stopReason"] == "end_turn"
        assert agent.updates(session, "compaction_update")[-1]["status"] == "completed"
        assert agent.text(session).endswith("Twigs it is.")


class Windowed:
    """Answers requests that fit a window and refuses others, naming the window."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.refused = 0

    def __call__(self, request: Recorded) -> Reply:
        tokens = len(request.raw) // 4
        if tokens > self.window:
            self.refused += 1
            return fake.failing(400, f"This model's maximum context length is {self.window} tokens, not {tokens}.")
        said = fake.chunk({"role": "assistant", "content": "a" * 8_000})
        return Reply(steps=(fake.sse(said, fake.chunk(finish="stop"), fake.usage(tokens, 2_000)),))


def learned(home: Path) -> Any:
    """What the database knows about the endpoint's window."""
    with closing(sqlite3.connect(home / "crow.db")) as connection:
        rows = connection.execute("SELECT learned FROM endpoints").fetchall()
    return json.loads(rows[0][0]).get("window") if rows else None


def teach(home: Path, endpoint: FakeEndpoint, **facts: object) -> None:
    """Store facts about the endpoint in the database."""
    with closing(sqlite3.connect(home / "crow.db")) as connection, connection:
        row = (endpoint.base_url, "fake-model", json.dumps(facts))
        connection.execute("INSERT OR REPLACE INTO endpoints (base_url, model, learned) VALUES (?, ?, ?)", row)


async def command(agent: CrowProcess, session: str, words: str) -> str:
    """The answer to a slash command."""
    since = len(agent.log)
    await agent.prompt(session, words)
    return agent.text(session, since=since)


@pytest.mark.parametrize(
    "words",
    ["context length exceeded", "This model's maximum context length is 1800 tokens."],
    ids=["without a number", "names less than the system message has"],
)
async def test_one_refused_request_fails_only_its_own_prompt(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, words: str
) -> None:
    endpoint.script(fake.failing(400, words))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "hi")
        assert words.rstrip(".") in raised.value.message
        assert (
            "and nothing in it can be compacted. If the endpoint may be wrong, send the prompt again."
            in raised.value.message
        )
        for name in (session, await agent.new_session(place)):
            assert (await agent.prompt(name, "hi"))["stopReason"] == "end_turn"
        assert "crow assumes 128,000 tokens" in await command(agent, session, "/context")
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        assert (await agent.prompt(await agent.new_session(place), "hi"))["stopReason"] == "end_turn"
    assert len(endpoint.asked) == 4
    assert learned(home) is None


async def test_a_wrong_window_learned_by_an_older_version_is_ignored(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.new_session(place)
    teach(home, endpoint, window={"declared": 128_000, "tokens": 1_728}, context_window=1_800)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "hi"))["stopReason"] == "end_turn"
        assert "of 128,000 tokens" in await command(agent, session, "/context")


@pytest.mark.long
async def test_a_window_that_shrinks_and_grows_is_learned_reported_and_forgotten(
    crow: StartCrow, home: Path, place: Path
) -> None:
    served = Windowed(40_000)
    async with FakeEndpoint(otherwise=served) as endpoint, crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(6):
            await agent.prompt(session, "q" * 16_000)
        served.window = 12_000
        for _ in range(4):
            assert (await agent.prompt(session, "q" * 8_000))["stopReason"] == "end_turn"
        told = await command(agent, session, "/context")
        assert "of 12,000 tokens" in told
        assert "Crow learned a window of 12,000 tokens on " in told
        assert "This model's maximum context length is 12000 tokens" in told
        assert learned(home)["tokens"] == 12_000
        served.window = 100_000
        largest = 0
        for _ in range(24):
            assert (await agent.prompt(session, "q" * 8_000))["stopReason"] == "end_turn"
            largest = max(largest, len(endpoint.asked[-1].raw) // 4)
        assert largest > 40_000
        assert learned(home)["times"] == 0
        assert "Crow learned" not in await command(agent, session, "/context")
        assert served.refused <= 3


async def test_a_learned_window_can_be_forgotten_and_a_configured_one_replaces_it(
    crow: StartCrow, home: Path, place: Path
) -> None:
    served = Windowed(12_000)
    async with FakeEndpoint(otherwise=served) as endpoint:
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            for _ in range(2):
                session = await agent.new_session(place)
                for _ in range(4):
                    await agent.prompt(session, "q" * 8_000)
            assert learned(home)["times"] == 2
            fresh = await agent.new_session(place)
            assert "of 12,000 tokens" in await command(agent, fresh, "/context")
            assert "Dropped the window of 12,000 tokens" in await command(agent, fresh, "/context forget")
            assert learned(home) is None
            for name in (fresh, session):
                assert "of 128,000 tokens" in await command(agent, name, "/context")
            for _ in range(3):
                await agent.prompt(session, "q" * 8_000)
            assert "of 12,000 tokens" in await command(agent, session, "/context")
            configure(home, 128_000)  # the same size that crow assumes, but now configured
            assert "of 128,000 tokens" in await command(agent, session, "/context")
            assert learned(home) is None
        teach(home, endpoint, window={"tokens": 9_000, "source": "s", "learned_on": "d", "session": "", "times": 2})
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            told = await command(agent, session, "/context")
            assert "of 128,000 tokens" in told
            assert "You configured this window." in told
            assert learned(home) is None


async def test_a_refused_parameter_is_shown_and_can_be_forgotten(crow: StartCrow, home: Path, place: Path) -> None:
    def choosy(request: Recorded) -> Reply:
        is_refused = "stream_options" in request.body
        return fake.failing(400, "Unknown parameter: 'stream_options'") if is_refused else fake.text("Hello.")

    async with FakeEndpoint(otherwise=choosy) as endpoint, crow(endpoint=endpoint) as agent:
        await agent.initialize()
        one, two, three = [await agent.new_session(place) for _ in range(3)]
        asked = []
        for session in (one, one, two, three):
            before = len(endpoint.asked)
            assert (await agent.prompt(session, "hi"))["stopReason"] == "end_turn"
            asked.append(len(endpoint.asked) - before)
        assert asked == [2, 1, 2, 1]
        told = await command(agent, three, "/context")
        assert "- usage while streaming (stream_options): Crow leaves this out" in told
        assert 'for every session (seen 2 times), because of a refused request: "Unknown parameter: ' in told
        assert "Dropped what it learned about usage while streaming" in await command(agent, three, "/context forget")
        assert "Crow leaves this out" not in await command(agent, one, "/context")
        before = len(endpoint.asked)
        await agent.prompt(one, "hi")
        assert ["stream_options" in request.body for request in endpoint.asked[before:]] == [True, False]


async def test_only_a_configured_window_refuses_and_says_what_to_change(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, 3_000)
    (place / "AGENTS.md").write_text("Twigs. " * 1_200)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        with pytest.raises(RpcError, match=r"context_window is 3,000 tokens in your configuration.*Raise or remove"):
            await agent.prompt(session, "q" * 8_000)
    assert endpoint.asked == []
    (home / "config.toml").unlink()
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert (await agent.prompt(session, "go on"))["stopReason"] == "end_turn"


async def test_a_prompt_uses_the_summary_that_was_written_while_the_user_was_reading(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configure(home, 64_000)
    # the endpoint plays a proxy, so that the model counts as far away
    far = {"OPENAI_BASE_URL": "http://far.example/v1", "HTTP_PROXY": endpoint.base_url.removesuffix("/v1")}
    asked: list[Recorded] = []
    cut_off, written = Gate(), Gate()

    def reply(request: Recorded) -> Reply:
        if "[crow] Your summary" not in str(request.body["messages"][-1]):
            return fake.text("a" * 12_000)
        asked.append(request)
        return fake.text(SUMMARY[:20], SUMMARY[20:], between=[cut_off if len(asked) == 1 else written])

    endpoint.answer_with(reply)
    async with crow(endpoint=endpoint, env=far) as agent:
        await agent.initialize(**ASKS)
        session = await agent.new_session(place)
        for _ in range(5):
            await agent.prompt(session, "q" * 12_000)
        await cut_off.reached()
        await agent.prompt(session, "q" * 12_000)  # cancels the first summary
        await written.reached()
        assert asked[0].left.is_set()
        shown = len(agent.log)
        written.open()
        while summaries(home) < 2:
            await anyio.lowlevel.checkpoint()
        assert agent.updates(session, since=shown) == []
        assert (await agent.prompt(session, "What now?"))["stopReason"] == "end_turn"
        updates = agent.updates(session, "compaction_update")
        assert [update["status"] for update in updates] == ["in_progress", "completed"]
    assert (len(asked), len(endpoint.asked)) == (2, 9)
    assert SUMMARY in str(endpoint.asked[-1].body["messages"][1]["content"])


def summaries(home: Path) -> int:
    """How many requests for a summary are stored."""
    with closing(sqlite3.connect(home / "crow.db")) as connection:
        count: int = connection.execute("SELECT count(*) FROM entries WHERE kind = 'request'").fetchone()[0]
    return count

"""Compaction of the real process: what the editor sees of it, live and in replay, and what the endpoint is sent."""

from __future__ import annotations

from pathlib import Path

from tests.stdio.conftest import ROOT, StartCrow
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Gate

SUMMARY = "## Goal\nBuild a nest.\n## Next\nFind twigs."
ASKS = {"session": {"compaction": {}}}


def small_window(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text('[model]\nname = "fake-model"\ncontext_window = 24000\n', "utf-8")


def script(endpoint: FakeEndpoint) -> None:
    """Three long answers, a summary, an answer."""
    long = fake.text("a" * 12_000)
    endpoint.script(long, long, long, fake.text(SUMMARY[:20], SUMMARY[20:]), fake.text("Twigs it is."))


async def test_an_editor_that_asks_for_it_follows_a_compaction_and_finds_it_again_after_a_load(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    small_window(home)
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
    assert summarised["messages"][: len(before["messages"])] == before["messages"]  # the provider has these cached
    assert summarised["tools"] == before["tools"]
    sent = endpoint.asked[4].body["messages"]
    assert SUMMARY in str(sent[1]["content"])
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**ASKS)
        await agent.load_session(session, place)
        replayed = agent.updates(session, "compaction_update")
        assert [(update["compactionId"], update["status"]) for update in replayed] == [(identity, "completed")]
        assert len(agent.updates(session, "user_message_chunk")) >= 5


async def test_another_editor_is_told_in_one_quiet_message(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    small_window(home)
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
from crow.agent.compaction import Advice, Done, Proposal

def good(proposal: Proposal) -> Advice:
    return Advice(context=f"The ticket is 17, the kind {proposal.kind}.")

def broken(proposal: Proposal) -> Advice:
    raise LookupError("no such ticket")

def after(done: Done) -> None:
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
    """A directory of packages with one that registers hooks, as an installer leaves it."""
    (packages / "ours-1.dist-info").mkdir(parents=True)
    (packages / "ours.py").write_text(HOOKS)
    (packages / "ours-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1\n")
    (packages / "ours-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return packages


async def test_a_hook_has_its_say_and_one_that_fails_is_named_to_the_user(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    small_window(home)
    script(endpoint)
    path = f"{ROOT}:{installed(tmp_path / 'packages')}"
    async with crow(endpoint=endpoint, env={"PYTHONPATH": path}) as agent:
        await agent.initialize(session={"compaction": {}, "notices": {}})
        session = await agent.new_session(place)
        for _ in range(4):
            await agent.prompt(session, "q" * 12_000)
        notices = [update["title"] for update in agent.updates(session, "notice")]
        assert agent.updates(session, "compaction_update")[-1]["status"] == "completed"
    assert notices == [
        "The hook broken (ours:broken) of crow.before_compact failed (LookupError: no such ticket) and is passed over.",
        "The hook late (ours:after) of crow.after_compact failed (ValueError) and is passed over.",
    ]
    assert "The ticket is 17, the kind summary." in str(endpoint.asked[3].body["messages"][-1])


async def test_kill_while_the_summary_is_written_leaves_the_conversation_as_it_was(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    small_window(home)
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

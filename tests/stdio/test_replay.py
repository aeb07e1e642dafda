"""Sessions of the real process are built again from their log, byte for byte."""

from __future__ import annotations

import gc
import json
import re
import sqlite3
from collections import deque
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from crow.cli import main
from crow.llm.sent import digest_of
from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.amounts import IS_SOAK
from tests.support.checking_endpoint import WIRES
from tests.support.conventions import ledger_of, problems_of, read_otlp
from tests.support.fake_endpoint import HANG, FakeEndpoint, Reply
from tests.support.prefix_cache import CachingEndpoint, ScriptedSession, call, say, write_config

SEEDS = [
    ("messages", 25),
    ("responses", 699),
    ("chat", 1411),
    ("messages", 892),
    *(("responses", seed) for seed in (82115, 82136)),
]
"""Together, these sessions make each kind of call and of change. In the last two, a compaction comes before a request
that is refused as too long, or after a kill. `make soak-replay` runs more."""
SECRET = "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12Mn34Op56"


async def random_session(
    crow: StartCrow, home: Path, tmp_path: Path, *, wire: str = "chat", seed: int = 2, run: Commands | None = None
) -> tuple[str, set[str]]:
    """Run a random session on a wire. Some sessions are imported, if there is `run`, and some processes are killed.
    Return the session's id, and the digests of the requests that the endpoint got."""
    model, env = CachingEndpoint(home / "crow.db"), {"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}
    place = tmp_path / "places" / str(seed)
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url, wire)
        imported = await run.imported(home, tmp_path) if run is not None and seed % 4 == 1 else ""
        async with crow(env=env) as agent:
            agent.checks_schema = False  # this takes more time than everything else, and other tests do it
            await agent.initialize()
            one = ScriptedSession(agent, model, place, seed)
            one.prepare()
            await (one.load(imported) if imported else one.open())
            await one.go_on(prompts=6)
            if is_killed := seed % 2 == 0:
                await one.killed_prompt()
        if is_killed:
            async with crow(env=env) as one.agent:
                one.agent.checks_schema = False
                await one.agent.initialize()
                await one.load(one.session)
                await one.go_on(prompts=1)
        got = {digest_of(request.raw) for request in endpoint.asked}
    (session,) = model.sessions.values()
    return session, got


class Commands:
    """Runs commands of crow in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and what was printed."""
        code = await anyio.to_thread.run_sync(main, list(arguments))
        gc.unfreeze()  # each command would otherwise keep the garbage of those before it
        said = self._capsys.readouterr()
        return code, said.out + said.err

    async def imported(self, home: Path, folder: Path) -> str:
        """Import a session of another tool. Return its id."""
        path = folder / "old.json"
        path.write_text(json.dumps([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]))
        code, said = await self("sessions", "import", str(path), "--from", "openai-json", "--json")
        assert code == 0, said
        (session,) = stored(home, "SELECT id FROM sessions")
        return str(session)

    async def live(self, session: str, turn: int) -> tuple[int, str]:
        """Return how many requests were sent from a turn on, and what was printed."""
        said = (await self("replay", session, "--live", "--from", str(turn)))[1]
        return len(said.splitlines()), said

    async def replay(self, name: str, *, edits: bool = False) -> list[dict[str, Any]]:
        """Return the requests of a session or a file, built again, or the edits, made again."""
        return (await self.replay_all(name))[edits]

    async def replay_all(self, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the requests of a session or a file, built again, and the edits, made again."""
        found = [json.loads(line) for line in (await self("replay", name, "--json"))[1].splitlines()]
        return [each for each in found if not each["tool"]], [each for each in found if each["tool"]]


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    monkeypatch.setenv("CROW_HOME", str(home))
    for name in ("CROW_MODEL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return Commands(capsys)


def stored(home: Path, query: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(home / "crow.db")) as connection, connection:
        return [row[0] for row in connection.execute(query, values)]


@pytest.mark.long
@pytest.mark.parametrize(("wire", "seed"), list(product(WIRES, (21, 2, 147, 86))) if IS_SOAK else SEEDS)
async def test_a_random_session_and_its_case_are_built_again_byte_for_byte(
    crow: StartCrow, home: Path, tmp_path: Path, run: Commands, seed: int, wire: str
) -> None:
    await check_session(crow, home, tmp_path, run, wire=wire, seed=seed)


async def check_session(crow: StartCrow, home: Path, tmp_path: Path, run: Commands, *, wire: str, seed: int) -> None:
    """Run a random session, and check its replay and that of its case."""
    session, got = await random_session(crow, home, tmp_path, wire=wire, seed=seed, run=run)
    found, edits = await run.replay_all(session)
    assert {each["words"] for each in found if each["outcome"] != "unproven"} == {""}
    assert sum(each["outcome"] == "unproven" for each in found) <= 1, "what was imported or killed"
    assert {each["words"] for each in edits} <= {""}
    digests = stored(home, "SELECT body ->> '$.sent.digest' FROM entries WHERE kind = 'assistant' AND body IS NOT NULL")
    assert set(digests) - {None} <= got
    assert len(found) >= len(set(digests) - {None}) > 3
    code, said = await run("sessions", "export", session, "--format", "case", "-o", str(tmp_path / "case.jsonl"))
    assert code == 0, said
    again = await run.replay(str(tmp_path / "case.jsonl"))
    assert [(each["outcome"], each["turn"]) for each in again] == [(each["outcome"], each["turn"]) for each in found]
    await check_traces(home, tmp_path, run, session)


async def check_traces(home: Path, tmp_path: Path, run: Commands, session: str) -> None:
    """Check that each token of the session and its subagents is in one span, and that spans keep to the conventions."""
    code, said = await run("sessions", "export", session, "--format", "otlp", "-o", str(tmp_path / "traces.jsonl"))
    assert code == 0, said
    spans = read_otlp((await anyio.Path(tmp_path / "traces.jsonl").read_bytes()).splitlines())
    assert problems_of(spans) == []
    query = (
        "SELECT sum({}) FROM entries WHERE kind <> 'tool' AND session IN"
        " (SELECT id FROM sessions WHERE ? IN (id, parent_id))"
    )
    counts = ("input_tokens", "output_tokens", "cached_tokens")
    assert ledger_of(spans) == tuple(stored(home, query.format(name), session)[0] or 0 for name in counts)


async def test_a_session_whose_process_was_killed_is_built_again(
    crow: StartCrow, home: Path, place: Path, run: Commands
) -> None:
    """The answer that was cut off has no digest; the requests before and after it are the same."""
    async with FakeEndpoint(otherwise=lambda _: fake.text("Twigs.")) as endpoint:
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            await agent.prompt(session, "What is it made of?")
            endpoint.script(Reply(steps=(fake.sse(fake.chunk({"content": "It is "}), done=False), HANG)))
            since = len(agent.log)
            await agent.start_prompt(session, "And what else?")
            await agent.wait_for_text(session, "It is ", since=since)
            with anyio.fail_after(120):
                while not stored(home, "SELECT text FROM drafts"):  # noqa: ASYNC110  # another process writes it
                    await anyio.sleep(0.05)
            await agent.kill()
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            await agent.request("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
            await agent.prompt(session, "Go on.")
    found = await run.replay(session)
    assert [each["outcome"] for each in found] == ["identical", "unproven", "identical"]
    assert found[1]["words"] == "crow was stopped before it could store how the request was sent"


async def test_edits_are_made_again_from_the_files_before_them(
    crow: StartCrow, home: Path, place: Path, run: Commands
) -> None:
    """In a scratch directory: the workspace may have changed since, or be gone."""
    model = CachingEndpoint(home / "crow.db")
    edit = {"path": str(place / "README.md"), "old_text": "Twigs and string.", "new_text": f"Moss from {place}/moss."}
    (place / "notes.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    steps = [
        call(("edit_file", edit), ("write_file", {"path": "new/nest.txt", "content": "Twigs.\n"})),
        call(("edit_file", {"path": "notes.txt", "old_text": "one\ntwo", "new_text": "one\nthree"})),
        call(("edit_file", {"path": "README.md", "old_text": "not there", "new_text": ""})),
        say("Done."),
    ]
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url)
        async with crow(env={"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            model.sessions[str(place)] = session
            model.steps[session] = deque(steps)
            await agent.prompt(session, "Build a nest.")
    changed = (place / "README.md").read_bytes()
    found = await run.replay(session, edits=True)
    assert [(each["tool"], each["outcome"]) for each in found] == [
        ("edit_file", "identical"),
        ("write_file", "identical"),
        ("edit_file", "identical"),
    ]
    assert (place / "README.md").read_bytes() == changed
    assert "edits: 3 of 3 identical, made again" in (await run("replay", session))[1]


async def test_a_case_is_redacted_and_says_what_differed(
    crow: StartCrow, home: Path, tmp_path: Path, run: Commands
) -> None:
    model = CachingEndpoint(home / "crow.db")
    place = tmp_path / "home" / "places"
    place.mkdir(parents=True)
    (place / "notes.txt").write_text(f"password = hunter2hunter2\nmail me@example.org\n{SECRET}\n")
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url)
        async with crow(env={"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            model.sessions[str(place)] = session
            model.steps[session] = deque(
                [call(("read_file", {"path": "notes.txt", "password": "hunter2hunter2"})), say(f"It is {SECRET}.")]
            )
            await agent.prompt(session, f"Use {SECRET} in /home/anna/nest, write to anna@example.org")
    path = tmp_path / "case.jsonl"
    code, said = await run("sessions", "export", session, "--format", "case", "-o", str(path))
    assert code == 0, said
    text = path.read_text()
    for hidden in (SECRET, "hunter2", "example.org", "/home/anna"):
        assert hidden not in text
    assert [each["outcome"] for each in await run.replay(str(path))] == ["identical"] * 2
    code, said = await run("replay", str(path))
    assert (code, "identical: 2 (" in said) == (0, True), said
    edited = path.read_text().replace("in ~/nest", "at ~/nest").splitlines()
    edited[-1] = json.dumps({**json.loads(edited[-1]), "sha256": None})
    path.write_text("\n".join(edited) + "\n")
    code, said = await run("replay", str(path))
    assert code == 1
    assert "message 2 of 2 differs: a prompt, with the text that crow joined to it (entry " in said


@pytest.mark.long
async def test_a_session_can_be_built_for_another_model_prompt_or_policy_and_sent_live(
    crow: StartCrow, home: Path, tmp_path: Path, run: Commands
) -> None:
    session, _ = await random_session(crow, home, tmp_path, seed=3)
    await check_changed(home, tmp_path, run, session)
    await check_live(home, run, session)


async def check_changed(home: Path, tmp_path: Path, run: Commands, session: str) -> None:
    """Another model, prompt or policy shows what would have been sent."""
    with (home / "config.toml").open("a") as config:
        config.write('[models."priced"]\ncontext_window = 20000\ninput_price = 1.0\noutput_price = 2.0\n')
    prompt = tmp_path / "prompt.md"
    prompt.write_text("Be a nest builder. " * 10_000)

    async def sums(*options: str) -> tuple[int, int, int]:
        _, said = await run("replay", session, *options, "--json")
        rows = [json.loads(line) for line in said.splitlines()]
        compactions = sum(bool(row["compaction"]) for row in rows)
        return sum(row["tokens"] for row in rows), compactions, sum(bool(row["refused"]) for row in rows)

    large = await sums("--model", "large")
    assert large[1:] == (0, 0)
    assert (await sums("--model", "large", "--with", str(prompt)))[0] > large[0]
    small = await sums("--model", "priced")
    assert small[1] > 0
    assert small[0] < large[0]
    assert (await sums("--model", "priced", "--set", "compaction.threshold=0.4"))[1] > small[1]
    assert (await sums("--model", "priced", "--set", "compaction.auto=false"))[1] == 0
    code, said = await run("replay", session, "--model", "priced")
    assert code in (0, 1)
    assert re.search(r"cost: \$\d", said), said
    assert (await sums("--model", "priced", "--with", str(prompt)))[2] > 0
    for wrong in ("compaction.threshold=7", "compaction.threshold", "model.name=x", "compaction.auto=maybe"):
        code, said = await run("replay", session, "--set", wrong)
        assert (code, "--set is" in said) == (2, True), said
    for useless in (["--live", "--with", str(prompt)], ["--live", "--set", "compaction.auto=false"], ["--from", "2"]):
        code, said = await run("replay", session, *useless)
        assert (code, "--live" in said) == (2, True), said
    code, said = await run("replay", session, "--with", "/dev/zero")
    assert (code, "is larger than 4,194,304 bytes" in said) == (2, True), said


async def check_live(home: Path, run: Commands, session: str) -> None:
    """`--live` sends the requests from a turn on."""
    async with FakeEndpoint(otherwise=lambda _: fake.text("Twigs.")) as endpoint:
        config = (home / "config.toml").read_text()
        (home / "config.toml").write_text(re.sub(r'base_url = "[^"]+"', f'base_url = "{endpoint.base_url}"', config))
        everything, _ = await run.live(session, 1)
        later, said = await run.live(session, 3)
        assert len(endpoint.asked) == everything + later
    assert 0 < later < everything
    assert "text, in the log" in said


def names_in(folder: Path) -> set[str]:
    """The names of all files below a folder."""
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "no json",
        '{"type":"crow","format":1}',
        '{"type":"crow","format":99}',
        '{"type":"crow","format":1}\n{"type":"conversation","created_ms":0}\n{"type":"session","id":"../../x"}',
    ],
)
async def test_a_file_that_is_no_case_is_refused(home: Path, tmp_path: Path, run: Commands, lines: str) -> None:
    path = tmp_path / "case.jsonl"
    path.write_text(lines)
    code, said = await run("replay", str(path))
    assert (code, str(path) in said) == (2, True), said
    assert "replay.db" not in names_in(home)


async def test_an_imported_session_says_that_it_has_no_requests(home: Path, tmp_path: Path, run: Commands) -> None:
    code, said = await run("replay", await run.imported(home, tmp_path))
    assert code == 0
    assert "identical: 0" in said
    assert "not compared: 1: it was imported" in said

"""Hooks in the real process, among them the examples of docs/hooks.md as they are printed there."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from crow.cli import main
from tests.stdio.conftest import ROOT, StartCrow
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint

PAGE = (ROOT / "docs" / "hooks.md").read_text("utf-8")
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def configure(home: Path, toml: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[permissions]\nmode = "auto"\n{toml}', "utf-8")


def examples() -> tuple[str, dict[str, str]]:
    """The settings of the three examples, and the text of each program by its path."""
    part = PAGE[PAGE.index("## Three examples") : PAGE.index("## Custom entries")]
    blocks = re.findall(r"```(\w+)\n(.*?)```", part, re.DOTALL)
    programs = {code.splitlines()[0].removeprefix("# "): code for language, code in blocks if language == "python"}
    return "\n".join(code for language, code in blocks if language == "toml"), programs


async def test_the_three_examples_of_the_documentation_work_as_printed(
    crow: StartCrow, home: Path, tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    settings, programs = examples()
    assert list(programs) == [f"~/.config/crow/hooks/{name}.py" for name in ("format", "tests", "audit")]
    for path, code in programs.items():
        script = tmp_path / path.removeprefix("~/")
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(code, "utf-8")
    timeless = re.sub(r"\[\[hooks\]\]\n(?!(?:.+\n)*timeout_s)", "[[hooks]]\ntimeout_s = 600\n", settings)
    configure(home, timeless)
    place = tmp_path / "repos" / "nest"
    place.mkdir(parents=True)
    (place / "Makefile").write_text("test:\n\tgrep 'x = 2' app.py\n")
    (place / "json.py").write_text("raise SystemExit('imported from the workspace')\n")
    endpoint.script(
        fake.calls(("write_file", {"path": "app.py", "content": "x=1\n"})),
        fake.text("Written."),
        fake.calls(("read_file", {"path": "app.py"})),
        fake.calls(("edit_file", {"path": "app.py", "old_text": "x = 1", "new_text": "x=2"})),
        fake.text("Mended."),
    )
    async with crow(endpoint=endpoint, env={"HOME": str(tmp_path), "PATH": TOOLS}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "write app.py"))["stopReason"] == "end_turn"
        shown = agent.text(session)
    assert (place / "app.py").read_text() == "x = 2\n"
    messages = [str(request.body["messages"]) for request in endpoint.asked]
    assert '<context from="format">\\nruff has formatted app.py. Read it before you edit it again.' in messages[1]
    assert '<context from="tests">\\n`make test` fails. Mend it.' in messages[2]
    assert "`make test` fails. Mend it." in shown
    log = [json.loads(line) for line in (tmp_path / "crow-audit.jsonl").read_text().splitlines()]
    assert [(line["tool"], line["does"], line["session_id"]) for line in log] == [
        ("write_file", ["write"], session),
        ("read_file", ["read"], session),
        ("edit_file", ["write"], session),
    ]


async def test_cancelling_ends_a_running_hook_at_once(crow: StartCrow, home: Path, place: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    configure(
        home,
        f"""[[hooks]]\nevent = "before_prompt"\ntimeout_s = 600\ncommand = [
        "sh", "-c", "exec 3>{pipe}; echo begun >&3; sleep 600"]\n""",
    )
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        turn = await agent.start_prompt(session, "say hello")
        with anyio.fail_after(60):
            reader = await anyio.to_thread.run_sync(open, pipe, abandon_on_cancel=True)
            with reader:
                assert await anyio.to_thread.run_sync(reader.readline, abandon_on_cancel=True) == "begun\n"
                await agent.notify("session/cancel", {"sessionId": session})
                assert (await turn.result())["stopReason"] == "cancelled"
                # The end of the file means that both the shell and its child have ended.
                assert await anyio.to_thread.run_sync(reader.read, abandon_on_cancel=True) == ""


def custom_entries(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "crow.db")) as connection:
        query = "SELECT body FROM entry_bodies WHERE kind = 'custom' ORDER BY id"
        return [row[0] for row in connection.execute(query)]


async def test_custom_entries_survive_a_restart_an_export_and_an_import(
    crow: StartCrow,
    home: Path,
    place: Path,
    endpoint: FakeEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    entries = [
        {"namespace": "example.org:t", "text": "Ticket 17 is open.", "show": True, "data": {"id": 17, "deep": [None]}},
        {"namespace": "other", "text": "Only for the model.", "model": True},
    ]
    answer = json.dumps({"entries": entries})
    (place.parent / "answer.json").write_text(answer)
    configure(home, f'[[hooks]]\nevent = "before_prompt"\ncommand = ["cat", "{place.parent / "answer.json"}"]\n')
    endpoint.script(fake.text("Yes."), fake.text("Yes."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        assert "Ticket 17 is open." in agent.text(session)
        assert "Only for the model." not in agent.text(session)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert "Ticket 17 is open." in agent.text(session)
        assert "Only for the model." not in agent.text(session)
    file = home / "all.jsonl"
    monkeypatch.setenv("CROW_HOME", str(home))
    assert await anyio.to_thread.run_sync(main, ["sessions", "export", session, "-o", str(file)]) == 0
    other = place.parent / "other"
    monkeypatch.setenv("CROW_HOME", str(other))
    assert await anyio.to_thread.run_sync(main, ["sessions", "import", str(file)]) == 0
    capfd.readouterr()
    assert custom_entries(other) == custom_entries(home)
    assert [json.loads(body)["namespace"] for body in custom_entries(other)] == ["example.org:t", "other"]
    assert "Only for the model." in str(endpoint.asked[0].body["messages"])
    assert "Ticket 17" not in str(endpoint.asked[0].body["messages"])


async def test_changed_hooks_apply_from_the_next_prompt(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("Yes."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        denial = 'command = ["sh", "-c", "echo Never. >&2; exit 2"]'
        configure(home, f'[[hooks]]\nname = "no"\nevent = "before_prompt"\n{denial}\n')
        assert (await agent.prompt(session, "go on"))["stopReason"] == "refusal"
        assert agent.text(session).strip().endswith("The before_prompt hook no denied this: Never.")
    assert len(endpoint.asked) == 1

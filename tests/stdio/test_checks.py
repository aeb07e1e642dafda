"""The user's own checks after edits, in the real process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crow.tools.sandbox.confiner import choose_sandbox
from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import RpcError
from tests.support.fake_endpoint import FakeEndpoint

CONFINED = {"CROW_SANDBOX": "auto"}


@pytest.fixture
def sandbox() -> None:
    """Skips if nothing confines commands on this machine."""
    if choose_sandbox().sandbox is None:
        pytest.skip(choose_sandbox().problem)


def configure(home: Path, checks: str, permissions: str = 'mode = "auto"') -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f"[permissions]\n{permissions}\n[checks]\n{checks}\n", "utf-8")


def write(path: str, content: str) -> tuple[str, dict[str, Any]]:
    return "write_file", {"path": path, "content": content}


def results(endpoint: FakeEndpoint) -> list[str]:
    """The results of all calls, as the model got them."""
    return [message["content"] for message in endpoint.asked[-1].body["messages"] if message["role"] == "tool"]


async def prompted(crow: StartCrow, endpoint: FakeEndpoint, place: Path, env: dict[str, str | None]) -> list[str]:
    async with crow(endpoint=endpoint, env=env) as agent:
        await agent.initialize()
        assert (await agent.prompt(await agent.new_session(place), "go"))["stopReason"] == "end_turn"
    return results(endpoint)


@pytest.mark.usefixtures("sandbox")
async def test_a_check_runs_once_after_the_edits_of_a_step_and_says_what_broke(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configure(home, """'*.ts' = 'echo checked {files}; ! grep -n BROKEN *.ts'\n'*.md' = 'echo never; false'""")
    endpoint.script(
        fake.calls(write("a.ts", "BROKEN\n"), write("b c.ts", "let b\n"), write("notes.txt", "x\n"), prefix="a"),
        fake.calls(write("a.ts", "BROKEN\n\n"), prefix="b"),
        fake.calls(write("a.ts", "let a\n"), ("read_file", {"path": "a.ts"}), prefix="c"),
        fake.text("Done."),
    )
    first, second, third, again, mended, read = await prompted(crow, endpoint, place, {**CONFINED})
    name = "check `echo checked {files}; ! grep -n BROKEN *.ts`"
    assert "check" not in first + second + read
    assert third.endswith(f"\n[{name} failed with exit code 1]\nchecked a.ts 'b c.ts'\na.ts:1:BROKEN".replace("'", ""))
    assert f"[{name} failed with exit code 1]\nchecked a.ts\n" in again
    assert mended.endswith(f"\n[{name} passed]")


@pytest.mark.usefixtures("sandbox")
async def test_a_check_of_named_files_gets_no_file_that_was_removed(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configure(home, """'*.ts' = 'cat {files} && false'\n'*.t*' = 'ls'""")
    (place / "old.ts").write_text("let old\n")
    (place / "gone.ts").write_text("let gone\n")
    move = "*** Begin Patch\n*** Update File: old.ts\n*** Move to: new.ts\n@@\n-let old\n+let new\n*** End Patch"
    remove = "*** Begin Patch\n*** Delete File: gone.ts\n*** End Patch"
    endpoint.script(
        fake.calls(("apply_patch", {"input": move}), prefix="a"),
        fake.calls(("apply_patch", {"input": remove}), prefix="b"),
        fake.text("Done."),
    )
    moved, removed = await prompted(crow, endpoint, place, {**CONFINED})
    assert moved.endswith("[check `cat {files} && false` failed with exit code 1]\nlet new\n[check `ls` passed]")
    assert removed.endswith("Deleted gone.ts.\n[check `ls` passed]")


@pytest.mark.usefixtures("sandbox")
async def test_a_check_is_confined_bounded_and_sees_no_denied_file(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    (place / "diary.txt").write_text("a nest in moss")
    command = "cat diary.txt; echo made >made.txt; touch ../made.txt; seq 100000; echo the end; exit 3"
    configure(home, f"'src/**/*.py' = '{command}'", 'mode = "auto"\ndeny = ["read_file(diary.txt)"]')
    endpoint.script(
        fake.calls(write("src/deep/a.py", "a = 1\n"), prefix="a"),
        fake.calls(write("src/deep/a.py", "a = 2\n"), prefix="b"),
        fake.text("Done."),
    )
    failed, again = await prompted(crow, endpoint, place, {**CONFINED})
    assert "failed with exit code 3]" in failed
    assert "the end" in failed
    assert "are not shown here" in failed
    assert "moss" not in failed
    assert len(failed) < 8_000
    assert not (place / "made.txt").exists()
    assert not (place.parent / "made.txt").exists()
    assert again.endswith("failed with exit code 3, with the same output as before]")


@pytest.mark.usefixtures("sandbox")
async def test_a_check_that_waited_for_a_rejected_edit_runs_with_the_next_call(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configure(home, "'*.py' = 'false'", 'mode = "auto"\ndeny = ["write_file(b.py)"]')
    endpoint.script(
        fake.calls(write("a.py", "a = 1\n"), write("b.py", "b = 1\n"), prefix="a"),
        fake.calls(("read_file", {"path": "a.py"}), prefix="b"),
        fake.text("Done."),
    )
    made, denied, read = await prompted(crow, endpoint, place, {**CONFINED})
    assert "check" not in made + denied
    assert read == "a = 1\n[check `false` failed with exit code 1]"


async def test_checks_do_not_run_unconfined_and_never_come_from_the_workspace(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configure(home, "'*.py' = 'touch made'")
    (place / "config.toml").write_text("[checks]\n'*.py' = 'touch workspace'\n")
    (place / ".crow").mkdir()
    (place / ".crow" / "config.toml").write_text("[checks]\n'*.py' = 'touch workspace'\n")
    endpoint.script(
        fake.calls(write("a.py", "a = 1\n"), prefix="a"),
        fake.calls(write("a.py", "a = 2\n"), prefix="b"),
        fake.text("Done."),
    )
    first, second = await prompted(crow, endpoint, place, {"CROW_SANDBOX": "off"})
    assert first.endswith("\n[the user's checks did not run, because commands cannot be confined here]")
    assert "check" not in second
    assert not (place / "made").exists()
    assert not (place / "workspace").exists()


@pytest.mark.usefixtures("sandbox")
async def test_in_plan_mode_nothing_is_edited_and_no_check_runs(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configure(home, "'*.py' = 'touch made; false'", 'mode = "plan"')
    (place / "a.py").write_text("a = 1\n")
    endpoint.script(
        fake.calls(write("b.py", "b = 1\n"), ("read_file", {"path": "a.py"}), prefix="a"),
        fake.calls(("grep", {"pattern": "a = "}), prefix="b"),
        fake.text("Done."),
    )
    written, read, found = await prompted(crow, endpoint, place, {**CONFINED})
    assert "plan" in written
    assert (read, found) == ("a = 1", "a.py:1: a = 1")
    assert not (place / "b.py").exists()
    assert not (place / "made").exists()


async def test_a_check_that_is_no_command_is_refused_by_name(crow: StartCrow, home: Path, place: Path) -> None:
    configure(home, "'*.py' = 3")
    async with crow() as agent:
        await agent.initialize()
        with pytest.raises(RpcError, match=r'checks is \{"\*\.py": 3\}; expected a table of globs and command lines'):
            await agent.prompt(await agent.new_session(place), "go")

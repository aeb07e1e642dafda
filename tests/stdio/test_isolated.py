"""Subagents of the real process that work in layers of their own, and what becomes of their changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from crow.tools.sandbox.confiner import choose_sandbox
from tests.stdio.conftest import StartCrow
from tests.stdio.test_confinement import CONFINED, place
from tests.stdio.test_layers import User, files, start
from tests.stdio.test_subagents import cast
from tests.stdio.test_tools import configured
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply
from tests.tools.layers.trees import picture

__all__ = ["files", "place"]


@pytest.fixture(autouse=True)
def overlay() -> None:
    """Skips if no layers work on this machine."""
    sandbox = choose_sandbox().sandbox
    if sandbox is None or not sandbox.has_overlay:
        pytest.skip("there are no layers here")


def task(prompt: str, **more: object) -> tuple[str, Mapping[str, object]]:
    return ("task", {"description": "Try", "prompt": prompt, **more})


def calls(*chosen: tuple[str, Mapping[str, object]]) -> Reply:
    return fake.calls(*chosen)


def edit(old: str, new: str, path: str = "src/a.py") -> tuple[str, Mapping[str, object]]:
    return ("edit_file", {"path": path, "old_text": old, "new_text": new})


def shell(command: str, **more: object) -> tuple[str, Mapping[str, object]]:
    return ("shell", {"command": command, **more})


def told(request: Recorded) -> list[str]:
    """Return the results of calls that a request holds."""
    return [str(message["content"]) for message in request.body["messages"] if message["role"] == "tool"]


async def run(agent: CrowProcess, endpoint: FakeEndpoint, session: str, **scripts: Any) -> list[str]:
    """Send a prompt to the actor "parent". Return what its model was told."""
    endpoint.answer_with(cast(**scripts))
    await agent.prompt(session, "parent")
    return told(requests_of(endpoint, "parent")[-1])


def requests_of(endpoint: FakeEndpoint, actor: str) -> list[Recorded]:
    """Return the requests of a conversation whose first prompt begins with this word."""
    bodies = [each for each in endpoint.requests if each.body]
    return [each for each in bodies if str(each.body["messages"][1]["content"]).split()[:1] == [actor]]


def id_of(text: str) -> str:
    found = re.search(r"resume=(task-\w+)", text)
    assert found is not None, text
    return found[1]


async def test_a_subagents_edits_and_commands_stay_in_its_copy_until_they_are_kept(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("allow_once")
    before = picture(str(files))
    child = [
        calls(edit("one\n", "ONE\n")),
        calls(shell("cat src/a.py; echo new > made; rm b")),
        calls(("read_file", {"path": "made"}), ("grep", {"pattern": "ONE|new"}), ("list_files", {})),
        fake.text("child is done"),
    ]
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        results = await run(
            agent, endpoint, session, parent=[calls(task("child", isolated=True)), fake.text("Done.")], child=child
        )
        assert picture(str(files)) == before
        assert user.asked == []
        seen = [told(each) for each in requests_of(endpoint, "child")][-1]
        assert seen[1] == "ONE"
        assert seen[2] == "new"
        assert sorted(seen[3].splitlines()) == ["made:1: new", "src/a.py:1: ONE"]
        assert sorted(seen[4].split()) == ["made", "src/a.py"]
        text = results[-1]
        assert "child is done" in text
        assert f"changed {files}/src/a.py" in text
        assert "-one\n+ONE" in text
        kept = await run(
            agent,
            endpoint,
            session,
            parent=[calls(task("-", resume=id_of(text), changes="keep")), fake.text("Done.")],
        )
        assert kept[-1].startswith("Kept: "), kept
        assert len(user.asked) == 1
        assert f"changed {files}/src/a.py" in user.texts()[0]
        assert f"deleted {files}/b" in user.texts()[0]
        # a rule for this task's changes would never apply again
        assert [option["optionId"] for option in user.asked[0]["options"]] == ["allow_once", "reject_once"]
        after = picture(str(files))
        assert sorted(after) == [".", "made", "src", "src/a.py"]
        assert (files / "src" / "a.py").read_text() == "ONE\n"
        await agent.prompt(session, "/undo files")
        assert picture(str(files)) == before
        await agent.prompt(session, "/redo files")
        assert picture(str(files)) == after


async def test_a_subagent_moves_a_file_that_only_its_copy_has(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path, home: Path
) -> None:
    before = picture(str(files))
    moved = "*** Begin Patch\n*** Update File: made\n*** Move to: b\n@@\n-one\n+ONE\n*** End Patch"
    child = [
        calls(shell("echo one > made; chmod 755 made; rm b")),
        calls(("apply_patch", {"input": moved})),
        calls(shell("stat -c %a b; cat b; ls; ln -s b link")),
        calls(("apply_patch", {"input": "*** Begin Patch\n*** Delete File: link\n*** End Patch"})),
        fake.text("child is done"),
    ]
    configured(home, '[model]\nedit_tool = "apply_patch"\n')
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        session = await start(agent, files)
        await run(
            agent, endpoint, session, parent=[calls(task("child", isolated=True)), fake.text("Done.")], child=child
        )
        seen = [told(each) for each in requests_of(endpoint, "child")][-1]
        assert seen[1:3] == ["Edited made at line 1.\nMoved made to b.", "755\nONE\nb\nsrc"]
        assert seen[3].startswith(f"apply_patch: {files}/link is a link to b; ")
        assert picture(str(files)) == before


async def test_a_refused_keep_leaves_the_copy_and_conflicts_are_named(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("reject_once")
    child = [calls(shell("echo child > src/a.py; echo new > made")), fake.text("done")]
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        begun = [calls(task("child", isolated=True)), fake.text("Done.")]
        task_id = id_of((await run(agent, endpoint, session, parent=begun, child=child))[-1])

        async def settle(how: str) -> str:
            script = [calls(task("-", resume=task_id, changes=how)), fake.text("Done.")]
            return (await run(agent, endpoint, session, parent=script))[-1]

        refused = await settle("keep")
        assert refused.startswith("Nothing was kept, and the task's copy stays."), refused
        assert not (files / "made").exists()
        (files / "src" / "a.py").write_text("session\n")
        assert f"have both changed {files}/src/a.py" in await settle("keep")
        assert not (files / "made").exists()
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "accept-edits"})
        merged = await settle("merge")
        assert f"Kept: created {files}/made." in merged
        assert f"Not kept, because the workspace has changed them, too: {files}/src/a.py" in merged
        assert ((files / "src" / "a.py").read_text(), (files / "made").read_text()) == ("session\n", "new\n")
        assert await settle("drop") == f"The changes of {task_id} were dropped."
        assert "has no copy" in await settle("keep")
        assert (files / "src" / "a.py").read_text() == "session\n"
    assert len(user.asked) == 1


@pytest.mark.long
async def test_a_copy_outlives_a_kill_and_leaves_nothing_unconfined(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    before = picture(str(files))
    child = [
        calls(shell("echo child > made", access="full"), shell("sleep 1000 &", background=True)),
        calls(shell("echo child > made")),
        fake.text("done"),
    ]
    async with crow(endpoint=endpoint, env=CONFINED, answers=User().answers) as agent:
        session = await start(agent, files, "auto")
        begun = [calls(task("child", isolated=True)), fake.text("Done.")]
        task_id = id_of((await run(agent, endpoint, session, parent=begun, child=child))[-1])
        results = told(requests_of(endpoint, "child")[-1])
        assert all("works on a copy of the workspace" in result for result in results[:2]), results
        await agent.kill()
    assert picture(str(files)) == before
    async with crow(endpoint=endpoint, env=CONFINED, answers=User().answers) as agent:
        await agent.initialize()
        await agent.load_session(session, files)
        again = [calls(shell("cat made; echo more >> made")), fake.text("again")]
        resumed = [calls(task("child", resume=task_id)), fake.text("Done.")]
        text = (await run(agent, endpoint, session, parent=resumed, child=again))[-1]
        assert "+child\n+more" in text
        kept = [calls(task("-", resume=task_id, changes="keep")), fake.text("Done.")]
        assert "Kept: " in (await run(agent, endpoint, session, parent=kept))[-1]
    assert (files / "made").read_text() == "child\nmore\n"


async def test_a_subagent_finds_a_file_of_the_workspace_by_its_name_in_another_normalization_form(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    nfc, nfd = "caf\u00e9.txt", "cafe\u0301.txt"
    (files / nfd).write_text("one\n")
    child = [calls(edit("one", "two", nfc)), calls(edit("two", "three", nfc)), fake.text("child is done")]
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        session = await start(agent, files)
        (text,) = await run(
            agent, endpoint, session, parent=[calls(task("child", isolated=True)), fake.text("Done.")], child=child
        )
    assert f"changed {files}/{nfd}" in text
    assert "-one\n+three" in text
    assert (files / nfd).read_text() == "one\n"
    assert not (files / nfc).exists()

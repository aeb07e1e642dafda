"""Commands in the background of the real process run in a layer that `shell_output` looks at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_confinement import CONFINED, place, without_bubblewrap
from tests.stdio.test_layers import User, files, overlay, run, shell, start
from tests.stdio.test_subagents import notices
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Reply
from tests.tools.layers.trees import git, picture

__all__ = ["files", "overlay", "place"]

WAITS = "while [ ! -e $TMPDIR/{0} ]; do sleep 0.02; done"


def output(job: str = "job1", wait_s: int = 60) -> Reply:
    return fake.calls(("shell_output", {"job": job, "wait_s": wait_s}))


def go(name: str) -> Any:
    return shell(f"touch $TMPDIR/{name}")


async def test_changes_are_kept_when_the_output_is_read_and_can_be_undone(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("allow_once", "allow_once")
    before = picture(str(files))
    line = f"echo 1 > c; rm b; touch $TMPDIR/made; {WAITS.format('go')}; echo 2 > src/a.py; echo ended"
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        await run(agent, endpoint, session, shell(line, background=True), shell(WAITS.format("made")))
        assert picture(str(files)) == before
        assert user.asked == []
        await run(agent, endpoint, session, output(wait_s=0))
        assert f"created {files}/c" in user.texts()[0]
        assert (sorted(os.listdir(files)), (files / "src" / "a.py").read_text()) == (["c", "src"], "one\n")
        told = await run(agent, endpoint, session, output(wait_s=0), go("go"), output())
        assert (len(user.asked), "ended" in told[-1]) == (2, True)
        assert (files / "src" / "a.py").read_text() == "2\n"
        after = picture(str(files))
        for _ in range(2):
            await agent.prompt(session, "/undo files")
        assert picture(str(files)) == before
        for _ in range(2):
            await agent.prompt(session, "/redo files")
        assert picture(str(files)) == after


async def test_a_protected_file_of_a_running_command_never_reaches_the_workspace(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("reject_once")
    line = f"mkdir .vscode; echo x > .vscode/tasks.json; touch $TMPDIR/made; {WAITS.format('go')}"
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files, "auto")
        await run(agent, endpoint, session, shell(line, background=True), shell(WAITS.format("made")))
        assert sorted(os.listdir(files)) == ["b", "src"]
        told = await run(agent, endpoint, session, output(wait_s=0), output(wait_s=0), go("go"), output())
        assert f"Not changed: created {files}/.vscode/tasks.json (protected)" in told[-4]
        assert "Not changed" not in "".join(told[-3:]), "the model knows it already"
    assert sorted(os.listdir(files)) == ["b", "src"]
    assert len(user.asked) == 1


async def test_changes_whose_question_was_cancelled_are_asked_about_again(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("allow_once")
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        agent.answers["session/request_permission"] = lambda _: anyio.sleep_forever()
        session = await start(agent, files)
        line = f"echo 1 > c; {WAITS.format('go')}"
        endpoint.script(shell(line, background=True), go("go"), output())
        call = await agent.start_prompt(session, "go")
        await agent.wait_for(lambda message: message.get("method") == "session/request_permission")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        assert not (files / "c").exists()
        agent.answers |= user.answers
        await run(agent, endpoint, session, output())
    assert len(user.asked) == 1
    assert (files / "c").read_text() == "1\n"


async def test_a_running_command_sees_files_that_were_replaced_meanwhile(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    line = f"cat b; touch $TMPDIR/made; {WAITS.format('go')}; cat b"
    edit = {"path": "b", "old_text": "two", "new_text": "three"}
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        session = await start(agent, files, "auto")
        told = await run(
            agent,
            endpoint,
            session,
            shell(line, background=True),
            shell(WAITS.format("made")),
            fake.calls(("edit_file", edit)),
            go("go"),
            output(),
        )
    assert "three" in told[-1]


@pytest.mark.long
@pytest.mark.parametrize(("mode", "is_kept"), [("plan", False), ("auto", True)])
async def test_the_model_is_told_what_waits_after_the_end(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path, mode: str, is_kept: bool
) -> None:
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        await agent.initialize(session={"notices": {}})
        session = await agent.new_session(files)
        await agent.request("session/set_mode", {"sessionId": session, "modeId": mode})
        line = "while [ ! -e go ]; do sleep 0.02; done; echo 1 > c"
        await run(agent, endpoint, session, shell(line, background=True))
        (files / "go").touch()
        await agent.wait_for(lambda _: "The background command job1" in notices(agent, session))
        told = await run(agent, endpoint, session, output())
        assert f"created {files}/c" in str(endpoint.asked[-2].body["messages"])
        assert (files / "c").exists() == is_kept
        assert ("Not changed" in told[-1]) == (not is_kept)


async def test_without_layers_what_commands_change_is_undone_and_the_user_is_told_what_is_missing(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    git(files, "init", "-q")
    git(files, "add", "src")
    line = (
        "rm b; sed -i s/one/1/ src/a.py; echo new > c; mkdir -p d/e; mv c d/e/; git add -A; "
        "git -c user.name=a -c user.email=a@b commit -qm first"
    )
    seen: list[dict[str, list[str]]] = []

    def look() -> None:
        found = picture(str(files))
        seen.append({path: facts for path, facts in found.items() if not path.startswith(".git/objects")})

    look()
    async with crow(endpoint=endpoint, env=CONFINED, before=without_bubblewrap()) as agent:
        await agent.initialize(session={"notices": {}})
        session = await agent.new_session(files)
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
        await run(agent, endpoint, session, shell(line, access="write"))
        look()
        for command in ("/undo files", "/redo files", "/undo files"):
            await agent.prompt(session, command)
            look()
        await agent.wait_for(lambda _: "Commands run without layers" in notices(agent, session))
    assert not (files / "d").exists()
    assert (seen[2], seen[3], seen[4]) == (seen[0], seen[1], seen[0])

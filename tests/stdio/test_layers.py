"""Commands of the real process run in a layer first, and the user is asked about what they changed."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.tools.sandbox.confiner import choose_sandbox
from tests.stdio.conftest import StartCrow
from tests.stdio.test_confinement import CONFINED, place
from tests.stdio.test_postgres import prompted
from tests.stdio.test_tools import configured
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.postgres import create_database, drop_database
from tests.tools.layers.trees import git, picture

__all__ = ["place"]


@pytest.fixture(autouse=True)
def overlay() -> None:
    """Skips if no layers work on this machine."""
    sandbox = choose_sandbox().sandbox
    if sandbox is None or not sandbox.has_overlay:
        pytest.skip("there are no layers here")


class User:
    """Answers questions, and remembers them."""

    def __init__(self, *answers: str) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = [*answers]

    def answer(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(params)
        return {"outcome": {"outcome": "selected", "optionId": self._answers.pop(0)}}

    @property
    def answers(self) -> dict[str, Any]:
        return {"session/request_permission": self.answer}

    def texts(self) -> list[str]:
        """Return the text of each question, and the paths of its diffs."""
        return [
            "\n".join(
                part["path"] if part["type"] == "diff" else part["content"]["text"]
                for part in asked["toolCall"]["content"]
            )
            for asked in self.asked
        ]


def shell(command: str, **arguments: object) -> Any:
    return fake.calls(("shell", {"command": command, **arguments}))


async def run(agent: CrowProcess, endpoint: FakeEndpoint, session: str, *steps: Any) -> list[str]:
    """Send a prompt whose answer is these steps. Return what the model was told about each of them."""
    endpoint.script(*steps, fake.text("Done."))
    await agent.prompt(session, "go")
    return [message["content"] for message in endpoint.asked[-1].body["messages"] if message["role"] == "tool"]


async def start(agent: CrowProcess, place: Path, mode: str = "ask") -> str:
    await agent.initialize()
    session = await agent.new_session(place)
    await agent.request("session/set_mode", {"sessionId": session, "modeId": mode})
    return session


@pytest.fixture
def files(place: Path) -> Path:
    (place / "src").mkdir()
    (place / "src" / "a.py").write_text("one\n")
    (place / "b").write_text("two\n")
    (place / "b").chmod(0o640)
    os.utime(place / "b", ns=(0, 10**18))
    return place


async def test_the_user_is_asked_about_what_a_command_changed_and_can_undo_it(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("allow_once", "allow_once", "allow_once")
    before = picture(str(files))
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        told = await run(agent, endpoint, session, shell("cat b; ls src"), shell("rm b; sed -i s/one/1/ src/a.py"))
        assert told == ["two\na.py", "(no output)"]
        after = picture(str(files))
        assert sorted(after) == [".", "src", "src/a.py"]
        assert len(user.asked) == 1
        assert f"changed {files}/src/a.py" in user.texts()[0]
        assert f"deleted {files}/b" in user.texts()[0]
        before_diff = len(agent.text(session))
        await agent.prompt(session, "/diff")
        listed = re.fullmatch(
            r"Commands changed:\n- (.*); `/show call_\d+_0` shows how", agent.text(session)[before_diff:]
        )
        assert listed is not None
        assert sorted(listed[1].split(", ")) == ["`b`", "`src/a.py`"]
        await agent.prompt(session, "/undo files")
        assert picture(str(files)) == before
        await agent.prompt(session, "/redo files")
        assert picture(str(files)) == after
        await agent.prompt(session, "/undo files")
        assert picture(str(files)) == before
        await agent.prompt(session, "/redo files")
        assert picture(str(files)) == after
    assert len(user.asked) == 1


async def test_refused_changes_are_dropped_and_named_to_the_model(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("reject_once")
    before = picture(str(files))
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        told = await run(agent, endpoint, session, shell("rm -r src; echo gone"))
    assert picture(str(files)) == before
    assert "gone" in told[0]
    assert f"Not changed: deleted {files}/src/a.py" in told[0]


@pytest.mark.long
@pytest.mark.parametrize(("mode", "kept"), [("plan", False), ("accept-edits", True), ("auto", True)])
async def test_other_modes_keep_or_drop_without_a_question(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path, mode: str, kept: bool
) -> None:
    user = User()
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files, mode)
        told = await run(agent, endpoint, session, shell("echo 3 > c", access="read"))
    assert (files / "c").exists() == kept
    assert user.asked == []
    assert ("dropped" in told[0], f"Not changed: created {files}/c" in told[0]) == (not kept, not kept)


async def test_a_protected_file_is_asked_about_in_every_mode(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("reject_once", "allow_once")
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files, "auto")
        told = await run(agent, endpoint, session, shell("echo x > AGENTS.md; echo y > c"))
        assert f"created {files}/AGENTS.md (protected)" in told[0]
        assert sorted(os.listdir(files)) == ["b", "src"]
        await run(agent, endpoint, session, shell("echo x > AGENTS.md; echo y > c"))
    assert sorted(os.listdir(files)) == ["AGENTS.md", "b", "c", "src"]
    assert "AGENTS.md (protected)" in user.texts()[0]
    assert [option["optionId"] for option in user.asked[0]["options"]] == ["allow_once", "reject_once"]


async def test_commits_and_what_git_ignores_need_no_question_in_auto_and_only_one_in_ask(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    user = User("allow_always")
    git(files, "init", "-q")
    git(files, "config", "user.email", "a@b")
    git(files, "config", "user.name", "a")
    (files / ".gitignore").write_text("out/\n")
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files, "ask")
        await run(agent, endpoint, session, shell("mkdir out; echo > out/made; git status --short"))
        assert (files / "out" / "made").exists()
        assert user.asked == []
        await run(agent, endpoint, session, shell("git add ."), shell("git add -A"), shell("git status"))
        assert len(user.asked) == 1
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
        told = await run(agent, endpoint, session, shell("git commit -qm first && git log --oneline | wc -l"))
        assert told[-1] == "1"
    assert len(user.asked) == 1


async def test_a_deny_rule_for_changes_holds_for_what_git_ignores(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path, home: Path
) -> None:
    configured(home, '[permissions]\ndeny = ["shell_changes(.env)", "shell_changes(src/)"]\n')
    git(files, "init", "-q")
    (files / ".gitignore").write_text("out/\n.env\n")
    user = User()
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files, "auto")
        told = await run(
            agent,
            endpoint,
            session,
            shell("echo x > .env"),
            shell("echo x > .env; echo y > c"),
            shell("echo x > src/c"),
            shell("mkdir out; echo > out/made"),
        )
    assert ["forbids these changes" in text for text in told] == [True, True, True, False]
    assert not any((files / name).exists() for name in (".env", "c", "src/c"))
    assert (files / "out" / "made").exists()
    assert user.asked == []


async def test_an_answer_covers_changes_below_a_folder(crow: StartCrow, endpoint: FakeEndpoint, files: Path) -> None:
    user = User("allow_below", "reject_once")
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        await run(
            agent, endpoint, session, shell("echo 1 > src/c"), shell("echo 2 > src/d; X=1"), shell("echo 3 > e; :")
        )
    assert sorted(os.listdir(files / "src")) == ["a.py", "c", "d"]
    assert not (files / "e").exists()
    assert len(user.asked) == 2


async def test_a_file_that_the_user_saves_while_a_command_runs_is_not_overwritten(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path
) -> None:
    class Saving(User):
        def answer(self, params: dict[str, Any]) -> dict[str, Any]:
            (files / "b").write_text("mine\n")
            return super().answer(params)

    user = Saving("allow_once")
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files)
        told = await run(agent, endpoint, session, shell("echo theirs > b; echo > c"))
    assert (files / "b").read_text() == "mine\n"
    assert not (files / "c").exists()
    assert f"somebody else has changed the same files meanwhile: {files}/b" in told[0]


async def test_edits_and_commands_are_undone_in_order(crow: StartCrow, endpoint: FakeEndpoint, files: Path) -> None:
    user = User()
    before = (files / "src" / "a.py").read_text()
    edit = {"path": "src/a.py", "old_text": "one", "new_text": "two"}
    again = {"path": "src/a.py", "old_text": "three", "new_text": "four"}
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, files, "auto")
        await run(
            agent,
            endpoint,
            session,
            fake.calls(("read_file", {"path": "src/a.py"})),
            fake.calls(("edit_file", edit)),
            shell("sed -i s/two/three/ src/a.py; cat src/a.py"),
            fake.calls(("read_file", {"path": "src/a.py"})),
            fake.calls(("edit_file", again)),
        )
        assert (files / "src" / "a.py").read_text() == "four\n"
        await agent.prompt(session, "/undo files")
        assert (files / "src" / "a.py").read_text() == before
        await agent.prompt(session, "/redo files")
        assert (files / "src" / "a.py").read_text() == "four\n"


@pytest.mark.long
@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_a_kill_while_changes_are_kept_leaves_all_or_none_and_undo_still_works(
    crow: StartCrow, endpoint: FakeEndpoint, files: Path, home: Path, engine: str
) -> None:
    before = picture(str(files))
    line = "for i in $(seq 2000); do echo $i > src/$i; done; rm b; sed -i s/one/1/ src/a.py"
    async with engine_env(engine) as env:
        async with crow(endpoint=endpoint, env={**CONFINED, **env}) as agent:
            session = await start(agent, files, "auto")
            endpoint.script(shell(line), fake.text("Done."))
            await agent.start_prompt(session, "go")
            with anyio.fail_after(60):
                while not [*(home / "layers" / "changes").glob("*/applying")]:  # noqa: ASYNC110 - by another process
                    await asyncio.sleep(0)
            await agent.kill()
        async with crow(endpoint=endpoint, env={**CONFINED, **env}) as agent:
            await agent.initialize(session={"notices": {}})
            with anyio.fail_after(60):
                while True:  # PostgreSQL notices a little later that the other process is gone
                    with suppress(RpcError):
                        await agent.load_session(session, files)
                        break
            endpoint.script(fake.text("Yes."))
            await prompted(agent, session, "Did it work?")
            now = picture(str(files))
            is_kept = not (files / "b").exists()
            assert (now == before) == (not is_kept)
            assert len(now) == len(before) + (1_999 if is_kept else 0)
            told = agent.text(session) + str(agent.updates(session, "notice"))
            assert f"They are {'completed' if is_kept else 'taken back'} now" in told
            for number in ("/undo files", "/undo files"):
                await agent.prompt(session, number)
            assert picture(str(files)) == before
            assert "cannot be undone" not in agent.text(session)
            await agent.prompt(session, "/redo files")
            assert picture(str(files)) == now
    assert not [*(home / "layers" / "open").iterdir()]


@asynccontextmanager
async def engine_env(engine: str) -> AsyncIterator[dict[str, str]]:
    """The environment of a process whose sessions are in an empty database of this kind."""
    if engine == "sqlite":
        yield {}
        return
    url = await create_database()
    try:
        yield {"CROW_DATABASE_URL": url}
    finally:
        await drop_database(url)

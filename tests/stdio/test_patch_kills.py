"""Kills the real process while it writes the files of a patch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Reply

PATCH = """\
*** Begin Patch
*** Update File: a.txt
@@
-a
+new a
*** Update File: b.txt
@@
-b
+new b
*** Add File: c.txt
+new c
*** End Patch
"""
OLD = {"a.txt": "a\n", "b.txt": "b\n"}
NEW = {"a.txt": "new a\n", "b.txt": "new b\n", "c.txt": "new c\n"}


class DyingEditor:
    """An editor that writes files, but stops before it answers that it has written the file `last`."""

    def __init__(self, last: int) -> None:
        self.has_stopped = asyncio.Event()
        self._left = last

    def read(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"content": Path(params["path"]).read_text()}

    async def write(self, params: dict[str, Any]) -> dict[str, Any]:
        if self._left:
            await anyio.Path(params["path"]).write_text(params["content"])
            self._left -= 1
            return {}
        self.has_stopped.set()
        return await asyncio.Event().wait() and {}


def files(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(place.glob("?.txt"))}


def prepare(home: Path, place: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text('[model]\nedit_tool = "apply_patch"\n')
    for name, text in OLD.items():
        (place / name).write_text(text)


async def killed_in_patch(
    crow: StartCrow,
    endpoint: FakeEndpoint,
    home: Path,
    place: Path,
    *,
    written: int,
    patch: str = PATCH,
    first: Sequence[Reply] = (),
) -> str:
    """Kill crow when it has written this many files of the patch. Return the session. The model answers `first` before
    it sends the patch."""
    prepare(home, place)
    editor = DyingEditor(written)
    endpoint.script(*first, fake.calls(("apply_patch", {"input": patch})))
    answers = {"fs/read_text_file": editor.read, "fs/write_text_file": editor.write}
    async with crow(endpoint=endpoint, answers=answers) as agent:
        await agent.initialize(fs={"readTextFile": True, "writeTextFile": True})
        session = await agent.new_session(place)
        await agent.start_prompt(session, "go")
        await asyncio.wait_for(editor.has_stopped.wait(), 60)
        await agent.kill()
    return session


@pytest.mark.long
@pytest.mark.parametrize("written", [0, 1, 2])
async def test_a_patch_cut_off_between_two_files_is_taken_back_when_its_session_is_loaded(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, written: int
) -> None:
    session = await killed_in_patch(crow, endpoint, home, place, written=written)
    assert files(place) == {**OLD, **dict(list(NEW.items())[:written])}
    endpoint.script(fake.text("I see."), fake.text("Go on."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert files(place) == OLD
        await agent.prompt(session, "what happened?")
        await agent.prompt(session, "and now?")
        shown = agent.text(session)
    names = ["a.txt", "a.txt, b.txt"]
    what = f"What it had changed was taken back: {names[written - 1]}." if written else "It had not changed any file."
    words = f"crow was killed while it applied a patch. {what}"
    assert shown.count(words) == 1
    assert str(endpoint.asked[-1].body["messages"]).count(words) == 1
    assert files(place) == OLD


async def test_the_patch_of_a_subagent_is_taken_back_when_the_session_is_loaded(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    order = fake.calls(("task", {"description": "Renew", "prompt": "Renew all files."}))
    session = await killed_in_patch(crow, endpoint, home, place, written=2, first=(order,))
    assert files(place) != OLD
    endpoint.script(fake.text("I see."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        words = "What it had changed was taken back: a.txt, b.txt. It was the patch of the subagent Renew (task-"
        assert words in agent.text(session)
        assert files(place) == OLD
        await agent.prompt(session, "what happened?")
        assert agent.text(session).count("crow was killed while it applied") == 1
    assert str(endpoint.asked[-1].body["messages"]).count("crow was killed while it applied") == 1


DELETING = """\
*** Begin Patch
*** Delete File: a.txt
*** Update File: b.txt
@@
-b
+new b
*** Add File: c.txt
+new c
*** End Patch
"""
MOVING = """\
*** Begin Patch
*** Update File: a.txt
*** Move to: m.txt
@@
-a
+new a
*** Update File: b.txt
@@
-b
+new b
*** Add File: c.txt
+new c
*** End Patch
"""


@pytest.mark.long
@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("patch", [DELETING, MOVING], ids=["delete", "move"])
async def test_deletions_and_moves_of_a_patch_are_taken_back(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, patch: str, written: int
) -> None:
    session = await killed_in_patch(crow, endpoint, home, place, written=written, patch=patch)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert "crow was killed while it applied a patch." in agent.text(session)
        assert files(place) == OLD, agent.text(session)


async def test_a_file_that_somebody_changed_since_is_left_as_it_is(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    session = await killed_in_patch(crow, endpoint, home, place, written=2)
    (place / "b.txt").write_text("mine\n")
    endpoint.script(fake.text("I see."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        await agent.prompt(session, "what happened?")
        shown = agent.text(session)
    assert files(place) == {"a.txt": "a\n", "b.txt": "mine\n"}
    assert "taken back: a.txt. Check these files, which have changed since or could not be restored: b.txt." in shown


async def test_a_patch_that_was_written_whole_stays(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    session = await killed_in_patch(crow, endpoint, home, place, written=2)
    (place / "c.txt").write_text(NEW["c.txt"])  # the editor was about to do that
    endpoint.script(fake.text("I see."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        await agent.prompt(session, "what happened?")
        assert "All of its files have been changed: a.txt, b.txt, c.txt." in agent.text(session)
    assert files(place) == NEW

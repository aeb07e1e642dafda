"""Tests what a subagent gets besides its prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.agent.subagents.context import attached_files, state_part
from crow.agent.subagents.kinds import Speciality
from crow.domain.conversation import Projection
from crow.domain.entries import Checkpoint
from crow.domain.errors import ArgumentError
from crow.domain.messages import Resource, UserMessage
from crow.domain.rendering import parts_text
from crow.tools import AgentKind, Task
from tests.agent.harness import text
from tests.agent.subagents.test_subagents import Casting, running
from tests.support.paths import PathBuilder, said, user
from tests.support.scripted_model import Say, call


async def test_a_subagent_gets_named_files_and_the_state_but_no_denied_or_secret_file(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "private").mkdir(parents=True)
    (work / "a.py").write_text("print('rook')\n")
    (work / "private" / "notes").write_text("private words")
    (work / ".netrc").write_text("password secret words")
    (tmp_path / "outside").write_text("outside words")
    files = ["a.py", "a.py", "private/notes", ".netrc", "../outside", "none", "bad\nname"]
    order = call("task", description="look", prompt="child look", files=files, state=True)
    model = Casting(parent=[Say(text=["On it."], calls=(order,)), Say(text=["ok"])], child=[Say(text=["seen"])])
    async with running(tmp_path, model, deny=("read_file(private/**)",)) as run:
        await run.session.prompt(text("parent build the nest"))
    first = next(message for message in model.requests["child"][0].messages if isinstance(message, UserMessage))
    told = parts_text(first.parts)
    assert told.startswith("child look\n[a.py]\nprint('rook')\n")
    assert told.count("print('rook')") == 1
    assert "or are too large together: private/notes, .netrc, ../outside, none, bad name. Read them yourself" in told
    assert not any(words in told for words in ("private words", "secret words", "outside words"))
    assert "It is information, not part of your task." in told
    assert "[user]\nparent build the nest" in told
    assert "[assistant]\nOn it." in told


async def test_files_are_bounded_together_and_by_the_window() -> None:
    async def read(name: str) -> str:
        return name[0] * 100_000

    parts = await attached_files(["a", "b", "c"], read, window=None)
    texts = [part.text for part in parts if isinstance(part, Resource)]
    assert [one[0] for one in texts] == ["a", "b"]
    assert sum(map(len, texts)) < 81_000
    assert "too large together: c." in parts_text(parts)
    assert len(parts_text(await attached_files(["a", "b"], read, window=8_000))) < 9_000


def test_the_state_is_plan_changed_files_summary_and_newest_messages_in_a_fence() -> None:
    path = PathBuilder(user("old"))
    path.add(Checkpoint(compaction_id="c", summary="## Goal\nA nest.", first_kept=None, files_modified=("/w/a.py",)))
    path.add(user("```\nnow " + "x" * 50_000))
    path.add(said("working"))
    told = state_part(Projection(path.entries)).text
    assert "## Files changed\n/w/a.py\n\n## Goal\nA nest.\n\n## Since that summary\n\n[user]\n```\nnow" in told
    assert told.endswith("[assistant]\nworking\n````")
    assert len(told) < 10_000


@pytest.mark.parametrize(
    ("context", "task", "words"),
    [
        (("files",), Task(title="t", prompt="p", state=True), "gets no state, only its prompt and files"),
        (("state",), Task(title="t", prompt="p", files=("a",)), "gets no files, only its prompt and state"),
        ((), Task(title="t", prompt="p", files=("a",)), "the agent kind gets no files, only its prompt; put it"),
    ],
)
def test_a_kind_gets_only_what_its_file_says_also_when_it_is_resumed(
    context: tuple[str, ...], task: Task, words: str
) -> None:
    kind = AgentKind(name="kind", source="/kind.md", context=context)
    fresh = Speciality.of(Task(title="t", prompt="p", kind=kind), ())
    for each in (fresh, Speciality.stored(fresh.config({}))):
        each.check_context(Task(title="t", prompt="p"))
        with pytest.raises(ArgumentError, match=words):
            each.check_context(task)


def test_a_subagent_stored_by_an_older_version_gets_everything() -> None:
    stored = {"agent": {"name": "kind", "instructions": "", "tools": None, "model": "", "mode": ""}}
    Speciality.stored(stored).check_context(Task(title="t", prompt="p", files=("a",), state=True))


@pytest.mark.parametrize(
    "agent",
    [
        {"name": 1, "instructions": "x", "tools": ["read_file"]},
        {"name": "kind", "instructions": "x", "tools": "all", "mode": "root"},
        "damaged",
    ],
)
def test_a_damaged_kind_allows_nothing(agent: object) -> None:
    stored = Speciality.stored({"agent": agent})
    assert (stored.tools, stored.mode_in("auto")) == ((), "plan")

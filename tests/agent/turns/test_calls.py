"""The calls of one step take effect in call order."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.entries import Assistant, ToolResult
from crow.domain.messages import ToolCall
from tests.agent.harness import NoteTaker, text
from tests.agent.subagents.test_subagents import Casting, running
from tests.support.amounts import examples
from tests.support.scripted_model import Say, call

START = "one\n"
CALLS_OF_D: tuple[tuple[str, dict[str, object]], ...] = (
    ("read_file", {"path": "d/key"}),
    ("grep", {"pattern": "e", "path": "d"}),
    ("list_files", {"path": "d"}),
)


@dataclass(frozen=True)
class Edit:
    old: str
    new: str

    def call(self, call_id: str) -> ToolCall:
        return call("edit_file", call_id, path="a.txt", old_text=self.old, new_text=self.new)

    def then(self, held: str) -> tuple[str, bool]:
        done = self.old != self.new and held.count(self.old) == 1
        return (held.replace(self.old, self.new) if done else held), not done


@dataclass(frozen=True)
class Write:
    content: str

    def call(self, call_id: str) -> ToolCall:
        return call("write_file", call_id, path="a.txt", content=self.content)

    def then(self, held: str) -> tuple[str, bool]:
        return self.content, False


@dataclass(frozen=True)
class Show:
    """A command that prints the file as it is when it runs."""

    def call(self, call_id: str) -> ToolCall:
        return call("shell", call_id, command="cat a.txt")

    def then(self, held: str) -> tuple[str, bool]:
        return held, False


WORDS = st.sampled_from(["one", "two", "three"])
STEPS = st.lists(
    st.one_of(st.builds(Edit, WORDS, WORDS), st.builds(Write, WORDS.map(lambda word: f"{word}\n")), st.builds(Show)),
    min_size=2,
    max_size=5,
)


async def done_in_one_step(root: Path, actions: Sequence[Edit | Write | Show]) -> tuple[str, list[ToolResult]]:
    (root / "work").mkdir()
    (root / "work" / "a.txt").write_text(START)
    calls = tuple(action.call(f"c{index}") for index, action in enumerate(actions))
    async with running(root, Casting(go=[Say(calls=calls), Say(text=["ok"])]), mode="auto", allow=("shell",)) as run:
        await run.session.prompt(text("go"))
        results = sorted(run.client.stored(ToolResult), key=lambda result: result.call.index)
    return (root / "work" / "a.txt").read_text(), results


@pytest.mark.long
@settings(max_examples=examples(12))
@given(STEPS)
def test_edits_writes_and_commands_of_one_step_take_effect_in_call_order(actions: list[Edit | Write | Show]) -> None:
    held, expected = START, []
    for action in actions:
        held, failed = action.then(held)
        expected.append((held.removesuffix("\n") if isinstance(action, Show) else None, failed))
    with tempfile.TemporaryDirectory() as directory:
        at_last, results = asyncio.run(done_in_one_step(Path(directory), actions))
    got = [
        (result.text if isinstance(action, Show) else None, result.is_error)
        for action, result in zip(actions, results, strict=True)
    ]
    assert (at_last, got) == (held, expected)


async def test_a_file_that_another_call_of_the_step_redirected_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key").write_text("secret\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "d").mkdir()
    (tmp_path / "work" / "d" / "key").write_text("mine\n")
    move = call("shell", "c0", command="rm -r d && ln -s ../outside d && echo moved")
    reads = [call(name, name, **more) for name, more in CALLS_OF_D]
    write = call("write_file", "c9", path="d/key", content="changed\n")
    client = NoteTaker("reject_once")
    model = Casting(go=[Say(calls=(move, *reads, write)), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", client=client, allow=("shell",)) as run:
        await run.session.prompt(text("go"))
        results = sorted(run.client.stored(ToolResult), key=lambda result: result.call.index)
    assert results[0].text == "moved"
    assert not any("secret" in result.text for result in results)
    assert [question.name for question in client.questions] == ["write_file"], "asked: it leads outside by then"
    assert results[-1].text.startswith("The user did not allow this call.")
    assert (tmp_path / "outside" / "key").read_text() == "secret\n"


async def test_a_call_in_another_agent_s_terms_is_stored_and_shown_as_it_was_understood(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one\n")
    edit = call("Edit", "c0", file_path="a.txt", old_string="one", new_string="two")
    async with running(tmp_path, Casting(go=[Say(calls=(edit,)), Say(text=["ok"])]), mode="auto") as run:
        await run.session.prompt(text("go"))
        (stored,) = run.client.stored(Assistant)[0].calls
        (result,) = run.client.stored(ToolResult)
    assert (stored.name, json.loads(stored.arguments)) == (
        "edit_file",
        {"path": "a.txt", "old_text": "one", "new_text": "two"},
    )
    assert (result.text, (tmp_path / "work" / "a.txt").read_text()) == ("Edited a.txt in 1 place, at line 1.", "two\n")


async def test_the_words_of_a_failed_edit_quote_no_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "key.txt").write_text("first\nhush-hush\n")
    edit = call("edit_file", "c0", path="key.txt", old_text="first\nhash", new_text="x")
    model = Casting(go=[Say(calls=(edit,)), Say(text=["ok"])])
    async with running(tmp_path, model, mode="auto", deny=("read_file(key.txt)",)) as run:
        await run.session.prompt(text("go"))
        (result,) = run.client.stored(ToolResult)
    assert "hush" not in result.text
    assert result.is_error

"""Tests commands that move between branches, and what the model sees afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.history.options import set_model, set_option
from crow.domain.conversation import for_model
from crow.domain.entries import Assistant, Checkpoint, Command, Entry, NewEntry, Note, Remark, Reminder, User
from crow.domain.events import OptionsChanged, TitleChanged
from crow.domain.messages import AssistantMessage, Message, SystemMessage, Text, ToolMessage, UserMessage
from crow.store import NewSession
from tests.agent.harness import NoteTaker, Opened, opened, text
from tests.support.amounts import examples
from tests.support.scripted_model import Say, ScriptedModel


def answers(*words: str) -> ScriptedModel:
    return ScriptedModel(*(Say(text=[word]) for word in words))


async def say(run: Opened, *prompts: str) -> str:
    """Send the prompts. Returns the answer of the last command."""
    for prompt in prompts:
        await run.session.prompt(text(prompt))
    told = run.client.stored(Command)
    return told[-1].answer if told else ""


def seen(messages: Sequence[Message]) -> list[str]:
    """The texts that the model sees, without crow's reminders."""
    words = []
    for message in messages:
        match message:
            case UserMessage(parts=parts):
                words += [part.text for part in parts if isinstance(part, Text) and "<reminder>" not in part.text]
            case AssistantMessage(text=said):
                words.append(said)
            case _:
                pass
    return words


async def path_words(run: Opened) -> list[str]:
    return seen(for_model(await run.log()).messages)


async def test_model_does_not_see_an_undone_turn_and_redo_brings_it_back(tmp_path: Path) -> None:
    model = answers("1", "2", "3")
    async with opened(tmp_path, model) as run:
        answer = await say(run, "one", "two", "/undo")
        assert answer.startswith("Took back the last turn, “two”. The model no longer sees it")
        assert await path_words(run) == ["one", "1"]
        assert (await say(run, "/redo")).startswith("Back where you were before `/undo`, after “two”.")
        await say(run, "three")
        assert seen(model.requests[-1].messages) == ["one", "1", "two", "2", "three"]


async def test_undone_turns_stay_undone_in_another_process_and_redo_works_there(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2")) as run:
        await say(run, "one", "two", "/undo", "/undo")
        before = await run.log()
    model = answers("3")
    async with opened(tmp_path, model, session_id="s1") as run:
        assert await run.log() == before
        await say(run, "/redo", "/redo", "three")
        assert seen(model.requests[0].messages) == ["one", "1", "two", "2", "three"]


async def test_empty_session_has_nothing_to_undo_redo_or_retry(tmp_path: Path) -> None:
    async with opened(tmp_path, answers()) as run:
        assert (await say(run, "/undo")).startswith("There is nothing to undo: this branch has no prompts.")
        assert (await say(run, "/redo")).startswith("There is nothing to redo.")
        assert (await say(run, "/retry")).startswith("There is nothing to retry")
        assert (await say(run, "/clear")).startswith("This branch is empty already.")
        assert (await say(run, "/history")).startswith("This branch has no prompts yet.")
        assert (await say(run, "/tree")).startswith("- **you are here** `#")


async def test_prompt_after_an_undo_ends_the_redo_but_tree_still_lists_the_branch(tmp_path: Path) -> None:
    model = answers("1", "2", "3", "4")
    async with opened(tmp_path, model) as run:
        left = (await say(run, "one", "two"), run.session.branch.leaf)[1]
        assert "you have sent other prompts since" in await say(run, "/undo", "three", "/redo")
        tree = await say(run, "/tree")
        assert f"- `#{left}`: 2 prompts, last “two”" in tree
        assert tree.startswith("- **you are here** `#")
        assert (await say(run, f"/rewind #{left}")).startswith(f"Now at entry #{left}.")
        await say(run, "four")
        assert seen(model.requests[-1].messages) == ["one", "1", "two", "2", "four"]
        assert "2 prompts, last “three”" in await say(run, "/tree")


MODELS = ("scripted", "large")


def options_of(run: Opened) -> tuple[str, object]:
    row = run.session.branch.row
    return row.model, row.config.get("thought_level", "")


async def test_going_back_restores_the_model_and_the_thought_level(tmp_path: Path) -> None:
    model = answers("1", "2", "3")
    async with opened(tmp_path, model, models=MODELS) as run:
        branch = run.session.branch
        await set_option(branch, "thought_level", "low")  # chosen before the first prompt: nothing to go back to
        await say(run, "one")
        await set_option(branch, "thought_level", "high")
        await say(run, "two", "/model large", "three")
        told = len([event for event in run.client.events if isinstance(event, OptionsChanged)])
        assert "again" not in (await say(run, "/undo")).partition("/redo")[2]  # the model was changed before "three"
        assert options_of(run) == ("large", "high")
        assert (await say(run, "/rewind 2")).endswith("The model is `scripted` again.")
        assert options_of(run) == ("scripted", "high")
        assert (await say(run, "/rewind 1")).endswith("The thought level is low again.")
        assert options_of(run) == ("scripted", "low")
        assert (await say(run, "/redo")).endswith("The thought level is high again.")
        assert (await say(run, "/redo")).endswith("The model is `large` again.")
        assert options_of(run) == ("large", "high")
        assert options_of(run) == ((row := await run.store.session("s1")).model, row.config["thought_level"])
        assert len([event for event in run.client.events if isinstance(event, OptionsChanged)]) == told + 4
        assert [entry.body for entry in await run.log() if isinstance(entry.body, Note)] == [
            Note(about="thought_level", value="high", previous="low"),
            Note(about="model", value="large", previous="scripted"),
        ]


@pytest.mark.parametrize("command", ["/retry", "/clear", "/new"])
async def test_starting_again_keeps_the_options_until_the_user_goes_back(tmp_path: Path, command: str) -> None:
    model = answers("1", "2", "3")
    async with opened(tmp_path, model, models=MODELS) as run:
        await say(run, "one")
        first = run.session.branch.leaf
        await set_model(run.session.branch, "large")
        await say(run, command, "two")
        assert options_of(run) == ("large", "")
        assert (await say(run, f"/rewind #{first}")).endswith("The model is `scripted` again.")


async def test_a_model_that_is_not_offered_and_an_unknown_thought_level_are_not_restored(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2"), models=("large",)) as run:
        await say(run, "one")
        hostile = Note(about="thought_level", value="high", previous="${OPENAI_API_KEY}")
        await run.session.branch.record([NewEntry(body=hostile)])
        await set_model(run.session.branch, "large")
        assert not (await say(run, "/undo")).endswith("again.")
        assert options_of(run) == ("large", "")
        assert not (await say(run, "/redo")).endswith("`large` again.")
        assert options_of(run) == ("large", "high")


async def test_a_fork_has_the_model_and_the_thought_level_of_its_place(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2"), models=MODELS) as run:
        await say(run, "one")
        first = run.session.branch.leaf
        await set_option(run.session.branch, "thought_level", "high")
        await say(run, "/model large", "two", "/fork", f"/fork #{first}")
        here, there = (await run.store.sessions()).rows[1:]
        assert (here.model, here.config) == ("large", {"thought_level": "high"})
        assert (there.model, there.config) == ("scripted", {"thought_level": ""})
        assert options_of(run) == ("large", "high")


async def test_notes_about_options_do_not_change_what_the_model_sees(tmp_path: Path) -> None:
    model = answers("1", "2")
    async with opened(tmp_path, model, models=MODELS) as run:
        await say(run, "one")
        await set_option(run.session.branch, "thought_level", "high")
        await say(run, "two")
        first, second = (request.messages for request in model.requests)
        assert second[: len(first)] == first
        assert model.requests[0].tools == model.requests[1].tools


@pytest.mark.parametrize("command", ["clear", "new", "undo", "rewind 1", "retry"])
async def test_redo_names_the_command_that_it_reverses(tmp_path: Path, command: str) -> None:
    async with opened(tmp_path, answers("1", "2")) as run:
        told = await say(run, "one", f"/{command}", "/redo")
        # after /retry, the prompt was sent again
        expected = "There is nothing to redo" if command == "retry" else f"Back where you were before `/{command[:6]}"
        assert told.startswith(expected.removesuffix(" "))


async def test_rewind_goes_to_before_a_numbered_prompt_and_redo_back(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2", "3")) as run:
        history = await say(run, "one", "two", "three", "/history")
        assert [line.split(" `#")[0] for line in history.splitlines()[:3]] == [
            "- 1. “one”",
            "- 2. “two”",
            "- 3. “three”",
        ]
        assert (await say(run, "/rewind 2")).startswith("Now before prompt 2, “two”. The model sees nothing that came")
        assert await path_words(run) == ["one", "1"]
        await say(run, "/rewind 1")
        assert await path_words(run) == []
        await say(run, "/redo", "/redo")
        assert await path_words(run) == ["one", "1", "two", "2", "three", "3"]


WRONG = (
    ("/rewind", "`/rewind` needs a place: prompt number | label | #entry."),
    ("/rewind 9", "There is no prompt 9; this branch has 1."),
    ("/rewind 0", "There is no prompt 0; this branch has 1."),
    ("/rewind #999", "There is no entry #999 in this conversation."),
    ("/rewind #x", "There is no entry #x in this conversation."),
    (f"/rewind #{'9' * 5_000}", f"There is no entry #{'9' * 5_000} in this conversation."),
    (f"/rewind {'9' * 5_000}", "There is no label"),
    ("/rewind nowhere", "There is no label “nowhere”."),
    ("/rewind 1 files keep", "`files` restores files and `keep` leaves them as they are"),
    ("/undo 3", "`/undo 3`: expected at most [files | keep] [summary]."),
    ("/new prompt", "`/new` takes no argument."),
    ("/label 12", "“12” cannot be a label"),
    ("/label #x", "There is no entry #x in this conversation."),
    ("/label #1", "“” cannot be a label. A label has 1 to 60 characters"),
    ("/label #1 #2", "“#2” cannot be a label"),
    ("/label red\x1b[31m", "“red\\x1b[31m” cannot be a label"),
    ("/label a\u202eb", "“a\\u202eb” cannot be a label"),
    ("/label " + "x" * 61, "“" + "x" * 59 + "…” cannot be a label. A label has 1 to 60 characters"),
    ("/label remove nothing", "There is no label “nothing”. `/label` lists them."),
    ("/history 0", "`/history 0`: expected no argument, a number"),
    ("/history x", "`/history x`: expected no argument, a number of lines, such as 10, or `all`."),
    ("/skills", "The model has loaded no skills."),
    ("/skills unload", "`/skills unload`: expected no argument, or `unload` and the name of a skill."),
    ("/skills unload x", "The model has loaded no skill “x”. Loaded: none."),
    ("/fork 1", "There is nothing to fork:"),
    ("/tree x", "`/tree x`: expected no argument, or `all`"),
    (f"/title {'x' * 300}", "That title has 300 characters; expected at most 200."),
)


async def test_wrong_argument_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1")) as run:
        await say(run, "one")
        for typed, answer in WRONG:
            assert (await say(run, typed)).startswith(answer), typed
            assert await path_words(run) == ["one", "1"], typed
            assert await run.store.moves("s1") == (), typed


async def test_retry_asks_the_same_prompt_on_a_new_branch_and_keeps_the_first_answer(tmp_path: Path) -> None:
    model = answers("1", "2", "better")
    async with opened(tmp_path, model) as run:
        await say(run, "one", "two")
        first = run.session.branch.leaf
        assert await run.session.prompt(text("/retry")) == "end_turn"
        assert seen(model.requests[-1].messages) == ["one", "1", "two"]
        assert await path_words(run) == ["one", "1", "two", "better"]
        assert (await run.kinds())[-5:] == ["TurnEnd", "Command", "User", "Assistant", "TurnEnd"]
        assert f"`#{first}`: 2 prompts, last “two”" in await say(run, "/tree")
        assert "you have sent other prompts since" in await say(run, "/redo")


async def test_any_entry_gets_a_label_that_lists_show_and_rewind_goes_to(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2", "3")) as run:
        await say(run, "one", "two")
        first = next(entry.id for entry in await run.log() if isinstance(entry.body, User))
        answer = next(entry.id for entry in await run.log() if isinstance(entry.body, Assistant))
        assert (await say(run, f"/label #{first} start")).startswith(f"Entry `#{first}` is now “start”.")
        await say(run, f"/label #{answer} first answer", "/label here")
        assert f"- 1. “one” `#{first}` (label “start”)\n- label “first answer” `#{answer}`" in await say(
            run, "/history"
        )
        assert (await say(run, "/history 1")).startswith("- … 3 earlier; `/history all` shows them\n- label “here”")
        assert "labels “start”, “first answer”, “here”" in await say(run, "/tree")
        assert (await say(run, "/rewind first answer")).startswith("Now at the label “first answer”.")
        assert await path_words(run) == ["one", "1"]
        await say(run, "/label remove start", "three")
        assert "start" not in await say(run, "/label")


async def test_label_works_from_any_branch(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2", "3")) as run:
        assert (await say(run, "one", "/label good  idea")).startswith("This place is now “good idea”")
        await say(run, "two", "/rewind 1")
        assert "label “good idea”" in await say(run, "/tree")
        assert (await say(run, "/label")).startswith("- “good idea” `#")
        assert (await say(run, "/rewind good idea")).startswith("Now at the label “good idea”.")
        assert await path_words(run) == ["one", "1"]
        assert "- label “good idea”" in await say(run, "/history")


@pytest.mark.parametrize("command", ["/new", "/clear"])
async def test_fresh_start_keeps_the_session_id_and_the_old_branch(tmp_path: Path, command: str) -> None:
    model = answers("1", "2")
    async with opened(tmp_path, model) as run:
        await say(run, "one")
        assert (await say(run, command)).startswith("A fresh start in the same session.")
        assert TitleChanged(title=None) in run.client.events
        await say(run, "two")
        assert seen(model.requests[-1].messages) == ["two"]
        assert (await run.store.session("s1")).title == "two"
        tree = await say(run, "/tree")
        assert "1 prompt, last “two”" in tree
        assert "1 prompt, last “one”" in tree


@pytest.mark.parametrize("command", ["/new", "/clear"])
async def test_redo_reverses_a_fresh_start_and_a_title_set_by_the_user_stays(tmp_path: Path, command: str) -> None:
    async with opened(tmp_path, answers("1")) as run:
        told = await say(run, "one", "/title  My \n nest", command, "/redo")
        assert told == f"Back where you were before `{command}`, after “one”. The model sees that part again."
        assert await path_words(run) == ["one", "1"]
        assert (await run.store.session("s1")).title == "My nest"


async def test_new_moves_the_alias_to_a_new_session_and_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    model = answers("1", "2")
    async with opened(tmp_path, answers()) as run:
        await run.store.create_session(
            NewSession(id="named", cwd=str(tmp_path), model="scripted", mode="auto", alias="cli:default")
        )
    async with opened(tmp_path, model, session_id="named") as run:
        answer = await say(run, "one", "/new")
        made = await run.store.session_by_alias("cli:default")
        assert made is not None
        assert f"`{made.id}`" in answer
        assert (made.leaf, made.mode, made.cwd, made.has_prompt) == (None, "auto", str(tmp_path), False)
        await say(run, "two")
        assert seen(model.requests[-1].messages) == ["one", "1", "two"]
        assert (await say(run, "/new")).startswith("A fresh start in the same session.")


async def test_fork_starts_where_it_was_made_and_both_sessions_continue(tmp_path: Path) -> None:
    model = answers("1", "2", "3", "4")
    async with opened(tmp_path, model) as run:
        answer = await say(run, "one", "two", "/fork 2")
        assert answer.startswith("Forked before prompt 2, “two”: `crow-")
        assert "“one (fork 1)”" in answer
        fork = answer.split("`")[1]
        await say(run, "three")
        assert seen(model.requests[-1].messages) == ["one", "1", "two", "2", "three"]
    async with opened(tmp_path, model, session_id=fork) as run:
        await say(run, "four")
        assert seen(model.requests[-1].messages) == ["one", "1", "four"]
        assert (await say(run, "/undo", "/tree")).startswith("- **you are here**")


async def test_undo_goes_back_past_a_compaction(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "2")) as run:
        await say(run, "one", "two")
        checkpoint = Checkpoint(compaction_id="c", summary="sum", first_kept=None)
        await run.session.branch.record([NewEntry(body=checkpoint)])
        assert "two" not in await path_words(run)
        assert "- compaction (summary)" in await say(run, "/history")
        assert (await say(run, "/undo")).startswith("Took back the last turn, “two”.")
        assert await path_words(run) == ["one", "1"]
    async with opened(tmp_path, answers(), session_id="s1") as run:
        await say(run, "/redo")
        assert "- compaction (summary)" in await say(run, "/history")


async def test_summary_option_tells_the_model_about_the_branch_that_was_left(tmp_path: Path) -> None:
    model = answers("1", "tried twigs", "Twigs do not hold.", "3")
    async with opened(tmp_path, model) as run:
        await say(run, "one", "two", "/undo summary")
        asked = str(model.requests[2].messages[-1])
        assert "tried twigs" in asked
        assert "The user has abandoned this line of work" in asked
        (reminder,) = [body for body in run.client.stored(Reminder) if "another line of work" in body.text]
        assert "Twigs do not hold." in reminder.text
        await say(run, "three")
        assert "Twigs do not hold." in str(model.requests[-1].messages)
        assert "two" not in seen(model.requests[-1].messages)


async def test_code_takes_notes_if_the_summary_of_a_branch_fails(tmp_path: Path) -> None:
    async with opened(tmp_path, answers("1", "tried twigs", "")) as run:
        await say(run, "one", "two", "/undo summary")
        (reminder,) = [body for body in run.client.stored(Reminder) if "another line of work" in body.text]
        assert "tried twigs" in reminder.text
        (shown,) = run.client.stored(Remark)
        assert shown.text.startswith(
            "The model did not summarise the work that you left, so crow took notes. The model sees:"
        )
        assert "tried twigs" in shown.text


async def test_title_is_stored_shown_and_published(tmp_path: Path) -> None:
    client = NoteTaker()
    async with opened(tmp_path, answers("1"), client=client) as run:
        assert await say(run, "/title") == "There is no title yet."
        assert await say(run, "/title Nest building") == "The title is now “Nest building”."
        assert TitleChanged(title="Nest building") in client.events
        await say(run, "one")
        row = await run.store.session("s1")
        assert (row.title, row.title_by_user) == ("Nest building", True)
        assert (await say(run, "/title")).startswith("The title is “Nest building”.")


def check_valid(log: Sequence[Entry]) -> None:
    """The path has no gaps and makes a valid request."""
    assert [entry.parent for entry in log] == [None, *(entry.id for entry in log[:-1])][: len(log)]
    messages = for_model(log).messages
    assert isinstance(messages[0], SystemMessage)
    for before, after in pairwise(messages):
        assert type(before) is not type(after) or isinstance(after, ToolMessage)


STEPS = st.lists(
    st.sampled_from(
        ["prompt", "prompt", "/undo", "/redo", "/rewind 1", "/rewind 2", "/fork", "/retry", "/new", "/label x"]
    ),
    max_size=10,
)


@pytest.mark.long
@settings(max_examples=examples(20))
@given(steps=STEPS)
async def test_any_walk_leaves_a_valid_path_and_redo_inverts_undo(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = answers(*(f"answer {number}" for number in range(20)))
        async with opened(Path(directory), model) as run:
            for number, step in enumerate(steps):
                await say(run, f"prompt {number}" if step == "prompt" else step)
                check_valid(await run.log())
            before = await path_words(run)
            moved = (await say(run, "/undo")).startswith("Took back")
            check_valid(await run.log())
            assert (await path_words(run) == before[:-2]) if moved else (before == [])
            if moved:
                await say(run, "/redo")
                assert await path_words(run) == before
            tail = await run.store.tail("s1")
            assert for_model(tail.entries) == for_model(await run.log()) == run.session.branch.context()

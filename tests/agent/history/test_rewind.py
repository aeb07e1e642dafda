"""Tests how undo, rewind and redo restore files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.domain.entries import Checkpoint, Command, File, Remark, Reminder, Started, ToolResult, TurnEnd
from crow.domain.events import CallAnnounced, CallEnded
from crow.llm import ModelInfo
from crow.tools.mcp.client import open_toolbox
from tests.agent.harness import NoteTaker, Opened, opened, text
from tests.support.compaction import SUMMARY
from tests.support.scripted_model import Say, ScriptedModel, call


def writes(**files: str) -> tuple[Say, Say]:
    """A turn that writes these files (`_` stands for the dot in their names)."""
    calls = tuple(
        call("write_file", f"c{number}", path=name.replace("_", "."), content=content)
        for number, (name, content) in enumerate(files.items())
    )
    return Say(calls=calls), Say(text=["written"])


@asynccontextmanager
async def working(
    place: Path,
    *turns: tuple[Say, ...],
    answers: tuple[PermissionAnswer, ...] = (),
    session_id: str | None = None,
    client: NoteTaker | None = None,
) -> AsyncIterator[Opened]:
    model, client = ScriptedModel(*(say for turn in turns for say in turn)), client or NoteTaker(*answers)
    async with opened(place, model, client=client, mode="auto", session_id=session_id, open_tools=open_toolbox) as run:
        yield run


def restore_results(run: Opened) -> list[str]:
    return [result.text for result in run.client.stored(ToolResult) if result.name == "put_back_files"]


async def test_undo_offers_to_restore_files_with_diffs_and_restores_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"was\r\n")
    async with working(tmp_path, writes(a_txt="is", b_txt="new")) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/undo"))
        (question,) = run.client.questions
        assert (question.name, question.always) == ("put_back_files", "")
        assert question.plan.announcement.title == "Restore a.txt, b.txt"
        assert [(diff.old_text, diff.new_text) for diff in question.plan.announcement.diffs] == [
            ("is", "was\r\n"),
            ("new", ""),
        ]
        assert (tmp_path / "a.txt").read_bytes() == b"was\r\n"
        assert not (tmp_path / "b.txt").exists()
        assert restore_results(run) == ["Restored: a.txt.\nDeleted: b.txt."]
        assert await run.kinds() == ["Command", "Started", "File", "File", "ToolResult", "TurnEnd"]
        assert run.client.stored(Reminder)[-1:] == [] or "still" not in run.client.stored(Reminder)[-1].text


async def test_redo_and_another_undo_restore_the_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("was")
    async with working(tmp_path, writes(a_txt="is", b_txt="new")) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/undo files"))
        await run.session.prompt(text("/redo files"))
        assert ((tmp_path / "a.txt").read_text(), (tmp_path / "b.txt").read_text()) == ("is", "new")
        await run.session.prompt(text("/undo files"))
        assert (tmp_path / "a.txt").read_text() == "was"
        assert not (tmp_path / "b.txt").exists()
        assert run.client.questions == []


async def test_several_undos_and_redos_restore_the_files_of_their_turns(tmp_path: Path) -> None:
    def seen() -> list[str]:
        return sorted(f"{path.name} {path.read_text()}" for path in tmp_path.glob("*.txt"))

    async with working(tmp_path, writes(a_txt="1"), writes(b_txt="2"), writes(a_txt="3", c_txt="3")) as run:
        states = [seen()]
        for _ in range(3):
            await run.session.prompt(text("go"))
            states.append(seen())
        for number in (2, 1, 0):
            await run.session.prompt(text("/undo files"))
            assert seen() == states[number]
        for number in (1, 2, 3):
            await run.session.prompt(text("/redo files"))
            assert seen() == states[number]
        await run.session.prompt(text("/undo files"))
        await run.session.prompt(text("/undo files"))
        assert seen() == states[1]
        assert not [remark for remark in run.client.stored(Remark) if "Not restored" in remark.text]


async def test_rewind_restores_the_first_content_of_a_file_also_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0")
    async with working(tmp_path, writes(a_txt="1"), writes(a_txt="2"), writes(a_txt="3")) as run:
        for _ in range(3):
            await run.session.prompt(text("go"))
    async with working(tmp_path, session_id="s1") as run:
        await run.session.prompt(text("/rewind 2 files"))
        assert (tmp_path / "a.txt").read_text() == "1"
        await run.session.prompt(text("/undo"))
        assert (tmp_path / "a.txt").read_text() == "0"


async def test_rejection_keeps_the_files_and_tells_the_model_that_they_are_changed(tmp_path: Path) -> None:
    async with working(tmp_path, writes(a_txt="is"), (Say(text=["ok"]),), answers=("reject_once",)) as run:
        await run.session.prompt(text("go"))
        assert await run.session.prompt(text("/undo")) == "end_turn"
        assert (tmp_path / "a.txt").read_text() == "is"
        assert restore_results(run) == ["Kept as is: a.txt."]
        shown = run.client.stored(ToolResult)[-1].announcement  # not a diff of what was not done
        assert (shown.title, shown.diffs) == ("Kept as is: a.txt", ())
        assert run.client.stored(Reminder)[-1].text.startswith("<reminder>\nThe user went back to this point")
        assert "still contain later changes: a.txt." in run.client.stored(Reminder)[-1].text
        assert len(run.client.stored(Started)) == 1


async def test_keep_option_and_a_turn_without_changes_do_not_ask(tmp_path: Path) -> None:
    async with working(tmp_path, writes(a_txt="is"), (Say(text=["ok"]),)) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("chat"))
        await run.session.prompt(text("/undo"))
        await run.session.prompt(text("/undo keep"))
        assert run.client.questions == []
        assert (tmp_path / "a.txt").read_text() == "is"
        assert "still contain later changes: a.txt." in run.client.stored(Reminder)[-1].text


async def test_file_changed_by_someone_else_is_not_restored_but_the_rest_are(tmp_path: Path) -> None:
    async with working(tmp_path, writes(a_txt="is", b_txt="new", c_txt="c", d_txt="d")) as run:
        await run.session.prompt(text("go"))
        (tmp_path / "a.txt").write_text("mine")
        (tmp_path / "c.txt").unlink()
        (tmp_path / "d.txt").unlink()
        (tmp_path / "d.txt").mkdir()
        await run.session.prompt(text("/undo"))
        assert (tmp_path / "a.txt").read_text() == "mine"
        assert not (tmp_path / "b.txt").exists()
        (result,) = restore_results(run)
        assert result.splitlines() == [
            "Deleted: b.txt.",
            "Not restored: a.txt was changed by someone else since.",
            "Not restored: d.txt cannot be read (it is now a directory).",
        ]
        assert "still contain later changes: a.txt, d.txt." in run.client.stored(Reminder)[-1].text
        (remark,) = run.client.stored(Remark)  # a client shows the diff in the place of the result's text
        assert remark.text.splitlines() == result.splitlines()[1:]


async def test_file_changed_while_the_user_is_asked_is_not_restored(tmp_path: Path) -> None:
    class Busy(NoteTaker):
        async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
            (tmp_path / "a.txt").write_text("meanwhile")
            return await super().ask(question)

    async with working(tmp_path, writes(a_txt="is", b_txt="new"), client=Busy()) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/undo"))
        assert (tmp_path / "a.txt").read_text() == "meanwhile"
        assert not (tmp_path / "b.txt").exists()
        result = run.client.stored(ToolResult)[-1]
        assert result.text == "Deleted: b.txt.\nNot restored: a.txt was changed by someone else just now."
        assert [Path(diff.path).name for diff in result.announcement.diffs] == ["b.txt"]
        assert run.client.stored(Remark)[-1].text == "Not restored: a.txt was changed by someone else just now."
        assert "still contain later changes: a.txt." in run.client.stored(Reminder)[-1].text


async def test_file_changed_by_someone_else_between_two_edits_is_not_restored(tmp_path: Path) -> None:
    look = Say(calls=(call("read_file", path="a.txt"),))
    async with working(tmp_path, writes(a_txt="1"), (look, *writes(a_txt="3"))) as run:
        await run.session.prompt(text("go"))
        (tmp_path / "a.txt").write_text("2, by hand")
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/rewind 1 files"))
        assert (tmp_path / "a.txt").read_text() == "3"
        (remark,) = run.client.stored(Remark)
        assert remark.text == "Not restored: a.txt was changed by someone else between two edits."


async def test_file_that_became_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("is")
    async with working(tmp_path, writes(a_txt="is")) as run:
        await run.session.prompt(text("go"))
        (tmp_path / "a.txt").unlink()
        (tmp_path / "a.txt").symlink_to(tmp_path / "other.txt")
        await run.session.prompt(text("/undo files"))
        assert (tmp_path / "other.txt").read_text() == "is"
        assert run.client.stored(Remark)[0].text == "Not restored: a.txt is now a link to another file."


async def test_binary_content_and_file_mode_are_restored(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\x00")
    (tmp_path / "a.bin").chmod(0o750)
    async with working(tmp_path, writes(a_bin="text")) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/undo files"))
        assert (tmp_path / "a.bin").read_bytes() == b"\xff\x00"
        assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o750


async def test_retry_restores_files_before_it_sends_the_prompt_again(tmp_path: Path) -> None:
    async with working(tmp_path, writes(a_txt="first"), (Say(text=["second try"]),)) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/retry"))
        assert not (tmp_path / "a.txt").exists()
        assert (await run.kinds())[:5] == ["Command", "Started", "File", "ToolResult", "User"]


@pytest.mark.parametrize("ends", ["dismissed", "cancelled"])
async def test_cancelled_question_leaves_the_files_and_the_undo_as_they_are(tmp_path: Path, ends: str) -> None:
    async with working(tmp_path, writes(a_txt="is"), answers=("cancelled",)) as run:
        await run.session.prompt(text("go"))
        run.client.never_answers = ends == "cancelled"
        stops: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def undo() -> None:
                stops.append(await run.session.prompt(text("/undo")))

            tasks.start_soon(undo)
            await run.client.asked.wait()
            if ends == "cancelled":
                run.session.cancel()
        assert stops == ["cancelled"]
        assert (tmp_path / "a.txt").read_text() == "is"
        assert isinstance(run.client.events[-3 if ends == "cancelled" else -4], CallEnded)
        assert isinstance((await run.log())[0].body, Command)
        assert run.client.stored(TurnEnd)[-1].stop == "cancelled"
        run.client.never_answers = False
        await run.session.prompt(text("/redo"))
        assert (tmp_path / "a.txt").read_text() == "is"


async def test_each_restore_is_announced_under_its_own_call_id(tmp_path: Path) -> None:
    async with working(tmp_path, writes(a_txt="is")) as run:
        await run.session.prompt(text("go"))
        for command in ("/undo files", "/redo files", "/undo files"):
            await run.session.prompt(text(command))
        announced = [event.call.call_id for event in run.client.events if isinstance(event, CallAnnounced)]
        assert len(set(announced)) == len(announced) == 4
        assert len(run.client.stored(File)) == 4


@pytest.mark.parametrize("step", ["/undo", "/compact", "stay"])
async def test_a_file_is_not_replaced_whole_by_a_model_that_no_longer_sees_all_of_it(tmp_path: Path, step: str) -> None:
    (tmp_path / "a.txt").write_text(f"{'word ' * 60}\n" * 100)
    read = (Say(calls=(call("read_file", "r1", path="a.txt"),)), Say(text=["read"]))
    summaries = (Say(text=["## Goal\nRead a.txt."]),) if step == "/compact" else ()
    write = (Say(calls=(call("write_file", "w1", path="a.txt", content="new\n"),)), Say(text=["done"]))
    async with working(tmp_path, read, summaries, write) as run:
        await run.session.prompt(text("read"))
        if step != "stay":
            await run.session.prompt(text(step))
        await run.session.prompt(text("write"))
        wrote = next(result for result in run.client.stored(ToolResult) if result.name == "write_file")
    assert wrote.is_error == (step != "stay"), wrote.text
    assert ("which you have not read or no longer see" in wrote.text) == (step != "stay")


async def test_a_result_that_was_shortened_for_the_model_does_not_count_as_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number:>40}\n" for number in range(1, 1001)))
    read = Say(calls=(call("read_file", "r1", path="a.txt"),))
    pieces = tuple(Say(calls=(call("read_file", f"p{at}", path="a.txt", line=at, limit=100),)) for at in (1, 101))
    write = Say(calls=(call("write_file", "w1", path="a.txt", content="new\n"),))
    info = ModelInfo(name="scripted", endpoint="test scripted", context_window=20_000)
    model = ScriptedModel(read, *pieces, write, Say(text=["done"]), info=info)
    async with opened(tmp_path, model, mode="auto", open_tools=open_toolbox) as run:
        await run.session.prompt(text("go"))
        whole, *_, wrote = run.client.stored(ToolResult)
    assert whole.cut is not None
    assert "no longer see, lines 201-1000; read these lines first" in wrote.text


async def test_a_file_that_a_compaction_shows_the_model_counts_as_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 100)
    read = Say(calls=(call("read_file", "r1", path="a.txt"),))
    long, summary = Say(text=["word " * 10_000]), Say(text=[SUMMARY])
    write = Say(calls=(call("write_file", "w1", path="a.txt", content="new\n"),))
    async with working(tmp_path, (read, long, long, summary, write, Say(text=["done"]))) as run:
        for words in ("read", "talk", "/compact", "write"):
            await run.session.prompt(text(words))
        (checkpoint,) = run.client.stored(Checkpoint)
        *_, wrote = run.client.stored(ToolResult)
    assert [file.path for file in checkpoint.files_shown] == [str(tmp_path / "a.txt")]
    assert wrote.text == "Replaced a.txt: 1 line, 4 bytes."

"""What changed since the model read it is not overwritten."""

from __future__ import annotations

from pathlib import Path

from tests.tools.conftest import OpenBox

CHANGED = "a.txt has changed since it was read; read it again first"


async def test_a_file_that_others_changed_is_read_again_before_it_is_written(open_box: OpenBox, root: Path):
    path = root / "a.txt"
    path.write_text("one\ntwo\n")
    async with open_box() as box:
        await box.run("read_file", path="a.txt")
        path.write_text("one\ntwo\nthree\n")
        edit = {"path": "a.txt", "old_text": "two", "new_text": "2"}
        assert (await box.offer("edit_file", **edit)).fault == f"edit_file: {CHANGED}"
        assert (await box.run("edit_file", **edit)).text == f"edit_file: {CHANGED}"
        assert (await box.offer("write_file", path="a.txt", content="x")).fault == f"write_file: {CHANGED}"
        assert (await box.run("write_file", path="a.txt", content="x")).text == f"write_file: {CHANGED}"
        assert path.read_text() == "one\ntwo\nthree\n"
        await box.run("read_file", path="a.txt")
        assert not (await box.run("edit_file", **edit)).is_error
        assert not (await box.run("edit_file", path="a.txt", old_text="three", new_text="3")).is_error  # its own change
        path.write_text("other\n")
        assert (await box.run("write_file", path="a.txt", content="x")).text == f"write_file: {CHANGED}"


async def test_a_file_that_was_never_read_is_edited_by_its_text_and_one_removed_is_written_anew(
    open_box: OpenBox, root: Path
):
    (root / "a.txt").write_text("one\n")
    async with open_box() as box:
        assert not (await box.run("edit_file", path="a.txt", old_text="one", new_text="1")).is_error
        (root / "a.txt").unlink()
        assert (await box.offer("write_file", path="a.txt", content="x")).fault is None
        assert not (await box.run("write_file", path="a.txt", content="x")).is_error

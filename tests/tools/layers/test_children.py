"""The layers of subagents: what they see, what is kept of them, and what happens to them."""

from __future__ import annotations

import os
import random
import stat
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from crow.domain.merge import merged_text
from crow.tools.disk import replace_file
from crow.tools.layers import Conflict, LayerBusy, Place, RootsChanged, apply
from crow.tools.layers.children import children, keeping, open_child, remove_child, surplus
from crow.tools.layers.merge import merge, prepare_merge
from crow.tools.layers.place import discard
from crow.tools.layers.view import View
from tests.support.amounts import some
from tests.tools.conftest import nest
from tests.tools.layers.interleave import check_interleaving
from tests.tools.layers.trees import as_nobody, in_layer, killed_after

TASK = "task-1"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "data")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "d").mkdir(parents=True)
    (root / "a").write_text("".join(f"line {number}\n" for number in range(9)))
    (root / "d" / "b").write_text("b\n")
    return root


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(24), 3))
def test_nothing_is_overwritten_silently_in_any_order_and_after_any_kill(seed: int, tmp_path: Path) -> None:
    check_interleaving(tmp_path, random.Random(seed), steps=20)


def edited(place: Place, root: Path, name: str, content: bytes | None) -> None:
    """Change a file in the layer with crow's own view."""
    child = open_child(place, TASK, [root])
    child.note_before(root / name)
    view = View(child.layer)
    if content is None:
        view.remove(root / name)
    else:
        replace_file(view.prepare_write(root / name)[0], content)
    child.close()


def test_both_sides_of_a_text_are_merged_and_the_rest_is_named(place: Place, root: Path) -> None:
    edited(place, root, "a", (root / "a").read_bytes().replace(b"line 1\n", b"child\n"))
    edited(place, root, "d/b", b"child\n")
    (root / "a").write_text((root / "a").read_text().replace("line 7\n", "session\n"))
    (root / "d" / "b").write_text("session\n")
    child = open_child(place, TASK, [root])
    made = merge(child)
    assert made.conflicts == (str(root / "d" / "b"),)
    assert made.merged == (str(root / "a"),)
    change_set = prepare_merge(place, child, made, {})
    with keeping(child, change_set.id, [str(root / "a")]):
        apply(change_set)
    assert (root / "a").read_text().splitlines()[1::6] == ["child", "session"]
    assert (root / "d" / "b").read_text() == "session\n"
    assert merge(child).conflicts == (str(root / "d" / "b"),)
    assert View(child.layer).located(root / "d" / "b").read_bytes() == b"child\n"
    child.close()


def test_a_file_that_both_sides_removed_is_forgotten_in_a_directory_that_a_command_closed() -> None:
    def work(directory: Path) -> list[object]:
        root = directory / "tree"
        (root / "d" / "e").mkdir(parents=True)
        for name in ("d/b", "d/e/c"):
            (root / name).touch()
        child = open_child(Place(directory / "data"), TASK, [root])
        in_layer(child.layer, root, "rm d/b d/e/c; chmod 555 d/e d")
        (root / "d" / "b").unlink()
        child.note()
        (root / "d" / "e" / "c").unlink()
        (root / "d" / "e").rmdir()
        child.note()
        child.close()
        upper = child.layer.overlays[0].upper
        return [sorted(path.relative_to(upper).as_posix() for path in upper.rglob("*"))]

    assert as_nobody(work) == [["d", "d/e"]]


def test_many_new_files_beside_many_earlier_ones_are_noted_in_linear_time(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    upper, compared = child.layer.overlays[0].upper, 0

    def count(_frame: FrameType, event: str, function: Any) -> None:
        nonlocal compared
        compared += event == "c_call" and function.__name__ == "startswith"

    for step in range(2):
        for number in range(100):
            (upper / f"{step}-{number}").touch()
        sys.setprofile(count)
        child.note()
        sys.setprofile(None)
    child.close()
    assert len(child.bases) == 200
    assert compared < 5_000


def test_pipes_in_a_directory_that_a_command_closed_are_dropped() -> None:
    def work(directory: Path) -> list[object]:
        root = directory / "tree"
        (root / "d").mkdir(parents=True)
        child = open_child(Place(directory / "data"), TASK, [root])
        in_layer(child.layer, root, "mkfifo d/pipe; echo > d/file; chmod 555 d")
        made = merge(child)
        child.close()
        return [made.changes.problem, made.changes.dropped, [each.path for each in made.changes.listed]]

    problem, dropped, listed = as_nobody(work)
    assert (problem, [Path(path).name for path in dropped]) == ("", ["pipe"])
    assert [Path(path).name for path in listed] == ["file", "d"]


def test_a_file_that_the_workspace_changed_while_a_command_ran_is_in_conflict(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    child.begin()
    in_layer(child.layer, root, "echo child >> a")
    (root / "a").write_text("session\n")
    child.note()
    assert merge(child).conflicts == (str(root / "a"),)
    child.close()


def test_a_removed_directory_hides_what_is_made_there_later_and_is_then_in_conflict(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    child.begin()
    in_layer(child.layer, root, "rm -rf d; mkdir d; echo new > d/c")
    child.note()
    (root / "d" / "late").write_text("session\n")
    view = View(child.layer)
    assert (view.locate(root / "d" / "late"), view.locate(root / "d" / "b")) == (None, None)
    assert view.located(root / "d" / "c").read_text() == "new\n"
    assert merge(child).conflicts == (str(root / "d"),)
    child.close()


@pytest.mark.long
def test_a_write_into_a_removed_directory_brings_nothing_back_wherever_it_is_killed(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    view, removed = View(child.layer), child.layer.overlays[0].upper / "d"
    lines, was_killed = 0, True
    while was_killed:
        os.mknod(removed, stat.S_IFCHR, 0)  # how a layer notes that `d` was removed
        lines += 1
        was_killed = killed_after(lines, lambda: replace_file(view.prepare_write(root / "d/new")[0], b"new\n"))
        assert view.locate(root / "d/b") is None
        assert list(removed.parent.iterdir()) == [removed]
        discard(removed)
    assert lines > 20
    child.close()


def test_sockets_and_rights_are_never_kept(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    child.begin()
    in_layer(child.layer, root, "mkfifo pipe; mkdir new; mkfifo new/pipe; echo x > new/x; chmod 6755 new/x")
    child.note()
    made = merge(child)
    assert sorted(made.changes.dropped) == [str(root / "new" / "pipe"), str(root / "pipe")]
    apply(prepare_merge(place, child, made, {}))
    assert sorted(os.listdir(root)) == ["a", "d", "new"]
    assert os.listdir(root / "new") == ["x"]
    assert (root / "new" / "x").stat().st_mode & 0o7777 == 0o755
    child.close()


def test_a_links_target_is_looked_up_in_the_layer_and_never_written_through(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    child.begin()
    in_layer(child.layer, root, f"ln -s {root}/d abs; ln -s d rel; ln -s /etc out; ln -s loop loop; rm -r d; mkdir d")
    child.note()
    view = View(child.layer)
    assert view.resolve(root / "abs" / "x") == view.resolve(root / "rel" / "x") == root / "d" / "x"
    assert view.resolve(root / "out" / "passwd") == Path("/etc/passwd").resolve()
    with pytest.raises(OSError, match="symbolic links"):
        view.resolve(root / "loop")
    with pytest.raises(PermissionError):
        view.prepare_write(Path("/etc/passwd"))
    child.close()


def test_an_edit_of_a_file_that_was_changed_since_it_was_read_is_refused(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    view = View(child.layer)
    view.note_read(root / "a")
    view.note_read(root / "new")
    replace_file(root / "a", b"session\n")
    (root / "new").write_text("session\n")
    for name in ("a", "new"):
        with pytest.raises(OSError, match="somebody else has changed"):
            view.prepare_write(root / name)
    child.close()


def test_a_layer_belongs_to_one_process_and_to_the_same_directories(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    with pytest.raises(LayerBusy):
        open_child(place, TASK, [root])
    assert not remove_child(place, TASK)
    child.close()
    with pytest.raises(RootsChanged):
        open_child(place, TASK, [root / "d"])
    assert children(place) == (TASK,)
    assert (surplus(place), children(place, unused_s=3_600)) == ((), ())
    os.utime(place.children / TASK, (0, 0))
    assert surplus(place) == children(place, unused_s=3_600) == (TASK,)
    assert remove_child(place, TASK)
    assert children(place) == ()


@pytest.mark.parametrize(
    ("base", "theirs", "own", "merged"),
    [
        (b"1\n2\n3\n4\n", b"1\nx\n3\n4\n", b"1\n2\n3\ny\n", b"1\nx\n3\ny\n"),
        (b"1\n2\n3\n", b"1\nx\n3\n", b"1\nx\n3\n", b"1\nx\n3\n"),
        (b"1\n2\n3\n", b"1\nx\n3\n", b"1\ny\n3\n", None),
        (b"1\n2\n", b"1\nx\n2\n", b"1\ny\n2\n", None),
        (b"1\n2\n3\n", b"1\nx\n3\n", b"1\n2\ny\n", None),
        (b"1\n2\n3", b"0\n1\n2\n3", b"1\n2\n3\n4", b"0\n1\n2\n3\n4"),
        (b"\0", b"\0a", b"\0b", None),
        # a part of a character is no line end
        ("1, Å, 2\n".encode(), "9, Å, 2\n".encode(), "1, Å, 3\n".encode(), None),
    ],
)
def test_texts_are_merged_by_lines(base: bytes, theirs: bytes, own: bytes, merged: bytes | None) -> None:
    assert merged_text(base, theirs, own) == merged
    assert merged_text(base, own, theirs) == merged


def test_a_file_in_a_directory_that_is_not_in_the_layer_is_the_workspaces(place: Place, root: Path) -> None:
    layer = place.open([root])
    assert layer.locate(root / "d" / "b") == root / "d" / "b"
    assert layer.locate(root / "d" / "missing") is None
    assert layer.locate(root / "no" / "directory") is None
    layer.drop()


def test_a_command_sees_no_name_of_a_file_that_is_gone_on_both_sides(place: Place, root: Path) -> None:
    (root / "d" / "deep").mkdir()
    (root / "d" / "deep" / "c").write_text("c\n")
    edited(place, root, "d/deep/c", None)
    edited(place, root, "d/deep/new", b"new\n")
    (root / "d" / "deep" / "c").unlink()
    (root / "d" / "deep").rmdir()
    child = open_child(place, TASK, [root])
    assert in_layer(child.layer, root, ":", lambda: sorted(os.listdir(root / "d" / "deep"))) == ["new"]
    child.close()


def test_a_layer_that_was_removed_closes_no_file_of_others(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    child.remove()
    with open(os.dup2(os.open(os.devnull, os.O_RDONLY), child.layer.lock)) as other:
        child.close()
        assert os.fstat(other.fileno())
    assert children(place) == ()


def test_rights_that_the_session_gave_a_directory_are_no_change_of_the_subagent(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    child.begin()
    in_layer(child.layer, root, "echo new > d/new")
    child.note()
    root.chmod(0o750)
    (root / "d").chmod(0o700)
    made = merge(child)
    assert [each.path for each in made.changes.listed] == [str(root / "d" / "new")]
    apply(prepare_merge(place, child, made, {}))
    child.close()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (root, root / "d")] == [0o750, 0o700]


def test_changes_that_are_nested_too_deeply_cannot_be_kept(place: Place, root: Path) -> None:
    child = open_child(place, TASK, [root])
    nest(child.layer.overlays[0].upper)
    assert merge(child).changes.problem == "directories are nested more than 200 deep"
    child.close()
    with pytest.raises(OSError, match="nested more than 200 deep"):
        open_child(place, TASK, [root])
    assert remove_child(place, TASK)


def test_a_merge_that_cannot_be_prepared_leaves_nothing_in_a_workspace_on_another_file_system() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, tempfile.TemporaryDirectory(dir="/tmp") as other:
        root, place = Path(directory), Place(Path(other))
        child = open_child(place, TASK, [root])
        new = child.layer.overlays[0].upper / "new"
        new.write_text("new\n")
        made = merge(child)
        new.unlink()
        with pytest.raises(Conflict):
            prepare_merge(place, child, made, {})
        child.close()
        assert list(root.iterdir()) == []
        assert list(place.changes.iterdir()) == []

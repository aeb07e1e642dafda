"""What commands without a layer change is undone as far as it was copied before."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from crow.tools.layers import Place, apply, find_set, invert, recover
from crow.tools.layers import snapshots as module
from crow.tools.layers.snapshots import Snapshot, confirm
from crow.tools.layers.states import TooLargeError
from tests.tools.layers.trees import LINES, differences, git, killed_after, make_tree, newest, picture

LEFT_OUT = (".git/objects", ".git/hooks", "build", "node_modules")


def kept(root: Path) -> dict[str, list[str]]:
    """Return a picture of what a snapshot covers. The times of directories do not count."""
    found = {}
    for path, facts in picture(str(root)).items():
        is_ignored = path.endswith((".log", ".env")) or path.startswith(LEFT_OUT)
        if not is_ignored:
            found[path] = [facts[0], *facts[2:]] if facts[0].startswith("0o40") else facts
    return found


def run(root: Path, place: Place, line: str) -> Snapshot:
    """Run a line in a workspace without a layer, and store what it changed."""
    snapshot = Snapshot(place, [str(root)])
    subprocess.run(["sh", "-c", line], cwd=root, check=False, capture_output=True)
    made = snapshot.changes({})
    if made is not None:
        confirm(made)
    snapshot.remove()
    return snapshot


def undo(place: Place) -> tuple[tuple[str, str], ...]:
    done = find_set(place, newest(place))
    assert done is not None
    made = invert(place, done)
    apply(made)
    return made.skipped


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_destructive_line_is_undone_and_redone_as_far_as_it_was_copied(number: int, tmp_path: Path) -> None:
    root, place = tmp_path / "tree", Place(tmp_path / "data")
    make_tree(root, random.Random(number))
    before = kept(root)
    snapshot = run(root, place, LINES[number])
    after = kept(root)
    if before == after:
        return
    loses_git = ".git" in LINES[number].split("find")[0] and "rm -rf" in LINES[number]
    assert [os.path.relpath(path, root) for path in snapshot.lost if "/.git/" not in path] == []
    for then in (before, after, before):
        assert undo(place) == ()
        assert {path: each for path, each in differences(kept(root), then).items() if not loses_git} == {}
    assert sorted(os.listdir(place.snapshots)) == []
    assert recover(place) == ()


def test_what_is_too_large_to_copy_is_named_and_undone_no_further(tmp_path: Path) -> None:
    root, place = tmp_path / "tree", Place(tmp_path / "data")
    root.mkdir()
    (root / "large").write_bytes(b"0" * (module.FILE_BYTES + 1))
    (root / "small").write_text("1")
    snapshot = run(root, place, "echo 2 > large; echo 2 > small; echo 3 > new")
    assert snapshot.lost == [f"{root}/large"]
    assert undo(place) == ((f"{root}/large", "cannot be restored, because its old content was not kept"),)
    assert {path.name: path.read_text() for path in root.iterdir()} == {"large": "2\n", "small": "1"}


def test_a_removed_repository_is_named_as_lost(tmp_path: Path) -> None:
    root, place = tmp_path / "tree", Place(tmp_path / "data")
    make_tree(root, random.Random(1))
    snapshot = run(root, place, "rm -rf .git")
    assert f"{root}/.git/objects" in snapshot.lost


def test_too_many_files_are_no_reason_to_remember_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 3)
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(TooLargeError, match="more than 3 files"):
        Snapshot(Place(tmp_path.parent / "data"), [str(tmp_path)])


def test_no_link_is_followed_and_a_directory_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    root, place = tmp_path / "tree", Place(tmp_path / "data")
    (root / "d").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("0123-key")
    (root / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(root / "fifo")
    run(root, place, "rm link fifo; ln -s ../secret d/other; cat ../secret/key > /dev/null")
    undo(place)
    assert (root / "link").is_symlink()
    assert sorted(os.listdir(root)) == ["d", "link"]
    assert "0123-key" not in "".join(path.read_text() for path in place.directory.rglob("*") if path.is_file())


def test_what_a_killed_process_has_copied_is_removed(tmp_path: Path) -> None:
    root, place = tmp_path / "tree", Place(tmp_path / "data")
    root.mkdir()
    (root / "a").write_text("1")
    used = Snapshot(place, [str(root)])

    def die() -> None:
        Snapshot(place, [str(root)])
        os.kill(os.getpid(), signal.SIGKILL)

    assert killed_after(1_000_000, die)
    assert len(os.listdir(place.snapshots)) == 2
    recover(place)
    assert len(os.listdir(place.snapshots)) == 1
    used.remove()
    assert os.listdir(place.snapshots) == []


def test_a_commit_is_undone(tmp_path: Path) -> None:
    root, place = tmp_path / "tree", Place(tmp_path / "data")
    root.mkdir()
    git(root, "init", "-q")
    (root / "a").write_text("1")
    run(root, place, "git add a; git -c user.email=a@b -c user.name=a commit -qm first")
    assert (root / ".git" / "logs" / "HEAD").exists()
    undo(place)
    status = subprocess.run(["git", "status", "--short"], cwd=root, check=True, capture_output=True, text=True)
    assert status.stdout == "?? a\n"

"""What is kept of a layer when processes are killed, disks are full or others change the workspace."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from crow.domain.protected_names import ProtectedNames
from crow.tools.layers import Changes, Layer, LookRules, Place, apply, invert, keep, look, prepare, recover
from crow.tools.layers.comparison import is_untouched
from crow.tools.layers.place import discard
from crow.tools.layers.rules import rules_for
from crow.tools.layers.session import Layers
from crow.tools.layers.sets import write_state
from crow.tools.protection import ProtectedPaths
from tests.support import fork_server
from tests.tools.layers.trees import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    World,
    as_nobody,
    changes_of,
    differences,
    in_child,
    in_layer,
    picture,
    run_line,
)


def test_a_kill_while_a_large_before_image_is_removed_takes_nothing_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.layers.sets.IMAGE_BYTES", 10_000)
    (world.root / "build" / "big").write_bytes(b"x" * 100_000)
    world.reopen()
    rules = LookRules(is_ignored=lambda path, _is_directory: "/build" in path)
    done = prepare(world.place, world.layer, changes_of(world.layer, world.root, "rm -r build; echo new > a", rules))

    def die_after_discard(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_name == "discard":
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        sys.setprofile(die_after_discard)
        apply(done)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(done.lock)
    recover(world.place)

    assert sorted(world.picture()) == [".", "a", "src", "src/b"]
    assert (world.root / "a").read_text() == "new\n"
    assert sorted(path.name for path in done.directory.iterdir()) == ["before", "kept", "lock", "manifest"]


def test_changes_whose_old_files_cannot_be_stored_are_not_kept() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory() as other:
        root, place = Path(one, "tree"), Place(Path(other))
        root.mkdir()
        (root / "a").write_bytes(b"x" * 100_000)
        before = picture(str(root))
        layer = place.open([root])
        done = prepare(place, layer, changes_of(layer, root, "echo new > a; echo > b"))

        def fails() -> str:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            with pytest.raises(OSError, match="File too large"):
                apply(done)
            return ""

        in_child(fails)
        assert differences(picture(str(root)), before) == {}
        layer.drop()


def test_a_start_leaves_a_layer_alone_that_another_process_is_making(world: World) -> None:
    unfinished = [folder / "new-1" for folder in (world.place.layers, world.place.changes, world.place.snapshots)]
    for path in unfinished:
        path.mkdir(parents=True)
    recover(world.place)
    assert [path.exists() for path in unfinished] == [True] * 3

    for path in unfinished:
        os.utime(path, (0, 0))
    recover(world.place)
    assert [path.exists() for path in unfinished] == [False] * 3


def test_a_change_set_that_cannot_be_completed_keeps_the_layer_with_its_new_files(tmp_path: Path) -> None:
    world = World(tmp_path)
    place = Place(world.place.directory, tmp_path / "a" / "deeper" / "scratch")
    layer = place.open([world.root])
    done = prepare(place, layer, changes_of(layer, world.root, "echo new > src/b"))
    write_state(done.directory, "applying")
    os.close(done.lock)
    os.close(layer.lock)
    discard(world.root / "src")

    assert recover(place)[0].problem
    assert (layer.overlays[0].upper / "src" / "b").read_text() == "new\n"
    world.layer.drop()


def test_a_damaged_change_set_is_named_and_the_others_are_completed(world: World) -> None:
    def begin(line: str) -> Path:
        world.reopen()
        made = prepare(world.place, world.layer, changes_of(world.layer, world.root, line))
        write_state(made.directory, "applying")
        os.close(made.lock)
        return made.directory

    damaged = begin("echo > one")
    begin("echo > two")
    (damaged / "manifest").write_text("{")

    found = recover(world.place)
    assert [(each.is_kept, bool(each.problem)) for each in found] == [(False, True), (True, False)]
    assert found[0].paths == (str(damaged),)
    assert (world.root / "two").exists()


def keep_and_undo_on_another_mount(directory: Path) -> None:
    """Run in a process of its own: it gets a user namespace, which no process with threads can have, and libraries
    start threads in forked ones."""
    world = World(directory)
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    (world.root / "one").write_text("one\n")
    os.link(world.root / "one", world.root / "other")
    assert libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    source = os.fsencode(world.root)
    assert libc.mount(source, source, None, 4096, None) == 0  # MS_BIND
    world.reopen()
    done = world.keep("echo new > a; rm one; rm -r src; mkdir n; echo > n/1")
    names = sorted(os.listdir(world.root))
    apply(invert(world.place, done))
    sys.stdout.write(json.dumps([str(world.root), *names, "|", *sorted(os.listdir(world.root))]))


def test_a_workspace_on_another_mount_of_the_same_file_system_is_kept_and_undone(tmp_path: Path) -> None:
    name = "keep_and_undo_on_another_mount"
    code = f"import sys, pathlib\nfrom {__name__} import {name}\n{name}(pathlib.Path(sys.argv[1]))"
    made = subprocess.run([*fork_server.command(code), str(tmp_path)], stdout=subprocess.PIPE, check=True, timeout=60)
    root, *names = json.loads(made.stdout)
    assert names == ["a", "build", "n", "other", "|", "a", "build", "one", "other", "src"]
    assert Path(root, "a").read_text() == "a\n"


async def test_a_workspace_that_was_removed_is_named_as_the_reason_why_nothing_is_kept(world: World) -> None:
    async def open_layer() -> Layer | None:
        return world.layer

    layers = Layers(world.place, open_layer, lambda _: LookRules())
    in_layer(world.layer, world.root, "echo > new")
    discard(world.root)
    found = await layers.look(world.layer)
    assert (found.problem, found.operations) == (f"{world.root}: No such file or directory", [])


def test_changes_of_git_in_one_repository_are_no_conflict_in_another(tmp_path: Path) -> None:
    """Git writes times into its index when it only looks at files."""
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        (root / ".git").mkdir(parents=True)
        (root / ".git" / "index").write_text("old")
    layer = Place(tmp_path / "data").open(roots)
    in_layer(layer, roots[0], f"echo > .git/HEAD; echo theirs > {roots[1]}/.git/index")
    (roots[1] / ".git" / "index").write_text("mine")
    assert look(layer).conflicts == []
    in_layer(layer, roots[0], f"echo > {roots[1]}/.git/HEAD")
    assert look(layer).conflicts == [f"{roots[1]}/.git/index"]
    layer.drop()


def test_a_directory_that_its_owner_may_not_read_is_kept_and_undone() -> None:
    def work(directory: Path) -> list[object]:
        world = World(directory)
        done = world.keep("mkdir d e; echo > d/f; chmod 0 d e src")
        modes = [stat.S_IMODE((world.root / name).stat().st_mode) for name in ("d", "e", "src")]
        made = invert(world.place, done)
        apply(made)
        return [modes, made.skipped, sorted(world.picture())]

    assert as_nobody(work) == [[0, 0, 0], [], [".", "a", "build", "src", "src/b"]]


def test_files_in_very_deep_folders_are_looked_at(world: World) -> None:
    for top, count in ((world.root, 190), (world.layer.overlays[0].upper, 380)):
        folder = os.open(top, os.O_RDONLY)
        for number in range(count):
            with suppress(FileExistsError):
                os.mkdir("b", dir_fd=folder)
            if number > 190:
                os.close(os.open("z", os.O_CREAT, dir_fd=folder))
            below = os.open("b", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = below
        os.close(folder)
    found = look(world.layer, rules_for(world.layer, ProtectedPaths(), ProtectedNames(), (), ()))
    assert (found.problem, len(found.listed)) == ("", 189)
    discard(world.root / "b")


def test_a_commit_in_a_submodule_or_a_linked_worktree_is_not_protected(tmp_path: Path) -> None:
    git = "git -c user.name=a -c user.email=a@example.org -c protocol.file.allow=always"
    for folder in ("source", "main"):
        (tmp_path / folder).mkdir()
    line = f"{git} init -q && {git} commit -qm 1 --allow-empty"
    for folder, more in (("source", ""), ("main", f" && {git} submodule -q add ../source inner")):
        subprocess.run(["sh", "-c", line + more], cwd=tmp_path / folder, check=True)
    subprocess.run(["sh", "-c", f"{git} worktree add -q ../tree"], cwd=tmp_path / "main", check=True)
    for root, others, folder in (("main", [], "inner"), ("tree", ["main/.git"], ".")):
        roots = [tmp_path / each for each in (root, *others)]
        layer = Place(tmp_path / "data").open(roots)
        in_layer(layer, roots[0] / folder, f"{git} commit -qm 2 --allow-empty")
        protected = ProtectedPaths(roots=tuple(map(str, roots)))
        changes = look(layer, rules_for(layer, protected, ProtectedNames(), (), ()))
        assert any("/refs/heads/" in each.path for each in changes.listed)
        assert changes.protected == []
        layer.drop()


def test_the_names_of_submodules_and_worktrees_hide_nothing_that_git_would_run(world: World) -> None:
    git = world.root / ".git"
    for folder in ("modules/Plain", "modules/objects", "modules/group/refs", "modules/outer/modules/logs"):
        (git / folder).mkdir(parents=True)
        (git / folder / "HEAD").touch()
    (git / "modules" / "outer" / "HEAD").touch()
    (git / "worktrees" / "objects").mkdir(parents=True)
    (git / "worktrees" / "objects" / "HEAD").touch()
    (world.layer.overlays[0].upper / ".git" / "modules" / "group").mkdir(parents=True)
    (world.layer.overlays[0].upper / ".git" / "modules" / "group" / "HEAD").touch()  # a command's own
    protected = ProtectedPaths(roots=(str(world.root),))
    is_protected = rules_for(world.layer, protected, ProtectedNames(), (), ()).is_protected
    hooks = [
        *("hooks/post-checkout", "modules/Plain/hooks/a", "modules/objects/hooks/a", "modules/group/refs/hooks/a"),
        *("modules/outer/modules/logs/config", "worktrees/objects/commondir", "modules/new/objects/hooks/a"),
    ]
    data = [
        *("refs/heads/hooks", "modules/Plain/refs/heads/hooks", "modules/Plain/logs/refs/remotes/origin/a"),
        *("modules/objects/objects/ab/cd", "modules/Plain/HEAD", "modules/outer/modules/logs/refs/heads/config"),
        *("worktrees/objects/logs/HEAD", "worktrees/objects/index"),
    ]
    assert [name for name in (*hooks, *data) if is_protected(str(git / name))] == hooks


def test_a_left_over_that_cannot_be_removed_does_not_stop_the_recovery() -> None:
    def work(directory: Path) -> list[object]:
        world = World(directory)
        changes = changes_of(world.layer, world.root, "echo new > a")
        for state in ("taken back", "applying"):
            made = prepare(world.place, world.layer, changes)
            write_state(made.directory, state)
            os.close(made.lock)
        world.place.changes.chmod(0o555)
        found = recover(world.place)
        world.place.changes.chmod(0o755)
        return [[each.is_kept for each in found], (world.root / "a").read_text()]

    assert as_nobody(work) == [[True], "new\n"]


def test_many_new_files_beside_many_kept_ones_are_found_in_linear_time(world: World) -> None:
    upper, calls = world.layer.overlays[0].upper, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name == "dirname"

    for step in range(2):
        for number in range(100):
            (upper / f"{step}-{number}").touch()
        sys.setprofile(count)
        changes = look(world.layer, is_live=True)
        sys.setprofile(None)
        apply(prepare(world.place, world.layer, changes), world.layer)
    assert len(world.layer.kept) == 200
    assert calls < 5_000


def test_what_somebody_else_removed_since_it_was_kept_stays_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep, "_CLOCK_NS", 0)

    def keep_live(line: str) -> list[str]:
        changes = changes_of_live(line)
        apply(prepare(world.place, world.layer, changes), world.layer)
        return [each.path for each in changes.operations if not each.is_meta]

    def changes_of_live(line: str) -> Changes:
        in_layer(world.layer, world.root, line)
        return look(world.layer, is_live=True)

    assert keep_live("echo 1 > x; mkdir d n; echo 1 > d/y; echo 1 > d/z; echo 1 > n/1") == ["d", "n", "x"]
    for name in ("x", "d/y", "n/1"):
        (world.root / name).unlink()
    (world.root / "n").rmdir()

    assert changes_of_live("true").operations == []
    assert keep_live("echo 2 > later; echo 2 > d/y; echo 2 > n/2") == ["d/y", "later", "n"]
    assert sorted(world.picture()) == [".", "a", "build", "d", "d/y", "d/z", "later", "n", "n/1", "n/2", "src", "src/b"]


def test_a_named_pipe_in_a_new_directory_keeps_nothing_else_from_being_kept_while_a_command_runs(world: World) -> None:
    in_layer(world.layer, world.root, "mkdir d; mkfifo d/pipe; echo 1 > d/a")
    changes = look(world.layer, is_live=True)
    apply(prepare(world.place, world.layer, changes), world.layer)
    assert changes.dropped == [f"{world.root}/d/pipe"]
    assert [path.name for path in (world.root / "d").iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["user.note", "security.selinux"])
def test_attributes_of_the_workspaces_root_are_no_change_and_stay(name: str, world: World) -> None:
    try:
        os.setxattr(world.root, name, b"value")
    except OSError:
        pytest.skip("this user may not set such an attribute")
    world.reopen()
    assert is_untouched(world.layer)
    assert changes_of(world.layer, world.root, "cat a").listed == []

    changes = changes_of(world.layer, world.root, "echo > new")
    assert [each.path for each in changes.listed] == [f"{world.root}/new"]
    apply(prepare(world.place, world.layer, changes))
    assert os.getxattr(world.root, name) == b"value"


def test_a_program_that_is_kept_has_the_capabilities_that_it_was_given(world: World) -> None:
    capability, value = "security.capability", bytes.fromhex("0100000200040000000000000000000000000000")  # net_bind
    try:
        os.setxattr(world.root / "a", capability, value)
    except OSError:
        pytest.skip("this user may not set capabilities")
    world.reopen()
    in_layer(world.layer, world.root, "mv a b")
    apply(prepare(world.place, world.layer, look(world.layer)))
    assert os.getxattr(world.root / "b", capability) == value


def test_rights_that_somebody_else_gave_a_directory_meanwhile_are_not_taken_back(world: World) -> None:
    in_layer(world.layer, world.root, "echo > new; echo > src/new")
    world.root.chmod(0o750)
    apply(prepare(world.place, world.layer, look(world.layer)))
    assert stat.S_IMODE(world.root.stat().st_mode) == 0o750

    world.reopen()
    in_layer(world.layer, world.root, "echo > src/other")
    (world.root / "src").chmod(0o700)
    assert look(world.layer).conflicts == [f"{world.root}/src"]


def test_what_a_running_command_removes_after_it_was_kept_is_removed(world: World) -> None:
    (begun, begin), (told, tell) = os.pipe(), os.pipe()

    def work() -> None:
        os.write(begin, b"1")
        os.read(told, 1)
        subprocess.run(["sh", "-c", "rm a x d/y; echo 2 > later"], check=True)

    pid = os.fork()
    if pid == 0:
        in_layer(world.layer, world.root, "echo 1 > a; echo 1 > x; mkdir d; echo 1 > d/y; echo 1 > d/z", work)
        os._exit(0)
    os.read(begun, 1)
    apply(prepare(world.place, world.layer, look(world.layer, is_live=True)), world.layer)
    assert (world.root / "a").read_text() == "1\n"
    (world.root / "d" / "mine").write_text("somebody else's\n")
    os.write(tell, b"1")
    assert os.waitpid(pid, 0)[1] == 0

    assert not is_untouched(world.layer)
    changes = look(world.layer)
    assert sorted((each.action, each.path) for each in changes.listed) == [
        ("created", f"{world.root}/later"),
        *(("deleted", f"{world.root}/{name}") for name in ("a", "d/y", "x")),
    ]
    apply(prepare(world.place, world.layer, changes))
    assert sorted(world.picture()) == [".", "build", "d", "d/mine", "d/z", "later", "src", "src/b"]


@pytest.mark.parametrize("line", ["rm -r src", "mv src moved", "mv a b", "rm -r src; mkdir src; echo 2 > src/new"])
def test_a_running_command_is_in_no_conflict_with_what_was_kept_of_it(line: str, world: World) -> None:
    in_layer(world.layer, world.root, "echo 1 > src/new; echo 1 > other; echo >> a; chmod 600 src/b")
    apply(prepare(world.place, world.layer, look(world.layer, is_live=True)), world.layer)
    seen = run_line(world.layer, world.root, line)
    changes = look(world.layer, is_live=True)
    assert changes.conflicts == []
    apply(prepare(world.place, world.layer, changes), world.layer)
    assert sorted(world.picture()) == sorted(seen)

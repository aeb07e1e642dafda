"""What hostile commands, other programs and accidents do to layers."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from crow.tools.layers import (
    Change,
    Conflict,
    Layer,
    LookRules,
    Place,
    apply,
    find_set,
    invert,
    look,
    moves,
    prepare,
    recover,
    states,
)
from crow.tools.layers.describe import named, summary_of
from tests.tools.conftest import nest
from tests.tools.layers.trees import (
    LINES,
    World,
    as_nobody,
    changes_of,
    check_round,
    differences,
    in_child,
    in_layer,
    killed_after,
    picture,
)


def actions(listed: list[Change], root: Path) -> list[tuple[str, str]]:
    return [(each.action, os.path.relpath(each.path, root)) for each in listed]


def test_a_look_names_what_was_created_changed_and_deleted(world: World) -> None:
    changes = changes_of(
        world.layer, world.root, "echo more >> a; rm src/b; mkdir n; echo 1 > n/1; ln -s a l; : > /dev/null"
    )

    assert actions(changes.listed, world.root) == [
        ("changed", "a"),
        ("created", "l"),
        ("created", "n/1"),
        ("deleted", "src/b"),
    ]


@pytest.mark.parametrize("line", ["cat a src/b", "touch x; rm x", "sh -c 'exec 3<>a'", "mkdir d; rmdir d"])
def test_a_command_that_leaves_everything_as_it_was_has_no_changes(line: str, world: World) -> None:
    changes = changes_of(world.layer, world.root, line)

    assert (changes.operations, changes.shown, changes.dropped) == ([], [], [])


def test_a_rewritten_file_with_the_same_content_is_no_reason_to_ask(world: World) -> None:
    changes = changes_of(world.layer, world.root, "cp a t; cat t > a; rm t")

    assert [each.is_same for each in changes.listed] == [True]
    assert (changes.shown, changes.dropped) == ([], [])


def test_set_uid_bits_are_never_kept_and_an_undo_still_knows_the_files(world: World) -> None:
    before = world.picture()
    line = "cp /bin/true t; mkdir -p n/m; cp t n/m/u; cp t n/g; mkfifo n/m/f; chmod 6755 t n/m/u n/g; chmod 1777 n/m"
    made = world.keep(line)

    modes = {name: stat.S_IMODE((world.root / name).stat().st_mode) for name in ("t", "n/m/u", "n/g", "n/m")}
    assert modes == {"t": 0o755, "n/m/u": 0o755, "n/g": 0o755, "n/m": 0o1777}
    assert os.listdir(world.root / "n" / "m") == ["u"]
    undone = invert(world.place, made)
    assert undone.skipped == ()
    apply(undone)
    assert world.picture() == before


def test_a_dropped_layer_leaves_nothing(world: World) -> None:
    before = world.picture()
    in_layer(world.layer, world.root, "rm -rf src; mkdir -p $(seq -s / 60); chmod 000 1; echo > x")
    world.layer.drop()

    assert world.picture() == before
    assert list(world.place.layers.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "meanwhile", "named"),
    [
        ("echo theirs >> a", "echo mine >> {root}/a", "a"),
        ("echo theirs > new", "echo mine > {root}/new", "new"),
        ("echo theirs >> a", "rm {root}/a", "a"),
        ("rm -r src", "echo mine > {root}/src/new", "src"),
        ("rm -r src", "echo mine >> {root}/src/b", "src/b"),
        ("rm -r src; mkdir src; echo > src/c", "echo mine >> {root}/src/b", "src/b"),
        ("echo >> src/b", "rm -r {root}/src", "src"),
        ("rm a", "echo mine > {root}/t; mv {root}/t {root}/a", "a"),
        ("mkdir new", "ln -s /etc {root}/new", "new"),
    ],
)
def test_a_file_that_somebody_else_changed_meanwhile_is_never_overwritten(
    line: str, meanwhile: str, named: str, world: World
) -> None:
    in_layer(world.layer, world.root, line)
    os.system(meanwhile.format(root=world.root))
    before = world.picture()

    with pytest.raises(Conflict) as raised:
        prepare(world.place, world.layer, look(world.layer))

    assert raised.value.paths[0].startswith(str(world.root / named))
    assert world.picture() == before
    assert not world.place.changes.exists() or list(world.place.changes.iterdir()) == []


def test_a_moved_file_is_no_conflict(world: World) -> None:
    world.keep("mv a c; mv src/b src/d; mv c src/e")

    assert sorted(world.picture()) == [".", "build", "src", "src/d", "src/e"]


@pytest.mark.parametrize(
    ("line", "meanwhile"),
    [
        ("echo theirs >> a", "echo mine >> {root}/a"),
        ("echo theirs > new; echo >> a", "echo mine > {root}/new"),
        ("echo 1 > 1; rm -r src", "echo mine > {root}/src/new"),
        ("echo 1 > 1; echo theirs > src/new", "mv {root}/src {root}/old; ln -s {root}/../outside {root}/src"),
        ("echo 1 > 1; echo theirs >> src/b", "rm -r {root}/src"),
        ("echo 1 > 1; echo theirs > zz", "mkdir {root}/zz"),
    ],
)
def test_a_change_between_the_look_and_the_move_keeps_nothing(line: str, meanwhile: str, world: World) -> None:
    made = prepare(world.place, world.layer, changes_of(world.layer, world.root, line))
    os.system(meanwhile.format(root=world.root))
    before = world.picture()

    with pytest.raises((Conflict, OSError)):
        apply(made)

    assert world.picture() == before
    assert os.listdir(world.outside) == ["secret"]
    assert [path.name for path in world.place.changes.glob("*/*")] == ["taken back"]
    recover(world.place)
    known = find_set(world.place, made.id)
    assert known is not None
    assert known.operations == ()


@pytest.mark.parametrize("number", range(4))
def test_a_change_in_the_middle_of_the_move_takes_everything_back(number: int, world: World) -> None:
    line = "echo 1 > 1; echo theirs >> a; mkdir d; echo > d/e; rm -r src"
    made = prepare(world.place, world.layer, changes_of(world.layer, world.root, line))
    before = picture(str(world.root))
    calls = 0

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code is moves.move.__code__:
            calls += 1
            if calls > number:
                raise Conflict(["x"])

    sys.setprofile(interrupt)
    try:
        with pytest.raises(Conflict):
            apply(made)
    finally:
        sys.setprofile(None)

    assert calls == number + 1
    assert differences(world.picture(), before) == {}


def test_special_files_are_dropped_and_named(world: World) -> None:
    line = (
        "mkfifo pipe; mkdir d; mkfifo d/pipe; rm a; mkfifo a; mknod dev c 1 3; mknod white c 0 0; echo > d/file;"
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\""
    )
    changes = changes_of(world.layer, world.root, line)
    apply(prepare(world.place, world.layer, changes))

    assert sorted(os.path.relpath(path, world.root) for path in changes.dropped) == ["a", "d/pipe", "pipe", "sock"]
    assert sorted(world.picture()) == [".", "build", "d", "d/file", "src", "src/b"]


def test_nothing_that_runs_as_its_owner_is_kept(world: World) -> None:
    world.keep("cp /bin/true run; chmod 6755 run; mkdir d; cp run d/; chmod 4711 d/run")

    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in (world.root / "run", world.root / "d" / "run")} == {
        "0o755",
        "0o711",
    }


def test_a_link_that_leads_out_stays_a_link(world: World) -> None:
    changes = changes_of(world.layer, world.root, f"ln -s {world.outside} out; ln -s ../outside/secret s")
    apply(prepare(world.place, world.layer, changes))

    assert [each.target for each in changes.listed] == [str(world.outside), "../outside/secret"]
    assert (world.root / "s").is_symlink()
    assert (world.outside / "secret").read_text() == "secret\n"


def test_a_before_image_does_not_change_with_the_other_name_of_its_file(world: World) -> None:
    os.link(world.root / "a", world.root / "other")
    world.reopen()
    done = world.keep("echo theirs > t; mv t a")
    with (world.root / "other").open("a") as file:  # the same file as the before-image
        file.write("mine\n")

    apply(invert(world.place, done))

    assert (world.root / "a").read_text() == "a\n"
    assert (world.root / "other").read_text() == "a\nmine\n"


def test_an_undo_leaves_what_somebody_else_changed_and_says_so(world: World) -> None:
    done = world.keep("echo theirs >> a; rm src/b; echo > new")
    (world.root / "new").write_text("mine\n")

    made = invert(world.place, done)
    apply(made)

    assert made.skipped == ((f"{world.root}/new", "was changed by someone else since"),)
    assert (world.root / "a").read_text() == "a\n"
    assert (world.root / "src" / "b").read_text() == "b\n"
    assert (world.root / "new").read_text() == "mine\n"


def test_no_name_of_a_file_forges_or_hides_what_the_user_reads(world: World) -> None:
    names = ["x\nchanged README", "\x1b[2J", "\u202egpj.exe", "a\rb", "(protected)", "\udcff"]
    for number in range(len(names)):
        folder = world.root / f"d{number}"
        folder.mkdir()
        (folder / "z").touch()
    line = "; ".join(f"touch d{number}/{shlex.quote(name)}" for number, name in enumerate(names))
    world.reopen()
    changes = changes_of(world.layer, world.root, line)
    lines = summary_of(changes).splitlines()
    assert len(lines) == len(names)
    assert all(text.startswith(f"created {world.root}/d") for text in lines)
    text = "".join(lines) + named(changes)
    assert not [char for char in "\x1b\u202e\r\udcff" if char in text]


def test_a_large_ignored_directory_is_kept_without_a_before_image(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.layers.sets.IMAGE_BYTES", 10_000)
    (world.root / "build" / "big").write_bytes(b"x" * 100_000)
    world.reopen()
    rules = LookRules(is_ignored=lambda path, _is_directory: "/build" in path)
    done = prepare(world.place, world.layer, changes_of(world.layer, world.root, "rm -r build; rm a", rules))
    apply(done)
    made = invert(world.place, done)
    apply(made)

    assert [each.path for each in done.without_image] == ["build"]
    assert made.skipped == ((f"{world.root}/build", "was too large to keep (0 MB)"),)
    assert sorted(world.picture()) == [".", "a", "src", "src/b"]
    assert sum(path.stat().st_size for path in world.place.changes.rglob("big")) == 0


def test_a_sparse_giant_takes_no_space(world: World) -> None:
    done = world.keep("truncate -s 4T giant")
    made = invert(world.place, done)
    apply(made)
    apply(invert(world.place, made))

    assert (world.root / "giant").stat().st_size == 4 << 40
    assert (world.root / "giant").stat().st_blocks < 100


@pytest.mark.long
def test_directories_that_are_nested_too_deeply_are_refused_and_dropped(world: World) -> None:
    changes = changes_of(world.layer, world.root, "for i in $(seq 900); do mkdir d && cd d || exit; done; echo > f")

    assert changes.problem == "directories are nested more than 200 deep"
    with pytest.raises(ValueError, match="nested more than 200"):
        prepare(world.place, world.layer, changes)
    world.layer.drop()
    assert list(world.place.layers.iterdir()) == []


def test_directories_that_are_nested_deeper_than_python_can_call_itself_are_refused(world: World) -> None:
    (world.layer.overlays[0].upper / "d").mkdir()
    nest(world.layer.overlays[0].upper / "d")

    assert look(world.layer).problem == "directories are nested more than 200 deep"


def test_too_many_files_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.layers.comparison.MAX_ENTRIES", 50)
    changes = changes_of(world.layer, world.root, "mkdir n; for i in $(seq 60); do : > n/$i; done")

    assert "more than 50 files" in changes.problem


def test_only_some_of_many_files_are_listed_but_all_that_are_protected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.layers.comparison.MAX_LISTED", 10)
    rules = LookRules(is_protected=lambda path: path.endswith("/AGENTS.md"))
    line = "mkdir -p n/z; for i in $(seq 60); do : > n/$i; done; : > n/z/AGENTS.md"
    changes = changes_of(world.layer, world.root, line, rules)

    assert (changes.files, len(changes.listed)) == (61, 11)
    assert [each.path for each in changes.protected] == [f"{world.root}/n/z/AGENTS.md"]


def test_files_that_git_ignores_never_conflict(world: World) -> None:
    rules = LookRules(is_ignored=lambda path, _is_directory: "/build" in path)
    in_layer(world.layer, world.root, "echo theirs > build/out; echo theirs >> a")
    (world.root / "build" / "out").write_text("mine\n")
    apply(prepare(world.place, world.layer, look(world.layer, rules)))

    assert (world.root / "build" / "out").read_text() == "mine\n"
    assert (world.root / "a").read_text() == "a\ntheirs\n"


def test_a_running_layer_is_kept_step_by_step(world: World) -> None:
    for line, expected in (
        ("echo 1 > one; mkdir d; echo 2 > d/two", {"one": "1\n", "d/two": "2\n", "a": "a\n"}),
        ("echo more >> one; echo 3 > d/three; echo x >> a", {"one": "1\nmore\n", "d/three": "3\n", "a": "a\nx\n"}),
        ("rm d/two; echo y >> a", {"d/three": "3\n", "a": "a\nx\ny\n"}),
        ("true", {"a": "a\nx\ny\n"}),
    ):
        in_layer(world.layer, world.root, line)
        changes = look(world.layer, is_live=True)
        assert (line == "true") == (not changes.operations)
        if changes.operations:
            apply(prepare(world.place, world.layer, changes), world.layer)
        assert {name: (world.root / name).read_text() for name in expected} == expected
    assert not (world.root / "d" / "two").exists()
    assert look(world.layer).operations == []


def test_an_edit_between_two_looks_at_a_running_layer_is_a_conflict(world: World) -> None:
    in_layer(world.layer, world.root, "echo 1 > one")
    apply(prepare(world.place, world.layer, look(world.layer, is_live=True)), world.layer)
    (world.root / "one").write_text("mine\n")
    in_layer(world.layer, world.root, "echo 2 >> one")

    assert look(world.layer, is_live=True).conflicts == [f"{world.root}/one"]


def test_a_running_program_that_swaps_a_directory_for_a_link_gets_nothing_from_outside(world: World) -> None:
    in_layer(world.layer, world.root, "mkdir d; echo 1 > d/secret")
    changes = look(world.layer, is_live=True)
    upper = world.layer.overlays[0].upper
    shutil.rmtree(upper / "d")
    (upper / "d").symlink_to(world.outside)
    with suppress(OSError, Conflict):
        apply(prepare(world.place, world.layer, changes), world.layer)

    assert not (world.root / "d" / "secret").exists() or (world.root / "d" / "secret").read_text() != "secret\n"


def test_locate_finds_files_as_the_layer_sees_them(world: World) -> None:
    in_layer(world.layer, world.root, "echo >> a; rm -r src; mkdir src; echo > src/new; rm -r build")

    located = {name: world.layer.locate(world.root / name) for name in ("a", "src/b", "src/new", "build", "missing")}

    upper = world.layer.overlays[0].upper
    assert located == {"a": upper / "a", "src/b": None, "src/new": upper / "src/new", "build": None, "missing": None}
    assert world.layer.locate(world.outside / "secret") == world.outside / "secret"


def test_a_layer_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    in_child(lambda: str(world.place.open([world.root]).id))

    recover(world.place)

    assert [path.name for path in world.place.layers.iterdir()] == [world.layer.id]
    world.layer.drop()


def test_a_workspace_on_another_file_system_is_kept_and_undone() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory() as other:
        if os.stat(one).st_dev == os.stat(other).st_dev:
            pytest.skip("there is only one file system")
        root, place = Path(one, "tree"), Place(Path(other))
        (root / "src").mkdir(parents=True)
        (root / "a").write_text("a\n")
        (root / "src" / "b").write_text("b\n")
        before = picture(str(root))
        layer = place.open([root])
        changes = changes_of(layer, root, "echo >> a; rm -r src; mkdir n; echo > n/1; ln n/1 n/2; truncate -s 64M n/s")
        done = prepare(place, layer, changes)
        apply(done)
        layer.drop()
        after = picture(str(root))
        made = invert(place, done)
        apply(made)
        assert differences(picture(str(root)), before) == {}
        apply(invert(place, made))
        assert differences(picture(str(root)), after) == {}
        assert sorted(os.listdir(root)) == ["a", "n"]


@pytest.mark.parametrize("lines", [5, 300, 600, 900, 1_200])
def test_a_kill_on_another_file_system_leaves_all_or_nothing(lines: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory() as other:
        root, place = Path(one, "tree"), Place(Path(other))
        (root / "src").mkdir(parents=True)
        (root / "a").write_text("a\n")
        before = picture(str(root))
        layer = place.open([root])
        changes = changes_of(layer, root, "echo >> a; rm -r src; mkdir n; echo > n/1")
        killed_after(lines, lambda: apply(prepare(place, layer, changes)))
        found = recover(place)
        assert not any(each.problem for each in found)
        assert not [*root.glob(".crow-*")]
        assert (picture(str(root)) == before) == (not (root / "n").exists())
        assert sorted(os.listdir(root)) in (["a", "src"], ["a", "n"])


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_an_ordinary_user_can_undo_too(number: int) -> None:
    lines = [*LINES, "chmod 500 src build; mkdir -p r/o; chmod 555 r/o r", "chmod -R u+w .; rm -rf build src"]
    rng = random.Random(f"nobody {number}")
    as_nobody(lambda directory: check_round(directory, rng, lines[-1 - number], kills=False))


def test_the_kernels_notes_in_a_workspace_have_no_effect(world: World) -> None:
    for name in ("opaque", "redirect", "origin", "whiteout"):
        os.setxattr(world.root / "src", f"user.overlay.{name}", b"y")
        os.setxattr(world.root / "a", f"user.overlay.{name}", b"/etc")
    world.reopen()
    world.keep("echo >> a; echo > src/c; cat src/b > d")

    assert (world.root / "d").read_text() == "b\n"
    assert sorted(world.picture()) == [".", "a", "build", "d", "src", "src/b", "src/c"]


def test_states_compare_files_without_reading_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    handle = os.open(tmp_path, os.O_RDONLY)
    one = states.state_of("a", handle)
    os.utime(tmp_path / "a", ns=(0, 0))
    two = states.state_of("a", handle)
    os.close(handle)

    assert (one.matches(one), one.matches(two), one.matches(states.ABSENT)) == (True, False, False)
    assert isinstance(Layer, type)


@pytest.mark.parametrize("lines", [200, 400, 700, 1_000, 1_400])
def test_a_kill_of_the_process_that_owns_the_layer_leaves_all_or_nothing(lines: int, tmp_path: Path) -> None:
    place, root = Place(tmp_path / "data"), tmp_path / "tree"
    (root / "src").mkdir(parents=True)
    (root / "a").write_text("a\n")
    before = picture(str(root))

    def work() -> None:
        layer = place.open([root])
        changes = changes_of(layer, root, "echo >> a; rm -r src; mkdir n; echo > n/1; echo > b; echo > c")
        apply(prepare(place, layer, changes))

    killed_after(lines, work)
    found = recover(place)

    assert not any(each.problem for each in found)
    assert sorted(os.listdir(root)) in (["a", "src"], ["a", "b", "c", "n"])
    assert (picture(str(root)) == before) == (root / "src").exists()
    assert list(place.layers.iterdir()) == []


def test_a_change_set_that_waits_to_be_applied_is_not_removed_by_another_process(world: World) -> None:
    made = prepare(world.place, world.layer, changes_of(world.layer, world.root, "echo > new"))
    in_child(lambda: len(recover(world.place)))
    apply(made)

    assert (world.root / "new").exists()

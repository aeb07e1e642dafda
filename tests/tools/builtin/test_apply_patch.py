"""`apply_patch` on real files."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from crow.agent.permissions.decisions import Allow, Ask, Refuse, decide
from crow.agent.permissions.rules import user_rules
from crow.tools import PlannedCall
from tests.tools.conftest import OpenBox, call


def patch(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


THREE = patch(
    *("*** Update File: src/a.py", "@@ def f():", "-    return 1", "+    return 2"),
    *("*** Add File: docs/new.md", "+# New", "+", "+Text"),
    *("*** Delete File: old.txt",),
)


@pytest.fixture
def tree(root: Path) -> Path:
    (root / "src").mkdir()
    (root / "src" / "a.py").write_text("def f():\n    return 1\n")
    (root / "old.txt").write_text("gone\n")
    return root


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


async def test_a_link_is_not_removed_or_moved_in_place_of_its_file(open_box: OpenBox, tree: Path) -> None:
    (tree / "link.py").symlink_to("src/a.py")
    before = content(tree)
    async with open_box() as box:
        deleted = await box.run("apply_patch", input=patch("*** Delete File: link.py"))
        moved = await box.run("apply_patch", input=patch("*** Update File: link.py", "*** Move to: b.py"))
        edited = await box.run("apply_patch", input=patch("*** Update File: link.py", "@@", "-def f():", "+def g():"))
    words = f"apply_patch: {tree}/link.py is a link to src/a.py; remove or move links with shell\nNo file was changed."
    assert (deleted.text, moved.text) == (words, words)
    assert edited.text == "Edited src/a.py at line 1."
    assert content(tree) == {
        name: data.replace(b"def f", b"def g") if name in ("link.py", "src/a.py") else data
        for name, data in before.items()
    }


async def test_a_patch_changes_adds_and_deletes_files_and_shows_all_of_them(open_box: OpenBox, tree: Path) -> None:
    async with open_box() as box:
        plan = await box.plan("apply_patch", input=THREE)
        outcome = await box.run("apply_patch", input=THREE)
    paths = (str(tree / "src/a.py"), str(tree / "docs/new.md"), str(tree / "old.txt"))
    assert plan.fault is None
    assert plan.paths == paths
    assert plan.is_barrier
    assert plan.access == "write"
    assert plan.announcement.title == "Patch src/a.py, docs/new.md, old.txt"
    assert tuple(location.path for location in plan.announcement.locations) == paths
    assert [(diff.path, diff.old_text, diff.new_text) for diff in plan.announcement.diffs] == [
        (paths[0], "def f():\n    return 1\n", "def f():\n    return 2\n"),
        (paths[1], None, "# New\n\nText\n"),
        (paths[2], "gone\n", ""),
    ]
    assert outcome.announcement == plan.announcement
    assert outcome.text == "Edited src/a.py at line 2.\nCreated docs/new.md: 3 lines.\nDeleted old.txt."
    assert content(tree) == {"docs/new.md": b"# New\n\nText\n", "src/a.py": b"def f():\n    return 2\n"}
    assert [(path, before, after) for _, path, before, after in box.log.changes] == [
        (tree / "src/a.py", b"def f():\n    return 1\n", b"def f():\n    return 2\n"),
        (tree / "docs/new.md", None, b"# New\n\nText\n"),
        (tree / "old.txt", b"gone\n", None),
    ]


async def test_one_hunk_that_fits_nowhere_leaves_every_file_as_it_is(open_box: OpenBox, tree: Path) -> None:
    wrong = patch("*** Delete File: old.txt", "*** Update File: src/a.py", "@@", " def f():", "-    return 7", "+    x")
    before = content(tree)
    async with open_box() as box:
        plan = await box.plan("apply_patch", input=wrong)
        outcome = await box.run("apply_patch", input=wrong)
    assert outcome.is_error
    assert outcome.text == plan.fault
    assert outcome.text == (
        "apply_patch: hunk 1 does not occur in src/a.py: line 2 has `1` where hunk 1 has `7`. The file has:\n"
        "1\tdef f():\n2\t    return 1\nNo file was changed."
    )
    assert content(tree) == before
    assert box.log.changes == []


async def test_a_write_that_fails_midway_puts_the_earlier_files_back(open_box: OpenBox, tree: Path) -> None:
    (tree / "closed").write_text("a file, not a directory\n")
    before = content(tree)
    lines = ("*** Update File: src/a.py", "@@", "-    return 1", "+    return 2", "*** Add File: made.txt", "+x")
    async with open_box() as box:
        outcome = await box.run(
            "apply_patch", input=patch(*lines, "*** Add File: closed/b.txt", "+y", "*** Delete File: old.txt")
        )
    assert outcome.is_error
    assert outcome.text.endswith("No file was changed")
    assert content(tree) == before


async def test_a_cancelled_patch_puts_the_earlier_files_back(open_box: OpenBox, tree: Path) -> None:
    before = content(tree)
    async with open_box() as box:
        write = box.workspace.write_text
        with anyio.CancelScope() as scope:

            async def cancel_after(path: Path, text: str) -> str:
                written = await write(path, text)
                if path.name == "new.md":
                    scope.cancel()
                    await anyio.sleep_forever()
                return written

            box.workspace.write_text = cancel_after  # type: ignore[method-assign]
            await box.run("apply_patch", input=THREE)
        assert scope.cancelled_caught
        with anyio.fail_after(60):
            while content(tree) != before:  # noqa: ASYNC110 - the tool ends in its own task
                await anyio.sleep(0.005)


async def test_a_file_is_moved_with_its_changes_encoding_and_mode(open_box: OpenBox, root: Path) -> None:
    (root / "run.sh").write_bytes("echo caf\u00e9\necho b\n".encode("latin-1"))
    (root / "run.sh").chmod(0o755)
    moved = patch("*** Update File: run.sh", "*** Move to: bin/start.sh", "@@", "-echo b", "+echo c")
    async with open_box() as box:
        outcome = await box.run("apply_patch", input=moved)
        again = await box.run("apply_patch", input=moved)
    assert not outcome.is_error, outcome.text
    assert outcome.announcement is not None
    assert outcome.announcement.title == "Move run.sh to bin/start.sh"
    assert content(root) == {"bin/start.sh": "echo caf\u00e9\necho c\n".encode("latin-1")}
    assert os.stat(root / "bin/start.sh").st_mode & 0o777 == 0o755
    assert again.is_error


async def test_crlf_and_a_missing_last_line_end_stay(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_bytes(b"one\r\ntwo\r\nthree")
    async with open_box() as box:
        await box.run("apply_patch", input=patch("*** Update File: a.txt", "@@", " one", "-two", "+2", "+2b", " three"))
    assert content(root) == {"a.txt": b"one\r\n2\r\n2b\r\nthree"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("*** Add File: old.txt", "+x"), "old.txt exists; change it with `*** Update File: old.txt`"),
        (("*** Delete File: src",), "src is a directory; expected a file"),
        (("*** Delete File: src/b.py",), "src/b.py does not exist; similar: src/a.py"),
        (("*** Update File: old.txt", "*** Move to: src/a.py"), "src/a.py exists"),
        (("*** Delete File: old.txt", "*** Delete File: ./old.txt"), "the patch names old.txt twice"),
        (("*** Update File: old.txt", "@@", "-gone", "+# ... existing code ..."), "stands for code that would be lost"),
        (("*** Update File: old.txt", "@@", "-gone", "+gone"), "the patch changes nothing in old.txt"),
    ],
)
async def test_a_patch_that_would_lose_something_is_refused(
    open_box: OpenBox, tree: Path, lines: tuple[str, ...], words: str
) -> None:
    before = content(tree)
    async with open_box() as box:
        outcome = await box.run("apply_patch", input=patch(*lines))
    assert outcome.is_error
    assert words in outcome.text
    assert content(tree) == before


async def test_lines_that_others_changed_are_not_overwritten(open_box: OpenBox, tree: Path) -> None:
    async with open_box() as box:
        await box.run("read_file", path="src/a.py")
        (tree / "src/a.py").write_text("def f():\n    return 1\n# by others\n")
        outcome = await box.run(
            "apply_patch", input=patch("*** Update File: src/a.py", "@@", "-    return 1", "+    return 2")
        )
    assert outcome.is_error
    assert "src/a.py has changed since you read it" in outcome.text


async def test_a_link_that_leads_elsewhere_after_the_permission_is_refused(open_box: OpenBox, tree: Path) -> None:
    (tree / "other.txt").write_text("gone\n")
    (tree / "link.txt").symlink_to(tree / "old.txt")
    arguments = {"input": patch("*** Update File: link.txt", "@@", "-gone", "+here", "*** Delete File: other.txt")}
    async with open_box() as box:
        planned = await box.plan("apply_patch", **arguments)
        (tree / "link.txt").unlink()
        (tree / "link.txt").symlink_to(tree / "other.txt")
        outcome = await box.toolbox.run(call("apply_patch", **arguments), "call_7_0", box.show, planned=planned)
    assert outcome.is_error
    assert (tree / "other.txt").read_text() == (tree / "old.txt").read_text() == "gone\n"


def judged(plan: PlannedCall, mode: str, *, allow: tuple[str, ...] = (), deny: tuple[str, ...] = ()) -> type:
    return type(decide("apply_patch", plan, mode, user_rules(allow, deny)))


async def test_a_patch_may_run_only_if_each_of_its_files_may(open_box: OpenBox, tree: Path) -> None:
    async with open_box() as box:
        plan = await box.plan("apply_patch", input=THREE)
    assert judged(plan, "ask") is Ask
    assert judged(plan, "accept-edits") is Allow
    assert judged(plan, "plan") is Refuse
    assert judged(plan, "ask", allow=("apply_patch(src/**)",)) is Ask
    assert judged(plan, "ask", allow=("apply_patch(src/**)", "apply_patch(docs/**)")) is Ask
    assert judged(plan, "ask", allow=("apply_patch(src/**)", "apply_patch(docs/**)", "apply_patch(old.txt)")) is Allow
    assert judged(plan, "ask", allow=("apply_patch",)) is Allow
    for rule in ("apply_patch(old.txt)", "write_file(docs/**)", "edit_file(src/**)", "edit_file(old.txt)"):
        assert judged(plan, "auto", allow=("apply_patch",), deny=(rule,)) is Refuse, rule


async def test_rules_about_the_other_tools_hold_for_what_they_do(open_box: OpenBox, tree: Path) -> None:
    async with open_box() as box:
        plan = await box.plan("apply_patch", input=THREE)
    edited, added, deleted = plan.parts
    assert judged(edited, "ask", allow=("edit_file",)) is Allow
    assert judged(added, "ask", allow=("edit_file",)) is Ask
    assert judged(added, "ask", allow=("write_file",)) is Allow
    assert judged(deleted, "ask", allow=("edit_file",)) is Ask
    assert judged(deleted, "ask", allow=("edit_file", "write_file")) is Allow
    assert judged(edited, "auto", deny=("write_file",)) is Allow
    assert judged(deleted, "auto", deny=("write_file",)) is Refuse


async def test_one_file_outside_or_protected_makes_the_whole_patch_ask(
    open_box: OpenBox, tree: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("secret line\n")
    edit = ("*** Update File: src/a.py", "@@", "-    return 1", "+    return 2")
    async with open_box() as box:
        far = await box.plan(
            "apply_patch", input=patch(*edit, f"*** Update File: {outside}", "@@", "-something", "+else")
        )
        near = await box.plan("apply_patch", input=patch(*edit, "*** Add File: .envrc", "+x"))
    assert far.touched.is_outside
    assert far.fault is None, "the message would tell what the file contains"
    assert judged(far, "auto") is Ask
    assert judged(far, "auto", allow=("apply_patch",)) is Ask
    assert judged(far, "auto", allow=(f"apply_patch({outside})",)) is Allow
    assert near.touched.is_protected
    assert judged(near, "auto", allow=("apply_patch", "apply_patch(.envrc)")) is Ask

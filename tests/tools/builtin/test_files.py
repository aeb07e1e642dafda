from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.entries import Announcement, Attachment, Diff, Location
from crow.domain.messages import Image
from crow.domain.rendering import RESULT_MASK
from crow.tools import Outcome, PlannedCall, Touched, builtin
from crow.tools.builtin.files import LineWindow
from crow.tools.builtin.tool import ToolContext
from crow.tools.in_context import CallPart
from crow.tools.jobs import Jobs
from crow.tools.workspace import DiskWorkspace
from tests.tools.conftest import OpenBox, call


async def test_reading_hides_bom_and_carriage_returns(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_bytes("\ufeffone\r\n\r\nthrée".encode())
    async with open_box() as box:
        assert await box.run("read_file", path="a.txt") == Outcome(text="one\n\nthrée")


async def test_a_partial_read_says_which_lines_it_shows_and_how_to_continue(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_text("".join(f"{number}\n" for number in range(1, 5001)))
    async with open_box() as box:
        middle = await box.run("read_file", path="a.txt", line=10, limit=2)
        whole = await box.run("read_file", path="a.txt")
        last = await box.run("read_file", path="a.txt", line=5000)
        beyond = await box.run("read_file", path="a.txt", line=5001)
    assert middle.text == "[lines 10-11 of 5,000]\n10\n11"
    assert whole.text.startswith("[lines 1-2000 of 5,000]\n1\n2\n")
    assert whole.text.endswith("\n2000\n[continue with line=2001]")
    assert last.text == "[lines 5000-5000 of 5,000]\n5000"
    assert beyond == Outcome(text="read_file: line is 5001; a.txt has only 5,000 lines", is_error=True)


async def test_a_file_of_empty_lines_is_not_shown_as_nothing(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_text("\n\n")
    async with open_box() as box:
        assert (await box.run("read_file", path="a.txt")).text == "[lines 1-2 of 2]\n\n"


async def test_long_lines_and_large_reads_are_cut(open_box: OpenBox, root: Path) -> None:
    (root / "long.txt").write_text("x" * 3000 + "\n" + ("y" * 1000 + "\n") * 100)
    async with open_box() as box:
        text = (await box.run("read_file", path="long.txt")).text
    assert text.startswith(f"[lines 1-45 of 101]\n{'x' * 2000}[... 1,000 more bytes in this line]\ny")
    assert text.endswith("\n[continue with line=46]")
    assert len(text) < 48_000


@pytest.mark.long
async def test_any_lines_of_a_huge_file_can_be_read_in_pieces(
    open_box: OpenBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.builtin.files.WHOLE_BYTES", 4)
    monkeypatch.setattr("crow.tools.builtin.files.PIECE_BYTES", 7)
    lines = [f"line {number}" for number in range(1, 51)]
    lines[9] = "é" * 3_000
    (root / "huge.txt").write_text("\ufeff" + "\r\n".join(lines))
    (root / "zero.bin").write_bytes(b"\0" * 99)
    async with open_box() as box:
        first = await box.run("read_file", path="huge.txt", limit=2)
        long = await box.run("read_file", path="huge.txt", line=10, limit=1)
        last = await box.run("read_file", path="huge.txt", line=49)
        beyond = await box.run("read_file", path="huge.txt", line=51)
        binary = await box.run("read_file", path="zero.bin")
    size = (root / "huge.txt").stat().st_size
    assert first.text == f"[lines 1-2 of a file of {size:,} bytes]\nline 1\nline 2"
    assert long.text == (f"[lines 10-10 of a file of {size:,} bytes]\n{'é' * 2_000}[... 2,000 more bytes in this line]")
    assert last.text == f"[lines 49-50 of a file of {size:,} bytes]\nline 49\nline 50"
    assert beyond == Outcome(text="read_file: line is 51; huge.txt has only 50 lines", is_error=True)
    assert binary.text == "read_file: zero.bin is binary (99 bytes); only text, images and PDFs can be read"


@given(
    st.lists(st.text(alphabet="ab\u00e9\u2028\r ", max_size=6), max_size=8),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_a_line_window_selects_the_same_lines_however_the_file_is_split(
    lines: list[str], first: int, limit: int, piece: int, ended: bool
) -> None:
    data = "\n".join(lines).encode() + (b"\n" if ended and lines else b"")
    whole = data.decode().split("\n")
    whole = whole[:-1] if whole[-1] == "" else whole
    window = LineWindow(first=first, limit=limit)
    at = 0
    while at < len(data) and window.feed(data[at : at + piece]):
        at += piece
    assert [row.text() for row in window.rows] == [
        line.removesuffix("\r") for line in whole[first - 1 : first - 1 + limit]
    ]
    assert window.has_more == (first - 1 + limit < len(whole))
    assert window.has_more or window.line_count == len(whole)


async def test_a_huge_file_is_not_changed_because_it_could_not_be_restored(open_box: OpenBox, root: Path) -> None:
    with (root / "huge.txt").open("wb") as file:
        file.truncate(1_000_000_000)
    async with open_box() as box:
        write = await box.plan("write_file", path="huge.txt", content="")
        edit = await box.plan("edit_file", path="huge.txt", old_text="a", new_text="b")
        assert (await box.run("write_file", path="huge.txt", content="")).is_error
    assert write.fault == "write_file: huge.txt has 1,000,000,000 bytes, too many to keep for undo; use shell"
    assert edit.fault == "edit_file: huge.txt has 1,000,000,000 bytes, more than 32,000,000; use shell"
    assert (root / "huge.txt").stat().st_size == 1_000_000_000


async def test_unreadable_files_are_refused_with_a_reason(open_box: OpenBox, root: Path) -> None:
    (root / "src").mkdir()
    (root / "src" / "settings.py").write_text("")
    (root / "data.bin").write_bytes(b"\x89PNG\0\0")
    (root / "packed").write_bytes(bytes(range(128, 256)))
    (root / "latin.txt").write_bytes("déjà vu, encore une fois".encode("latin-1"))
    os.mkfifo(root / "pipe")
    async with open_box() as box:
        said = {
            path: (await box.run("read_file", path=path)).text
            for path in (
                "src/Setings.py",
                "nowhere/a.py",
                "other",
                "src",
                "pipe",
                "data.bin",
                "packed",
                "src/settings.py",
                "latin.txt",
                "a\0b",
            )
        }
    assert said == {
        "src/Setings.py": "read_file: src/Setings.py does not exist; similar: src/settings.py",
        "nowhere/a.py": "read_file: nowhere/a.py does not exist; neither does the directory nowhere",
        "other": "read_file: other does not exist; use list_files to see which files exist",
        "src": "read_file: src is a directory; expected a file; use list_files for directories",
        "pipe": "read_file: pipe is a device, pipe or socket; expected a file; use list_files for directories",
        "data.bin": "read_file: data.bin is binary (6 bytes); only text, images and PDFs can be read",
        "packed": "read_file: packed is binary (128 bytes); only text, images and PDFs can be read",
        "src/settings.py": "(src/settings.py is empty)",
        "latin.txt": "déjà vu, encore une fois\n[the file is latin-1; the tools keep this encoding]",
        "a\0b": "read_file: path is 'a\\x00b'; expected the path of a file or directory",
    }


async def test_a_planned_read_names_file_lines_and_whether_it_is_outside(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("x")
    (root / "link").symlink_to(tmp_path / "secret")
    async with open_box() as box:
        inside = await box.plan("read_file", path="src/a.py", line=10, limit=5)
        outside = await box.plan("read_file", path="link")
    assert inside == PlannedCall(
        announcement=Announcement(
            title="Read src/a.py lines 10-14",
            kind="read",
            locations=(Location(path=str(root / "src" / "a.py"), line=10),),
        ),
        access="read",
        touched=Touched(rule_paths=(str(root / "src" / "a.py"), "src/a.py")),
    )
    assert outside == PlannedCall(
        announcement=Announcement(
            title=f"Read {tmp_path / 'secret'}", kind="read", locations=(Location(path=str(tmp_path / "secret")),)
        ),
        access="read",
        touched=Touched(
            is_outside=True, rule_paths=(str(tmp_path / "secret"),), other_paths=(str(root / "link"), "link")
        ),
    )


async def test_a_write_shows_its_diff_first_logs_the_old_content_and_writes_exactly(
    open_box: OpenBox, root: Path
) -> None:
    path = root / "new" / "a.txt"
    first = Announcement(
        title="Write new/a.txt",
        kind="edit",
        locations=(Location(path=str(path)),),
        diffs=(Diff(path=str(path), old_text=None, new_text="one\r\ntwo"),),
    )
    async with open_box() as box:
        offer = await box.plan("write_file", path="new/a.txt", content="one\r\ntwo")
        assert not path.exists()
        created = await box.run("write_file", path="new/a.txt", content="one\r\ntwo")
        replaced = await box.run("write_file", path="new/a.txt", content="")
        changes = box.log.changes
    assert offer == PlannedCall(
        announcement=first, access="write", is_barrier=True, touched=Touched(rule_paths=(str(path), "new/a.txt"))
    )
    assert created == Outcome(text="Created new/a.txt: 2 lines, 8 bytes.", announcement=first)
    assert replaced.text == "Replaced new/a.txt: 0 lines, 0 bytes."
    assert replaced.announcement is not None
    assert replaced.announcement.diffs == (Diff(path=str(path), old_text="one\r\ntwo", new_text=""),)
    assert changes == [("call_7_0", path, None, b"one\r\ntwo"), ("call_7_0", path, b"one\r\ntwo", b"")]
    assert path.read_bytes() == b""


async def test_a_whole_write_keeps_the_mark_and_the_line_ends_that_a_read_does_not_show(
    open_box: OpenBox, root: Path
) -> None:
    files = {
        "a.txt": "\ufeffone\r\ntwo\r\n".encode(),
        "wide.txt": "one\r\ntwo\r\n".encode("utf-16"),
        "mixed.txt": b"one\r\ntwo\n",
        "own.txt": b"one\r\n",
        "new.txt": None,
    }
    for name, data in files.items():
        if data is not None:
            (root / name).write_bytes(data)
    async with open_box() as box:
        offer = await box.plan("write_file", path="a.txt", content="1\n2\n")
        texts = [
            (await box.run("write_file", path=name, content="1\r\n2\n" if name == "own.txt" else "1\n2\n")).text
            for name in files
        ]
    assert [diff.new_text for diff in offer.announcement.diffs] == ["\ufeff1\r\n2\r\n"]
    assert {name: (root / name).read_bytes() for name in files} == {
        "a.txt": "\ufeff1\r\n2\r\n".encode(),
        "wide.txt": "\ufeff1\r\n2\r\n".encode("utf-16-le"),
        "mixed.txt": b"1\n2\n",
        "own.txt": b"1\r\n2\n",
        "new.txt": b"1\n2\n",
    }
    kept = " Its line ends are still CRLF."
    assert [text.partition(" You had")[0] for text in texts] == [
        f"Replaced a.txt: 2 lines, 9 bytes.{kept}",
        f"Replaced wide.txt: 2 lines, 14 bytes.{kept}",
        "Replaced mixed.txt: 2 lines, 4 bytes.",
        "Replaced own.txt: 2 lines, 5 bytes.",
        "Created new.txt: 2 lines, 4 bytes.",
    ]


async def test_a_write_to_a_directory_is_refused_and_still_a_barrier(open_box: OpenBox, root: Path) -> None:
    (root / "src").mkdir()
    async with open_box() as box:
        offer = await box.plan("write_file", path="src", content="x")
        outcome = await box.run("write_file", path="src", content="x")
        below_a_file = await box.run("write_file", path="a\nb" * 200, content="x")
    assert (offer.fault, offer.is_barrier) == ("write_file: src is a directory; expected the path of a file", True)
    assert outcome == Outcome(text=offer.fault or "", is_error=True)
    assert below_a_file.text.startswith("write_file: File name too long")
    assert box.log.changes == []


async def test_an_edit_makes_the_change_it_shows_and_keeps_bom_and_line_ends(open_box: OpenBox, root: Path) -> None:
    path = root / "a.py"
    path.write_bytes("\ufeffa = 1\r\nb = 2\r\n".encode())
    change = Announcement(
        title="Edit a.py",
        kind="edit",
        locations=(Location(path=str(path), line=2),),
        diffs=(
            Diff(path=str(path), old_text="\ufeffa = 1\r\nb = 2\r\n", new_text="\ufeffa = 1\r\nb = 3\r\nc = 4\r\n"),
        ),
    )
    edit = {"path": "a.py", "old_text": "b = 2", "new_text": "b = 3\nc = 4"}
    async with open_box() as box:
        assert await box.plan("edit_file", **edit) == PlannedCall(
            announcement=change, access="write", is_barrier=True, touched=Touched(rule_paths=(str(path), "a.py"))
        )
        outcome = await box.run("edit_file", **edit)
        changes = box.log.changes
    assert outcome == Outcome(text="Edited a.py in 1 place, at line 2.", announcement=change)
    after = "\ufeffa = 1\r\nb = 3\r\nc = 4\r\n".encode()
    assert path.read_bytes() == after
    assert changes == [("call_7_0", path, "\ufeffa = 1\r\nb = 2\r\n".encode(), after)]


async def test_an_edit_says_how_often_and_how_it_matched(open_box: OpenBox, root: Path) -> None:
    (root / "a.py").write_text("if x:\n    a\n    a\n")
    async with open_box() as box:
        every = await box.run("edit_file", path="a.py", old_text="a", new_text="b", all=True)
        loosely = await box.run("edit_file", path="a.py", old_text="b\nb", new_text="c")
    assert every.text == "Edited a.py in 2 places, the first at line 2."
    assert loosely.text == (
        "Edited a.py in 1 place, at line 2 (old_text differed only in white space; new_text was indented to match). "
        "It now reads:\n2\t    c\n"
    )
    assert (root / "a.py").read_text() == "if x:\n    c\n"


async def test_an_impossible_edit_is_a_fault_when_planned_and_changes_nothing(open_box: OpenBox, root: Path) -> None:
    (root / "src").mkdir()
    (root / "src" / "app.py").write_text("a\na\na\n")
    (root / "data.bin").write_bytes(b"\0\1\2")
    edits = {
        "src/app.py": "edit_file: old_text occurs 3 times in src/app.py; include more lines so that it occurs once, "
        "or set all=true:\n1\ta\n2\ta\n3\ta",
        "data.bin": "edit_file: data.bin is binary (3 bytes); use shell to change it",
        "src/ap.py": "edit_file: src/ap.py does not exist; similar: src/app.py",
        "src": "edit_file: src is a directory; expected a file; use list_files for directories",
    }
    async with open_box() as box:
        for path, words in edits.items():
            offer = await box.plan("edit_file", path=path, old_text="a", new_text="b")
            assert (offer.fault, offer.is_barrier, offer.announcement.kind) == (words, True, "edit")
            assert await box.run("edit_file", path=path, old_text="a", new_text="b") == Outcome(
                text=words, is_error=True
            )
        assert box.log.changes == []


async def test_a_replacement_character_of_the_file_itself_is_no_stray_byte(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_text("MARK = '\ufffd'\n")
    (root / "b.txt").write_bytes("déjà vu ✓\n".encode() + b"stray \xff byte\n")
    async with open_box() as box:
        assert (await box.run("read_file", path="a.txt")).text == "MARK = '\ufffd'"
        assert "[bytes that are not UTF-8 are shown as \ufffd]" in (await box.run("read_file", path="b.txt")).text


async def test_a_planned_write_outside_tells_the_model_nothing_about_the_file(
    open_box: OpenBox, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("password")
    async with open_box() as box:
        faults = [
            (offer.touched.is_outside, offer.fault)
            for offer in (
                await box.plan("edit_file", path="../secret", old_text="pass", new_text="x"),
                await box.plan("edit_file", path="../secret", old_text="other", new_text="x"),
                await box.plan("edit_file", path="../missing", old_text="other", new_text="x"),
                await box.plan("write_file", path="..", content="x"),
                await box.plan("write_file", path="../secret", content=RESULT_MASK),
            )
        ]
    assert faults == [(True, None)] * 5


async def test_paths_stay_as_the_client_knows_them_if_cwd_is_a_link(tmp_path: Path, root: Path) -> None:
    (root / "a.py").write_text("a\n")
    (tmp_path / "link").symlink_to(root)
    workspace = DiskWorkspace(tmp_path / "link")
    offer = await builtin.plan(
        call("edit_file", path="a.py", old_text="a", new_text="b"),
        ToolContext(workspace=workspace, jobs=Jobs(workspace)),
    )
    assert offer.touched.is_outside is False
    assert offer.announcement.locations[0].path == str(tmp_path / "link" / "a.py")
    assert offer.announcement.diffs[0].path == str(tmp_path / "link" / "a.py")


async def test_files_are_found_and_changed_by_their_name_in_another_normalization_form(
    open_box: OpenBox, root: Path
) -> None:
    nfc, nfd = "r\u00e9sum\u00e9", "re\u0301sume\u0301"
    (root / nfd).mkdir()
    (root / nfd / f"{nfd}.md").write_text("one\n")
    patch = f"*** Begin Patch\n*** Update File: {nfc}/{nfc}.md\n@@\n-two\n+three\n*** End Patch"
    async with open_box() as box:
        planned = await box.plan("write_file", path=f"{nfc}/{nfc}.md", content="x")
        read = await box.run("read_file", path=f"{nfc}/{nfc}.md")
        edited = await box.run("edit_file", path=f"{nfc}/{nfc}.md", old_text="one", new_text="two")
        patched = await box.run("apply_patch", input=patch)
        matching = await box.run("list_files", pattern=f"**/{nfc}.*")
        left_out = await box.run("list_files", pattern=f"!{nfc}")
        found = await box.run("grep", pattern="three", path=nfc, glob=f"{nfc}.md")
        created = await box.run("write_file", path=f"{nfc}/{nfc}.txt", content="new\n")
    assert planned.announcement.locations == (Location(path=str(root / nfd / f"{nfd}.md")),)
    assert read.text == "one"
    assert [each for each in (edited, patched, created) if each.is_error] == []
    assert (root / nfd / f"{nfd}.md").read_text() == "three\n"
    assert f"{nfd}/{nfd}.md" in matching.text
    assert left_out.text.startswith("No files")
    assert f"{nfd}/{nfd}.md:1: three" in found.text
    assert os.listdir(root) == [nfd]
    assert set(os.listdir(root / nfd)) == {f"{nfd}.md", f"{nfc}.txt"}


async def test_a_call_that_was_planned_for_one_spelling_touches_no_other(open_box: OpenBox, root: Path) -> None:
    nfc, nfd = "caf\u00e9", "cafe\u0301"
    (root / nfd).write_text("one")
    written = call("write_file", path=nfc, content="two")
    async with open_box() as box:
        planned = await box.toolbox.plan(written)
        (root / nfc).write_text("mine")
        outcome = await box.toolbox.run(written, "call_7_0", box.show, planned=planned)
    assert outcome.is_error
    assert ((root / nfd).read_text(), (root / nfc).read_text()) == ("one", "mine")


async def test_a_file_of_five_megabytes_can_be_edited(open_box: OpenBox, root: Path) -> None:
    line = "x" * 99 + "\n"
    (root / "big.txt").write_text(line * 50_000 + "needle\n")
    async with open_box() as box:
        outcome = await box.run("edit_file", path="big.txt", old_text="needle", new_text="found")
    assert outcome.text == "Edited big.txt in 1 place, at line 50001."


async def test_images_are_returned_as_images_and_utf_16_as_text(open_box: OpenBox, root: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
    (root / "a.png").write_bytes(png)
    (root / "a.pdf").write_bytes(b"%PDF-1.7\n\0")
    (root / "large.pdf").write_bytes(b"%PDF-1.7" + bytes(10_000_000))
    (root / "large.jpg").write_bytes(b"\xff\xd8\xff" + bytes(3_000_000))
    (root / "wide.txt").write_bytes("déjà\nvu".encode("utf-16"))
    (root / "wider.txt").write_bytes("déjà".encode("utf-32"))
    (root / "half.txt").write_bytes("x".encode("utf-16") + b"!")
    async with open_box() as box:
        picture = await box.run("read_file", path="a.png")
        pdf = await box.run("read_file", path="a.pdf")
        names = ("large.jpg", "wide.txt", "wider.txt", "large.pdf")
        said = {name: (await box.run("read_file", path=name)).text for name in names}
        assert (await box.run("read_file", path="half.txt")).is_error
    assert picture == Outcome(
        text="a.png is an image (image/png, 16 bytes).",
        images=(Image(data=base64.b64encode(png).decode(), mime_type="image/png"),),
    )
    data = base64.b64encode(b"%PDF-1.7\n\0").decode()
    assert pdf == Outcome(
        text="a.pdf is a PDF (10 bytes).",
        attachments=(Attachment(name="a.pdf", mime_type="application/pdf", data=data, for_model=True),),
    )
    assert said == {
        "large.pdf": "read_file: large.pdf is a PDF of 10,000,008 bytes; at most 10,000,000 bytes can be read. A "
        "program such as pdftotext may give its text",
        "large.jpg": "read_file: large.jpg is an image of 3,000,003 bytes; at most 3,000,000 bytes can be shown",
        "wide.txt": "déjà\nvu\n[the file is utf-16-le; the tools keep this encoding]",
        "wider.txt": "déjà\n[the file is utf-32-le; the tools keep this encoding]",
    }


async def test_a_call_touches_only_the_file_that_was_allowed(open_box: OpenBox, root: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    (root / "a.txt").write_text("mine\n")
    calls = [
        ("read_file", {"path": "a.txt"}),
        ("write_file", {"path": "a.txt", "content": "changed\n"}),
        ("edit_file", {"path": "a.txt", "old_text": "secret", "new_text": "changed"}),
        ("grep", {"path": "a.txt", "pattern": "s"}),
        ("list_files", {"path": "a.txt"}),
    ]
    async with open_box() as box:
        offers = [await box.plan(name, **arguments) for name, arguments in calls]
        (root / "a.txt").unlink()
        (root / "a.txt").symlink_to(tmp_path / "key")
        for (name, arguments), offer in zip(calls, offers, strict=True):
            outcome = await box.toolbox.run(call(name, **arguments), "call_1_0", box.show, planned=offer)
            words = f"a.txt now leads to {tmp_path}/key, which was not allowed; repeat the call to use it"
            assert outcome == Outcome(text=f"{name}: {words}", is_error=True)
        fifo = root / "pipe"
        os.mkfifo(fifo)
        for path in (fifo, root / "a.txt", root):  # what may be put there between planning and opening
            with pytest.raises(OSError, match=r"Not a regular file|symbolic link|now leads elsewhere"):
                await box.workspace.read_bytes(path)
    assert (tmp_path / "key").read_text() == "secret\n"


CHANGED = "a.txt has changed since you read it; read it again first. It changed here:\n2\ttwo\n3\tthree"
REPLACED = "a.txt has changed since you read it; read it again first. It changed here:\n1\tother"


async def test_a_file_changed_by_others_must_be_read_again_before_a_write(open_box: OpenBox, root: Path) -> None:
    path = root / "a.txt"
    path.write_text("one\ntwo\n")
    async with open_box() as box:
        await box.run("read_file", path="a.txt")
        path.write_text("one\ntwo\nthree\n")
        edit = {"path": "a.txt", "old_text": "two", "new_text": "2"}
        refused = f"edit_file: {CHANGED}".replace("again first", "again first, or edit these lines as they are now")
        assert (await box.plan("edit_file", **edit)).fault == refused
        assert (await box.run("edit_file", **edit)).text == refused
        assert (await box.plan("write_file", path="a.txt", content="x")).fault == f"write_file: {CHANGED}"
        assert (await box.run("write_file", path="a.txt", content="x")).text == f"write_file: {CHANGED}"
        assert path.read_text() == "one\ntwo\nthree\n"
        await box.run("read_file", path="a.txt")
        assert not (await box.run("edit_file", **edit)).is_error
        assert not (await box.run("edit_file", path="a.txt", old_text="three", new_text="3")).is_error  # its own change
        path.write_text("other\n")
        assert (await box.run("write_file", path="a.txt", content="x")).text == f"write_file: {REPLACED}"


async def test_an_edit_away_from_what_others_changed_is_made_and_says_so(open_box: OpenBox, root: Path) -> None:
    path = root / "a.txt"
    path.write_text("one\ntwo\nthree\nfour\nfive\n")
    async with open_box() as box:
        await box.run("read_file", path="a.txt")
        path.write_text("one\ntwo\nthree\nfour\n5\n")
        edited = await box.run("edit_file", path="a.txt", old_text="one", new_text="1")
    assert edited.text.startswith("Edited a.txt in 1 place, at line 1 (others changed line 5 since you read it).")
    assert path.read_text() == "1\ntwo\nthree\nfour\n5\n"


async def test_files_in_other_encodings_are_read_and_edited_without_loss(open_box: OpenBox, root: Path) -> None:
    texts = {
        "latin-1": "prix: 3 francs\nété déjà passé\n",
        "cp1252": "price: 3 €\nan “old” price\n",
        "cp932": "# 設定ファイル\nname = これは名前です\n",
        "euc_jp": "# 設定ファイル\nname = これは名前です\n",
        "utf-16": "name = Ä\r\nother = ö\r\n",
    }
    async with open_box() as box:
        for encoding, text in texts.items():
            path = root / f"{encoding}.txt"
            path.write_bytes(text.encode(encoding))
            shown = (await box.run("read_file", path=path.name)).text
            assert text.splitlines()[1] in shown
            first, changed = text.splitlines()[1], text.splitlines()[1] + "!"
            outcome = await box.run("edit_file", path=path.name, old_text=first, new_text=changed)
            assert not outcome.is_error, outcome.text
            assert path.read_bytes() == text.replace(first, changed).encode(encoding)
            assert box.log.changes[-1][2] == text.encode(encoding)
        refused = await box.run("edit_file", path="latin-1.txt", old_text="prix", new_text="прайс")
    assert refused.text == (
        "edit_file: new_text has 'п' (U+043F), but the encoding of the file, latin-1, does not have this character; "
        "write it in another way"
    )


async def test_stray_bytes_in_a_file_survive_an_edit(open_box: OpenBox, root: Path) -> None:
    data = "déjà vu ✓\n".encode() + b"stray \xff byte\nlast\n"
    (root / "a.txt").write_bytes(data)
    async with open_box() as box:
        assert "stray � byte" in (await box.run("read_file", path="a.txt")).text
        outcome = await box.run("edit_file", path="a.txt", old_text="last", new_text="final")
    assert not outcome.is_error
    assert outcome.announcement is not None
    assert outcome.announcement.diffs[0].new_text == "déjà vu ✓\nstray � byte\nfinal\n"
    assert (root / "a.txt").read_bytes() == data.replace(b"last", b"final")


async def test_stray_bytes_are_not_overwritten_with_the_character_that_stands_for_them(
    open_box: OpenBox, root: Path
) -> None:
    (root / "a.txt").write_bytes("ä\nx \xe9 y\n".encode("latin-1").replace(b"\xe4", "ä".encode()))
    async with open_box() as box:
        shown = (await box.run("read_file", path="a.txt")).text
        refused = await box.run("write_file", path="a.txt", content="ä\nz � y\n")
        other = await box.run("write_file", path="a.txt", content="ä\nz e y\n")
    assert shown == "ä\nx � y\n[bytes that are not UTF-8 are shown as �]"
    assert refused == Outcome(
        text="write_file: content contains �, which stands for bytes of the file that are not UTF-8; writing it would "
        "destroy them. Use edit_file to change other lines only",
        is_error=True,
    )
    assert not other.is_error
    assert (root / "a.txt").read_text("utf-8") == "ä\nz e y\n"


async def test_a_tilde_is_the_home_directory_and_a_file_url_a_path(
    open_box: OpenBox, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    async with open_box() as box:
        planned = await box.plan("write_file", path="~/notes.txt", content="one\n")
        done = await box.run("write_file", path="~/notes.txt", content="one\n")
        linked = await box.run("read_file", path=f"file://{tmp_path}/home/n%6Ftes.txt")
        (root / "~").mkdir()
        local = await box.run("write_file", path="~/notes.txt", content="two\n")
    assert planned.touched.is_outside
    assert done.text == f"Created {tmp_path}/home/notes.txt: 1 line, 4 bytes."
    assert (tmp_path / "home" / "notes.txt").read_text() == "one\n"
    assert linked.text == "one"
    assert local.text == "Created ~/notes.txt: 1 line, 4 bytes."
    assert (root / "~" / "notes.txt").read_text() == "two\n"


async def test_a_change_that_breaks_the_syntax_says_so_once(open_box: OpenBox, root: Path) -> None:
    (root / "a.py").write_text("def f():\n    return (1)\n")
    (root / "a.json").write_text('{"a": 1}\n')
    (root / "broken.toml").write_text("a = = 1\n")
    async with open_box() as box:
        edits = (("a.py", "(1)", "(1"), ("a.json", "1", "1,"), ("broken.toml", "1", "2"), ("a.py", "(1", "(2"))
        said = [(await box.run("edit_file", path=path, old_text=old, new_text=new)).text for path, old, new in edits]
        new = (await box.run("write_file", path="b.yaml", content="a: [1\nb: 2\n")).text
        template = (await box.run("write_file", path="c.yaml", content="a: {{ .Values.a }}\n{{- if b }}\n")).text
    language = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert f"With this change, it no longer parses as {language}: '(' was never closed, line 2." in said[0]
    assert "With this change, it no longer parses as JSON: " in said[1]
    assert [text for text in (*said[2:], template) if "parse" in text] == []
    assert "It does not parse as YAML: " in new


async def test_a_long_file_is_not_replaced_unread_and_a_short_one_is_shown(open_box: OpenBox, root: Path) -> None:
    (root / "long.txt").write_text("line\n" * 100)
    (root / "short.txt").write_text("one\ntwo\n")
    async with open_box() as box:
        refused = await box.run("write_file", path="long.txt", content="new\n")
        await box.run("read_file", path="long.txt")
        allowed = await box.run("write_file", path="long.txt", content="new\n")
        replaced = await box.run("write_file", path="short.txt", content="new\n")
    assert refused.text == (
        "write_file: long.txt exists and has 100 lines, which you have not read or no longer see; read it first, or "
        "change a part of it with edit_file"
    )
    assert allowed.text == "Replaced long.txt: 1 line, 4 bytes."
    assert replaced.text == (
        "Replaced short.txt: 1 line, 4 bytes. You had not read this file. It contained:\n1\tone\n2\ttwo\n"
    )


async def test_a_file_that_was_read_in_part_is_replaced_only_when_the_rest_was_read(
    open_box: OpenBox, root: Path
) -> None:
    (root / "long.txt").write_text("".join(f"{number}\n" for number in range(1, 201)))
    (root / "short.txt").write_text("one\ntwo\n")
    async with open_box() as box:
        await box.run("read_file", path="long.txt", line=11, limit=20)
        await box.run("read_file", path="long.txt", line=101)
        planned = await box.plan("write_file", path="long.txt", content="new\n")
        refused = await box.run("write_file", path="long.txt", content="new\n")
        await box.run("read_file", path="long.txt", line=31, limit=70)
        await box.run("edit_file", path="long.txt", old_text="150\n", new_text="151\n151\n")
        still = await box.run("write_file", path="long.txt", content="new\n")
        await box.run("read_file", path="long.txt", limit=10)
        allowed = await box.run("write_file", path="long.txt", content="new\n")
        await box.run("read_file", path="short.txt", limit=1)
        short = await box.run("write_file", path="short.txt", content="new\n")
    words = (
        "write_file: long.txt exists and has {count} lines, but you have not read, or no longer see, {gaps}; read "
        "these lines first, or change a part of it with edit_file"
    )
    assert planned.fault == refused.text == words.format(count=200, gaps="lines 1-10, lines 31-100")
    assert still.text == words.format(count=201, gaps="lines 1-10")
    assert allowed.text == "Replaced long.txt: 1 line, 4 bytes."
    assert short.text == (
        "Replaced short.txt: 1 line, 4 bytes. You had not read all of this file. It contained:\n1\tone\n2\ttwo\n"
    )


async def test_lines_that_the_model_was_not_shown_whole_or_no_longer_sees_do_not_count_as_read(
    open_box: OpenBox, root: Path
) -> None:
    (root / "wide.txt").write_text("short\n" * 40 + "x" * 3000 + "\n" + "short\n" * 40)
    (root / "hidden.txt").write_text("line\n" * 100)
    (root / "own.txt").write_text("line\n")
    async with open_box() as box:
        await box.run("read_file", path="wide.txt")
        wide = await box.run("write_file", path="wide.txt", content="new\n")
        await box.run("read_file", path="hidden.txt")
        await box.run("write_file", path="own.txt", content="line\n" * 100)
        box.log.out_of_context = {CallPart("call_7_0", "result")}
        hidden = await box.run("write_file", path="hidden.txt", content="new\n")
        edited = await box.run("edit_file", path="hidden.txt", old_text="line\n" * 100, new_text="one\n" * 99)
        own = await box.run("write_file", path="own.txt", content="new\n")
    assert "no longer see, line 41; read these lines first (but lines of more than 2,000 characters are" in wide.text
    assert "has 100 lines, which you have not read or no longer see; read it first" in hidden.text
    assert not edited.is_error
    assert own.text == "Replaced own.txt: 1 line, 4 bytes."


async def test_lines_between_the_places_of_an_edit_and_lines_that_others_changed_stay_unread(
    open_box: OpenBox, root: Path
) -> None:
    (root / "a.txt").write_text("".join(f"{number}\n" for number in range(1, 101)))
    (root / "b.txt").write_text("".join(f"{number}\n" for number in range(1, 101)))
    async with open_box() as box:
        await box.run("read_file", path="a.txt", limit=10)
        await box.run("read_file", path="a.txt", line=92)
        patch = "*** Begin Patch\n*** Update File: a.txt\n@@\n-20\n+twenty\n@@\n-80\n+eighty\n*** End Patch\n"
        await box.run("apply_patch", input=patch)
        between = await box.run("write_file", path="a.txt", content="new\n")
        await box.run("read_file", path="b.txt")
        (root / "b.txt").write_text((root / "b.txt").read_text().replace("50\n", "fifty\n50\n"))
        await box.run("read_file", path="b.txt", limit=10)
        foreign = await box.run("write_file", path="b.txt", content="new\n")
    assert "no longer see, lines 11-91; read these lines" in between.text
    assert "no longer see, line 50; read these lines" in foreign.text


@pytest.mark.parametrize("stub", ["# ... existing code ...", "    // ... rest of the function ...", "/* ... */"])
async def test_text_that_stands_for_code_is_not_written(open_box: OpenBox, root: Path, stub: str) -> None:
    (root / "a.py").write_text("one()\ntwo()\n")
    async with open_box() as box:
        edited = await box.run("edit_file", path="a.py", old_text="one()", new_text=f"zero()\n{stub}\n")
        written = await box.run("write_file", path="a.py", content=f"zero()\n{stub}\n")
    assert edited.text == (
        f"edit_file: `{stub.strip()}` in new_text stands for code that would be lost; write out the whole new_text"
    )
    assert written.text.startswith(f"write_file: `{stub.strip()}` stands for code of a.py that would be lost")
    assert (root / "a.py").read_text() == "one()\ntwo()\n"


async def test_a_file_never_read_can_be_edited_and_a_removed_one_written_again(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_text("one\n")
    async with open_box() as box:
        assert not (await box.run("edit_file", path="a.txt", old_text="one", new_text="1")).is_error
        (root / "a.txt").unlink()
        assert (await box.plan("write_file", path="a.txt", content="x")).fault is None
        assert not (await box.run("write_file", path="a.txt", content="x")).is_error


async def test_a_write_through_a_hard_link_to_a_protected_file_is_protected(open_box: OpenBox, root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("[core]\n")
    (root / "notes.txt").hardlink_to(root / ".git" / "config")
    (root / "one.txt").write_text("x\n")
    (root / "two.txt").hardlink_to(root / "one.txt")
    async with open_box() as box:
        planned = [
            await box.plan("write_file", path="notes.txt", content="x"),
            await box.plan("edit_file", path="notes.txt", old_text="core", new_text="x"),
            await box.plan("write_file", path="two.txt", content="y"),
        ]
    assert [call.touched.is_protected for call in planned] == [True, True, False]


async def test_the_plan_of_a_change_to_a_key_or_crows_own_file_tells_the_model_nothing(
    open_box: OpenBox, root: Path
) -> None:
    (root / ".ssh").mkdir()
    (root / ".ssh" / "config").write_text("Host nest\n")
    async with open_box() as box:
        planned = await box.plan("edit_file", path=".ssh/config", old_text="no such text", new_text="x")
    assert (planned.fault, planned.touched.is_protected) == (None, True)

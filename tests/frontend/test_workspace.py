"""A workspace whose files are open in an editor."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.frontend.workspace import ClientEditor, EditorRequests, SharedWorkspace
from crow.protocol.frames import RequestError
from crow.tools.builtin.text_file import read_text_file
from crow.tools.workspace import DiskWorkspace


class Editor:
    """Answers reads and writes, and records the requests."""

    def __init__(
        self,
        read: Callable[[Path], Any] | None = None,
        write: Callable[[Path, str], Any] | None = None,
    ) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._read, self._write = read, write

    async def ask(self, method: str, params: dict[str, Any]) -> Any:
        self.asked.append((method, params))
        path = Path(params["path"])
        if method == "fs/read_text_file" and self._read is not None:
            return {"content": self._read(path)}
        if method == "fs/write_text_file" and self._write is not None:
            done = self._write(path, params["content"])
            return await done if isinstance(done, Awaitable) else done
        raise RequestError(-32601, "Method not found", {"method": method})

    def methods(self) -> list[str]:
        return [method for method, _ in self.asked]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def workspace(
    cwd: Path, editor: Editor, *, reads: bool = True, writes: bool = True, answer_s: float = 30
) -> SharedWorkspace:
    requests = EditorRequests("s", editor.ask, answer_s=answer_s, silence_s=0.001)
    shared = SharedWorkspace(DiskWorkspace(cwd))
    shared.use(ClientEditor(shared.disk, requests, reads=reads, writes=writes))
    return shared


async def test_the_unsaved_buffer_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved")
    editor = Editor(read=lambda path: f"unsaved {path.name}")
    assert await workspace(tmp_path, editor).read_text(tmp_path / "a") == "unsaved a"
    assert editor.asked == [("fs/read_text_file", {"sessionId": "s", "path": str(tmp_path / "a")})]


async def test_an_unsaved_text_with_a_replacement_character_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved \ufffd")
    file = await read_text_file(workspace(tmp_path, Editor(read=lambda _: "unsaved \ufffd")), tmp_path / "a")
    assert file is not None
    assert file.text == "unsaved \ufffd"


async def test_a_file_that_is_not_on_disk_is_not_found(tmp_path: Path) -> None:
    editor = Editor(read=lambda _: "")
    with pytest.raises(FileNotFoundError):
        await workspace(tmp_path, editor).read_text(tmp_path / "a")
    assert editor.asked == []


async def test_line_endings_and_byte_order_mark_are_kept_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffone\r\ntwo\r\n".encode())
    editor = Editor(read=lambda _: "one\nTWO\n")
    assert await workspace(tmp_path, editor).read_text(tmp_path / "a") == "\ufeffone\r\nTWO\r\n"


@pytest.mark.parametrize(
    ("saved", "buffer", "read"),
    [
        ("one\ntwo\n", "one\ntwo", "one\ntwo\n"),
        ("one\r\ntwo\r\n", "one\nTWO", "one\r\nTWO\r\n"),
        ("one\r\ntwo\r\n", "one\r\ntwo", "one\r\ntwo\r\n"),
        ("one\ntwo", "one\nTWO", "one\nTWO"),
    ],
)
async def test_the_last_line_ends_as_on_disk(tmp_path: Path, saved: str, buffer: str, read: str) -> None:
    (tmp_path / "a").write_bytes(saved.encode())
    assert await workspace(tmp_path, Editor(read=lambda _: buffer)).read_text(tmp_path / "a") == read


@pytest.mark.parametrize(
    "read",
    [
        lambda _: "",
        lambda _: None,
        raising(RequestError(-32002, "Resource not found")),
        raising(RequestError(-32603, "Internal error")),
        raising(ConnectionError("closed")),
        None,
    ],
)
async def test_the_disk_is_read_when_the_editor_has_no_useful_answer(tmp_path: Path, read: Any) -> None:
    (tmp_path / "a").write_text("saved")
    assert await workspace(tmp_path, Editor(read=read)).read_text(tmp_path / "a") == "saved"


async def test_a_refused_read_is_a_permission_error_with_the_editors_message(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved")
    details = {"details": "Permission denied for fs/read_text_file"}
    editor = Editor(read=raising(RequestError(-32603, "Internal error", details)))
    with pytest.raises(PermissionError, match="Permission denied for fs/read_text_file"):
        await workspace(tmp_path, editor).read_text(tmp_path / "a")


async def test_an_editor_that_does_not_answer_a_read_is_not_asked_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved")
    asked: list[str] = []

    async def silent(method: str, params: dict[str, Any]) -> Any:
        asked.append(method)
        await anyio.sleep_forever()

    slow = ClientEditor(DiskWorkspace(tmp_path), EditorRequests("s", silent, answer_s=0.01), reads=True)
    assert await slow.read_text(tmp_path / "a") == "saved"
    assert await slow.read_text(tmp_path / "a") == "saved"
    assert asked == ["fs/read_text_file"]


async def test_a_write_goes_through_the_editor_and_returns_the_formatted_text(tmp_path: Path) -> None:
    def save_formatted(path: Path, text: str) -> None:
        path.write_text(text.upper())

    path = tmp_path / "new" / "deep" / "a"
    editor = Editor(write=save_formatted, read=lambda path: path.read_text())
    assert await workspace(tmp_path, editor).write_text(path, "text") == "TEXT"
    assert editor.asked[0] == ("fs/write_text_file", {"sessionId": "s", "path": str(path), "content": "text"})


async def test_an_unsaved_buffer_counts_as_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    editor = Editor(write=lambda *_: None, read=lambda _: "new, formatted")
    assert await workspace(tmp_path, editor).write_text(tmp_path / "a", "new") == "new, formatted"
    editor = Editor(write=lambda *_: None, read=lambda _: "new, unsaved")
    assert await workspace(tmp_path, editor).write_text(tmp_path / "b", "new") == "new, unsaved"
    assert sorted(os.listdir(tmp_path)) == ["a"]


async def test_an_editor_that_adds_a_final_newline_adds_no_empty_line(tmp_path: Path) -> None:
    def save_lines(path: Path, text: str) -> None:
        path.write_text("".join(f"{line}\n" for line in text.split("\n")))

    place = workspace(tmp_path, Editor(write=save_lines, read=lambda path: path.read_text()))
    assert await place.write_text(tmp_path / "a", "one\ntwo\n") == "one\ntwo\n"
    assert (tmp_path / "a").read_text() == "one\ntwo\n"
    assert await place.write_text(tmp_path / "b", "one") == "one\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("new", None),
        ("new", lambda _: ""),
        ("new", raising(RequestError(-32002, "Resource not found"))),
        ("old", None),
        ("old", lambda _: "old text"),
    ],
)
async def test_text_that_the_editor_did_not_write_is_written_to_the_disk(tmp_path: Path, name: str, read: Any) -> None:
    (tmp_path / "old").write_text("old text")
    editor = Editor(write=lambda *_: None, read=read)
    assert await workspace(tmp_path, editor).write_text(tmp_path / name, "text") == "text"
    assert (tmp_path / name).read_text() == "text"


async def test_a_change_that_formatting_reverted_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def save_formatted(path: Path, _: str) -> None:
        path.write_text("old")
        os.utime(path, ns=(1, 1))

    editor = Editor(write=save_formatted, read=lambda path: path.read_text())
    assert await workspace(tmp_path, editor).write_text(tmp_path / "a", " old") == "old"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RequestError(-32603, "Internal error", {"details": "Permission denied for fs/write_text_file"}),
            "denied for fs",
        ),
        (RequestError(-32603, "Internal error", {"error": "read-only buffer"}), "read-only buffer"),
        (RequestError(-32603, "Internal error", "disk full"), "disk full"),
        (RequestError(-32602, "invalid path"), "invalid path"),
        (RequestError(-32601, "Method not found", {"method": "fs/write_text_file"}), "Method not found"),
    ],
)
async def test_a_failed_write_is_not_repeated_on_the_disk(tmp_path: Path, error: Exception, words: str) -> None:
    path = tmp_path / "new" / "deep" / "a"
    with pytest.raises(PermissionError, match=words):
        await workspace(tmp_path, Editor(write=raising(error))).write_text(path, "text")
    assert os.listdir(tmp_path) == []


async def test_the_disk_is_written_if_the_editor_is_gone(tmp_path: Path) -> None:
    gone = workspace(tmp_path, Editor(write=raising(ConnectionError("closed"))))
    assert await gone.write_text(tmp_path / "a", "text") == "text"
    await gone.restore(tmp_path / "b", b"other", mode=0o640)
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("text", "other")
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o640


async def test_a_write_without_an_answer_is_a_timeout_error(tmp_path: Path) -> None:
    editor = Editor(write=lambda *_: anyio.sleep_forever())
    with pytest.raises(TimeoutError, match="the file may or may not have been written"):
        await workspace(tmp_path, editor, answer_s=0.01).write_text(tmp_path / "a", "text")


async def test_a_write_that_is_on_disk_needs_no_answer(tmp_path: Path) -> None:
    def save_and_fail(path: Path, text: str) -> Awaitable[None]:
        path.write_text(text)
        return anyio.sleep_forever()

    path = tmp_path / "new" / "a"
    assert await workspace(tmp_path, Editor(write=save_and_fail)).write_text(path, "text") == "text"
    assert path.read_text() == "text"


async def test_a_string_as_the_answer_to_a_write_is_a_refusal(tmp_path: Path) -> None:
    editor = Editor(write=lambda path, _: f"Failed to write file: {path.name}")
    with pytest.raises(PermissionError, match=r"The editor did not write .*new/a: Failed to write file: a"):
        await workspace(tmp_path, editor).write_text(tmp_path / "new" / "a", "text")
    assert os.listdir(tmp_path) == []


async def test_without_the_capability_the_editor_is_not_asked(tmp_path: Path) -> None:
    editor = Editor(read=lambda _: "unsaved", write=lambda *_: None)
    reads = workspace(tmp_path, editor, writes=False)
    assert await reads.write_text(tmp_path / "a", "text") == "text"
    assert (tmp_path / "a").read_text() == "text"
    writes = workspace(tmp_path, editor, reads=False)
    assert await writes.read_text(tmp_path / "a") == "text"
    assert editor.methods() == []


async def test_everything_else_is_left_to_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    both = workspace(tmp_path, Editor())
    assert (both.cwd, both.resolve("a"), both.contains(tmp_path / "a")) == (tmp_path, tmp_path / "a", True)
    assert await both.stat(tmp_path / "a") == await DiskWorkspace(tmp_path).stat(tmp_path / "a")
    assert await both.read_bytes(tmp_path / "a", 2) == b"te"

    async def ignore(_: str) -> None: ...

    assert await both.run("echo out", access="full", timeout_s=60, on_output=ignore) == (0, "out\n")
    await both.reap()


async def test_text_that_is_too_large_for_a_line_goes_to_the_disk(tmp_path: Path) -> None:
    editor = Editor(write=lambda path, text: path.write_text(text) and None)
    place = workspace(tmp_path, editor)
    assert await place.write_text(tmp_path / "small", "x" * 1000) == "x" * 1000
    assert await place.write_text(tmp_path / "large", "x" * 2_000_000) == "x" * 2_000_000
    assert [params["path"] for _, params in editor.asked] == [str(tmp_path / "small")]

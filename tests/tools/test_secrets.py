"""Keys of endpoints in results of tools: the model, the editor and the database get a mask instead."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import anyio
import pytest

from crow.domain.rendering import RESULT_MASK
from crow.tools.mcp.masking import masked_output
from crow.tools.process import HiddenKeys
from crow.tools.servers import StdioServer
from crow.tools.truncate import END_OF_MARKER
from tests.tools.conftest import OpenBox, stdio

KEY = "sk-nest-0123456789"
KEYS = HiddenKeys(values=(KEY, "short", "not-needed"), others=("token-of-a-server",))


async def test_results_of_every_tool_show_a_mask(open_box: OpenBox, root: Path) -> None:
    (root / ".env").write_text(f"KEY={KEY}\nSHORT=short not-needed\n")
    encoded = base64.b64encode(f"user:{KEY}\n".encode()).decode()
    async with open_box(stdio("tiny.py"), keys=lambda: KEYS) as box:
        texts = [
            (await box.run("read_file", path=".env")).text,
            (await box.run("grep", pattern="KEY")).text,
            (await box.run("shell", command=f"cat .env; printf '{encoded[:12]}'; printf '{encoded[12:]}'")).text,
            (await box.run("srv__echo", text=f"{KEY} token-of-a-server")).text,
        ]
        faults = [(await box.plan("shell_output", job=KEY)).fault or ""]
        text = (await box.run("shell", command="cat .env; exit 3")).text
    assert texts[0] == f"KEY={RESULT_MASK}\nSHORT=short not-needed"
    assert texts[1] == f".env:1: KEY={RESULT_MASK}"
    assert texts[3] == f"you said {RESULT_MASK} {RESULT_MASK}"
    assert text == f"KEY={RESULT_MASK}\nSHORT=short not-needed\n[exit code 3]"
    for shown in (*texts, *faults):
        assert KEY not in shown
        assert RESULT_MASK in shown
    assert base64.b64encode(KEY.encode()).decode().rstrip("=")[3:-3] not in texts[2]


@pytest.mark.parametrize("size", range(1, len(KEY)))
async def test_a_key_in_two_pieces_of_output_is_not_shown(open_box: OpenBox, root: Path, size: int) -> None:
    """The command goes on when the first piece was shown."""
    program = (
        f"import os, sys; sys.stdout.write('x {KEY[:size]}'); sys.stdout.flush(); "
        f"open('go').close(); print({KEY[size:]!r}, end='', flush=True); open('end').close()"
    )
    for name in ("go", "end"):
        (root / name).unlink(missing_ok=True)
        await anyio.run_process(["mkfifo", str(root / name)])
    (root / "p.py").write_text(program)
    async with open_box(keys=lambda: KEYS) as box, anyio.create_task_group() as tasks:

        async def go_on(text: str) -> None:
            box.shown.append(text)
            name = "go" if len(box.shown) == 1 else "end"
            tasks.start_soon(anyio.Path(root / name).write_text, "")

        box.show = go_on  # type: ignore[method-assign]
        outcome = await box.run("shell", command=f"{sys.executable} -I -S p.py")
    assert outcome.text == f"x {RESULT_MASK}"
    assert box.shown == [f"x {KEY[:size] if size < 4 else ''}", f"x {RESULT_MASK}"]


async def test_a_key_in_two_readings_of_a_background_command_is_not_shown(open_box: OpenBox, root: Path) -> None:
    await anyio.run_process(["mkfifo", str(root / "go")])
    line = f"printf 'x {KEY[:9]}'; read _ <go; echo '{KEY[9:]} y'"
    async with open_box(keys=lambda: KEYS) as box:
        first = (await box.run("shell", command=line, background=True)).text
        await anyio.Path(root / "go").write_text("\n")
        second = (await box.run("shell_output", job="job1", wait_s=60)).text
    assert first.startswith("x \n[job1: running")
    assert second == f"{RESULT_MASK} y\n[job1: ended with exit code 0]"


async def test_a_key_that_was_cut_at_the_beginning_is_not_shown(
    open_box: OpenBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.workspace.SHOWN_CHARS", 20)
    await anyio.run_process(["mkfifo", str(root / "end")])
    async with open_box(keys=lambda: KEYS) as box, anyio.create_task_group() as tasks:

        async def go_on(text: str) -> None:
            box.shown.append(text)
            tasks.start_soon(anyio.Path(root / "end").write_text, "\n")

        box.show = go_on  # type: ignore[method-assign]
        await box.run("shell", command=f"printf '{KEY} 0123456789'; read _ <end")
    assert box.shown == [f"[... 9 characters before this ...]\n{RESULT_MASK} 0123456789"]


@pytest.mark.parametrize("end", [" x", END_OF_MARKER])
def test_output_that_begins_like_the_mark_of_cut_output_is_masked(end: str) -> None:
    assert masked_output(f"[... {KEY}{end}", KEYS.mask) == f"[... {RESULT_MASK}{end}"


async def test_diffs_show_a_mask_and_files_keep_their_keys(open_box: OpenBox, root: Path) -> None:
    file = root / ".env"
    file.write_text(f"KEY={KEY}\nPORT=1\n")
    async with open_box(keys=lambda: KEYS) as box:
        edit = {"path": ".env", "old_text": "PORT=1", "new_text": "PORT=2"}
        plan, outcome = await box.plan("edit_file", **edit), await box.run("edit_file", **edit)
    assert outcome.announcement is not None
    (planned,), (done,) = plan.announcement.diffs, outcome.announcement.diffs
    assert planned == done
    assert (done.old_text, done.new_text) == (f"KEY={RESULT_MASK}\nPORT=1\n", f"KEY={RESULT_MASK}\nPORT=2\n")
    assert file.read_text() == f"KEY={KEY}\nPORT=2\n"


UNSEEN = f"contains {RESULT_MASK}, which stands for a secret that you cannot see"
DESTROYED = "writing this mask would destroy the secret. Use edit_file to change other lines only"


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        (
            "edit_file",
            {"old_text": f"KEY={RESULT_MASK}\nPORT=1", "new_text": "PORT=2"},
            f"edit_file: old_text {UNSEEN}; choose an old_text without it",
        ),
        (
            "edit_file",
            {"old_text": "PORT=1", "new_text": f"OTHER={RESULT_MASK}"},
            f"edit_file: new_text {UNSEEN}; {DESTROYED}",
        ),
        ("write_file", {"content": f"KEY={RESULT_MASK}\nPORT=2\n"}, f"write_file: content {UNSEEN}; {DESTROYED}"),
    ],
)
async def test_no_tool_writes_the_mask_into_a_file(
    open_box: OpenBox, root: Path, tool: str, arguments: dict[str, str], words: str
) -> None:
    file = root / ".env"
    file.write_text(f"KEY={KEY}\nPORT=1\n")
    async with open_box(keys=lambda: KEYS) as box:
        assert (await box.plan(tool, path=".env", **arguments)).fault == words
        outcome = await box.run(tool, path=".env", **arguments)
    assert (outcome.text, outcome.is_error) == (words, True)
    assert file.read_text() == f"KEY={KEY}\nPORT=1\n"


async def test_the_reason_why_a_server_failed_shows_a_mask(open_box: OpenBox) -> None:
    program = f"import sys; print('bad token {KEY}', file=sys.stderr); sys.exit(3)"
    server = StdioServer(name="srv", command=sys.executable, args=("-I", "-S", "-c", program))
    async with open_box(server, keys=lambda: KEYS) as box:
        await box.toolbox.wait_ready(60)
        (status,) = box.toolbox.servers()
    assert status.detail == f'it ended with exit code 3; it last said "bad token {RESULT_MASK}"'


async def test_a_file_that_contains_the_text_of_the_mask_can_be_edited(open_box: OpenBox, root: Path) -> None:
    (root / "a.md").write_text(f"Crow writes {RESULT_MASK} instead.\n")
    async with open_box(keys=lambda: KEYS) as box:
        edit = {"old_text": f"writes {RESULT_MASK}", "new_text": f"shows {RESULT_MASK}"}
        assert (await box.run("edit_file", path="a.md", **edit)).is_error is False
    assert (root / "a.md").read_text() == f"Crow shows {RESULT_MASK} instead.\n"

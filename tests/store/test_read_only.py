"""Sessions of a database that cannot be written can be listed, shown and exported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import begin, converse, make_older, new_session
from tests.support.fork_server import run_script

KILLED = """
import asyncio, os, sys
from pathlib import Path
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse

async def main(path):
    store = await SqliteStore.open(path)
    await converse(store, "s1", "newest")
    os._exit(0)

asyncio.run(main(Path(sys.argv[1])))
"""


async def made(home: Path) -> Path:
    """A database with a turn that a dead process has left open; its path."""
    path = home / "crow.db"
    store = await SqliteStore.open(path, owner="nobody")
    await store.create_session(new_session())
    await converse(store, "s1", "newest")
    await begin(store, "s1", "and then")
    await store.close()
    return path


def kill_in_the_middle(path: Path, *, keeps_index: bool = True) -> None:
    """A process writes and dies: what it wrote is in the write-ahead log alone."""
    run_script(KILLED, str(path))
    assert Path(f"{path}-wal").stat().st_size
    if not keeps_index:
        Path(f"{path}-shm").unlink()


@contextmanager
def read_only(home: Path, *, files: int, directory: int) -> Iterator[None]:
    """The modes that the files and the directory have in the block."""
    for file in home.iterdir():
        file.chmod(files)
    home.chmod(directory)
    try:
        yield
    finally:
        home.chmod(0o700)


RUN = """
import ctypes
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from crow.cli import main

ran = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["sessions", *arguments])
    ran.append((code, out.buffer.getvalue().decode(), err.getvalue()))
print(json.dumps(ran))
"""
"""Gives up the privileges of root, which ignores file modes, and runs commands."""


def crow(home: Path, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of several `crow sessions ...`, without the privileges of root."""
    done = run_script(RUN, json.dumps(commands), env={"CROW_HOME": str(home), "PATH": os.environ["PATH"]})
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def content(home: Path) -> dict[str, bytes]:
    """What the files hold, but for the log's index, which readers may write to."""
    return {file.name: file.read_bytes() for file in home.iterdir() if not file.name.endswith("-shm")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("state", "files", "directory"),
    [
        *(("closed", files, directory) for files, directory in ((0o600, 0o500), (0o400, 0o500), (0o400, 0o700))),
        ("killed", 0o600, 0o500),
        ("killed", 0o400, 0o500),
        ("killed, without the log's index", 0o600, 0o500),
        ("killed, without the log's index", 0o400, 0o700),
        ("of an older version", 0o400, 0o500),
        ("being written", 0o600, 0o500),
        ("being written", 0o400, 0o700),
    ],
)
async def test_sessions_of_a_read_only_database_can_be_listed_shown_and_exported(
    tmp_path: Path, state: str, files: int, directory: int
) -> None:
    path = await made(tmp_path / "home")
    home, other = path.parent, None
    match state:
        case "killed":
            kill_in_the_middle(path)
        case "killed, without the log's index":
            kill_in_the_middle(path, keeps_index=False)
        case "of an older version":
            make_older(path)
        case "being written":
            other = await SqliteStore.open(path)
            await converse(other, "s1", "newest")
    (home / "crow.db.lock").unlink(missing_ok=True)
    before = content(home)
    with read_only(home, files=files, directory=directory):
        listed, shown, exported, refused = crow(home, ["--json"], ["show", "s1"], ["export", "s1"], ["archive", "s1"])
    assert (listed[0], json.loads(listed[1])["id"], listed[2]) == (0, "s1", "")
    assert (shown[0], "NEWEST" in shown[1], shown[2]) == (0, True, "")
    assert (exported[0], "NEWEST" in exported[1], exported[2]) == (0, True, "")
    assert exported[1].splitlines()[-1].startswith('{"type":"end"')
    code, out, error = refused
    assert (code, out) == (1, "")
    assert error.startswith(f"crow: {path}")
    assert "is not writable" in error or "cannot be opened" in error
    if state != "being written" and files == 0o400:
        assert content(home) == before
    if other is not None:
        await other.close()
    for file in home.iterdir():
        file.chmod(0o600)
    assert crow(home, ["archive", "s1"])[0][0] == 0

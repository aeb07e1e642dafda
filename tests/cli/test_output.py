"""Every command, as a process, when its output cannot be written or its directory is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from crow.app import BackgroundImport
from crow.domain.errors import CrowError
from tests.cli.test_cli import add_session
from tests.support.fork_server import ForkedProgram, command
from tests.support.terminal import Program, can_fork

ID = "crow-0123456789ab"
PRINTING = [
    *("--help", "--version", "run --help", "config", "man", "completion bash", "models"),
    *("sessions", "sessions list --json", "sessions stats --disk", "sessions search hi", f"sessions show {ID}"),
    *(f"sessions export {ID}", f"sessions export {ID} --format markdown", "run hi", "run --json hi", "demo"),
]
STARTED = [*((command, False) for command in PRINTING), ("--help", True), ("sessions", True)]
"""The commands, and whether a new interpreter runs them."""
GONE = """
import os, sys
from crow.__main__ import main
os.rmdir(os.getcwd())
sys.argv[0] = "/bin/crow"
sys.exit(main())
"""
"""Runs a command after its directory was deleted."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a home of crow that has one session, whose title is in no small character set."""
    (tmp_path / "home").mkdir()
    anyio.run(add_session, tmp_path / "home", ID, str(tmp_path), "hi — … ünï 😀")
    return tmp_path


def start(
    place: Path,
    command: str,
    stdout: int,
    *,
    ends: Sequence[int] = (),
    encoding: str = "utf-8",
    is_fresh: bool = sys.platform != "linux",
) -> Program:
    """Start a command. `ends` are the descriptors that are closed in the process before it starts."""
    env = {"PATH": os.environ["PATH"], "HOME": str(place), "CROW_HOME": str(place / "home"), "CROW_MODEL": "offline"}
    if not is_fresh and can_fork(env):
        return ForkedProgram(command.split(), env=env, cwd=place, stdout=stdout, closed=ends, encoding=encoding)
    env |= {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"} if encoding != "utf-8" else {}
    script = "import os, sys; [os.close(int(fd)) for fd in sys.argv[1].split()]; os.execv(sys.executable, sys.argv[2:])"
    line = [sys.executable, "-c", script, " ".join(map(str, ends)), sys.executable, "-P", "-m", "crow"]
    return subprocess.Popen(
        [*line, *command.split()], cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE
    )


def ended(process: Program) -> tuple[int, list[str]]:
    """The exit code, and the lines on stderr without those that say what a run did."""
    _, err = process.communicate(timeout=120)
    lines = [line for line in err.decode().splitlines() if line.strip() and not line.startswith("You have not")]
    return process.wait(), lines


@pytest.mark.long
@pytest.mark.parametrize(("command", "is_fresh"), STARTED)
def test_output_that_cannot_be_written_is_reported_in_one_sentence(place: Path, command: str, is_fresh: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, open(writer, "wb") as broken:
        processes = [
            start(place, command, full.fileno(), is_fresh=is_fresh),
            start(place, command, full.fileno(), ends=[1], is_fresh=is_fresh),
            start(place, command, broken.fileno(), is_fresh=is_fresh),
        ]
    assert list(map(ended, processes)) == [
        (1, ["crow: standard output cannot be written: No space left on device"]),
        (1, ["crow: standard output cannot be written: it is closed"]),
        (1, []),
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "is_fresh", "encoding"),
    # The demo, which starts processes of its own, has its own test. To start an interpreter in one encoding is enough.
    [
        (command, is_fresh, encoding)
        for command, is_fresh in STARTED
        for encoding in ("ascii", "latin-1")
        if command != "demo" and (encoding == "ascii" or not is_fresh)
    ],
)
def test_output_works_in_every_encoding(place: Path, command: str, is_fresh: bool, encoding: str) -> None:
    with open(place / "out", "wb") as out:
        code, err = ended(start(place, command, out.fileno(), encoding=encoding, is_fresh=is_fresh))
    assert (code, [line for line in err if "Error" in line or "Traceback" in line]) == (0, [])
    if command == "sessions list --json":
        assert json.loads((place / "out").read_bytes())["title"] == "hi — … ünï 😀"
    if command == "sessions":
        shown = {
            "ascii": rb"hi \u2014 \u2026 \xfcn\xef \U0001f600",
            "latin-1": b"hi \\u2014 \\u2026 \xfcn\xef \\U0001f600",
        }
        assert shown[encoding] in (place / "out").read_bytes()


@pytest.mark.long
def test_closed_standard_streams_never_become_the_database(place: Path) -> None:
    for ends in ([1], [2], [0, 1, 2]):
        with start(place, "run hi", subprocess.PIPE, ends=ends, is_fresh=len(ends) == 3) as process:
            process.communicate(timeout=120)
    with start(place, "doctor", subprocess.PIPE) as process:
        assert "error" not in process.communicate(timeout=120)[0].decode().casefold()
    with open(place / "out", "wb") as out:
        assert ended(start(place, "sessions", out.fileno())) == (0, [])
    assert len((place / "out").read_text().splitlines()) == 4


@pytest.mark.long
@pytest.mark.parametrize("line", ["run hi", "run --json hi", "sessions --continue", "doctor"])
def test_a_deleted_directory_is_named_as_the_cause(place: Path, line: str) -> None:
    crow = "[sys.executable, '-P', '-m', 'crow', *sys.argv[1:]]"
    script = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, {crow})"
    started = [sys.executable, "-c", script]
    if line != "run hi":
        started = command(GONE)
    (place / "gone").mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(place), "CROW_HOME": str(place / "home"), "CROW_MODEL": "offline"}
    done = subprocess.run(
        [*started, *line.split()],
        cwd=place / "gone",
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr.decode()) == (
        2,
        "crow: The current directory no longer exists. Change to another one: cd ~\n",
    )


async def test_an_import_without_memory_fails_with_words_and_is_tried_again() -> None:
    failures: list[Exception] = [MemoryError(), SystemError("cut off")]

    def load() -> None:
        if failures:
            raise failures.pop(0)

    imports = BackgroundImport(load)
    with pytest.raises(CrowError, match="not enough memory"):
        await imports.run()
    with pytest.raises(SystemError, match="cut off"):
        await imports.run()


async def test_an_import_that_gets_no_thread_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crow waited for it at its end, forever."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[bool] = []
    imports = BackgroundImport(lambda: done.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await imports.run()
    await imports.settle()
    assert not done
    await imports.run()
    assert done


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
@pytest.mark.parametrize(
    ("command", "most_kib"),
    [
        *(("run hi", most_kib) for most_kib in (60_000, 100_000, 150_000, 230_000, 250_000)),
        *(("mcp test x", most_kib) for most_kib in (100_000, 230_000)),
    ],
)
def test_a_command_with_too_little_memory_ends_with_words_and_does_not_hang(
    place: Path, most_kib: int, command: str
) -> None:
    """A library that is not Python may end the process itself; it says why."""
    (place / "home").mkdir(exist_ok=True)
    (place / "home" / "config.toml").write_text('[mcp_servers.x]\ncommand = "/bin/false"\n')
    line = f'ulimit -v {most_kib}; exec "$0" -P -m crow {command}'
    env = os.environ | {"HOME": str(place), "CROW_HOME": str(place / "home"), "CROW_MODEL": "offline"}
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=place, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout or done.stderr if command.startswith("mcp") or done.returncode == 0 else done.stderr
    assert "Traceback" not in done.stderr
    assert "Internal error" not in done.stdout + done.stderr

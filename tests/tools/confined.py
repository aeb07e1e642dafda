"""Runs commands under the sandbox of this machine, also as another user."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from crow.programs import SYSTEM_PROGRAMS
from crow.tools import CommandAccess
from crow.tools.process import orphans_ended
from crow.tools.sandbox.confiner import KernelConfiner, Sandboxes
from crow.tools.sandbox.policy import SandboxOptions
from crow.tools.workspace import DiskWorkspace

NOBODY = 65_534
USERS = ("root", "nobody") if os.geteuid() == 0 else ("user",)


FOUND = Sandboxes()
"""What all tests have found out about the machine. A forked process of another user has its own."""


async def unwatched(_text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A home directory with a workspace in it, a directory outside of both, and crow's own directory in the home."""

    base: Path
    sandboxes: Sandboxes = FOUND
    opened: list[DiskWorkspace] = field(default_factory=list)
    """What `open` has returned. It is closed at the end of the scenario."""

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def root(self) -> Path:
        return self.home / "project"

    @property
    def outside(self) -> Path:
        return self.base / "outside"

    @property
    def own(self) -> Path:
        return self.home / ".config" / "crow"

    def open(self, root: Path | None = None, *more: Path, **options: Any) -> DiskWorkspace:
        """A workspace whose commands are confined. `options` are fields of `SandboxOptions`."""
        directories = [root or self.root, *more]
        settings = {"own": (self.own,), "caches": self.base / "caches", **options}
        confiner = KernelConfiner(directories, SandboxOptions(**settings), self.sandboxes)
        self.opened.append(DiskWorkspace(directories[0], directories[1:], confiner=confiner))
        return self.opened[-1]


@contextmanager
def new_place(uid: int | None = None) -> Iterator[Place]:
    """A new place that belongs to a user."""
    base = Path(tempfile.mkdtemp(prefix="crow-test-", dir="/tmp"))
    place = Place(base)
    for folder in (place.root, place.outside, place.own, place.home / ".ssh"):
        folder.mkdir(parents=True)
    (place.home / ".ssh" / "id_ed25519").write_text("PRIVATE")
    (place.own / "config.toml").write_text("PRIVATE")
    (place.outside / "file").write_text("outside\n")
    base.chmod(0o755)
    if uid is not None:
        for path in (base, *base.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)
    try:
        yield place
    finally:
        shutil.rmtree(base, ignore_errors=True)


async def run(
    workspace: DiskWorkspace, access: CommandAccess, command: str, timeout_s: float = 120
) -> tuple[int | None, str]:
    return await workspace.run(command, access=access, timeout_s=timeout_s, on_output=unwatched)


def as_user(user: str, scenario: Callable[[Place], Awaitable[Any]], *, needs: str = "") -> Any:
    """The JSON result of a scenario that runs in a place of its own, as a user. Skips without a sandbox, or if that is
    not the one that the scenario `needs`."""
    scenario = partial(guarded, scenario, needs)
    with new_place(NOBODY if user == "nobody" else None) as place:
        if user != "nobody":
            home, os.environ["HOME"] = os.environ.get("HOME", ""), str(place.home)
            try:
                result = json.loads(json.dumps(asyncio.run(scenario(place)), default=str))
            finally:
                os.environ["HOME"] = home
        else:
            result = in_child(scenario, place)
    if isinstance(result, dict) and "no sandbox" in result:
        pytest.skip(result["no sandbox"])
    return result


async def guarded(scenario: Callable[[Place], Awaitable[Any]], needs: str, place: Place) -> Any:
    choice = place.sandboxes.choose()
    if choice.sandbox is None:
        return {"no sandbox": choice.problem}
    if not choice.sandbox.name.startswith(needs):
        return {"no sandbox": f"needs {needs}; {choice.sandbox.name} confines commands here"}
    async with orphans_ended():  # as in crow itself
        try:
            return await scenario(place)
        finally:
            for workspace in place.opened:
                await workspace.close()


def in_child(scenario: Callable[[Place], Coroutine[Any, Any, Any]], place: Place) -> Any:
    """Run a scenario as the user `nobody` in a forked process."""
    FOUND.choose()  # imports everything, since the user may be unable to read this Python's files
    asyncio.run(asyncio.sleep(0))
    python = SYSTEM_PROGRAMS.find("python3")

    def as_nobody() -> Any:
        os.environ |= {"HOME": str(place.home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        os.chdir("/")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        if python is not None and not os.access(sys.executable, os.X_OK):
            sys.executable = python  # for the sandbox's helper, which needs no package
        return asyncio.run(scenario(replace(place, sandboxes=Sandboxes())))

    return forked(as_nobody)


def forked(function: Callable[[], Any]) -> Any:
    """The JSON result of a function that runs in a forked process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses none of the parent's threads
        pid = os.fork()
    if pid == 0:
        text = ""
        try:
            text = json.dumps({"result": function()}, default=str)
        except BaseException:  # noqa: BLE001 - the parent raises it
            text = json.dumps({"error": traceback.format_exc()})
        finally:
            with open(writer, "w") as pipe:
                pipe.write(text)
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = json.loads(pipe.read() or '{"error": "the child died"}')
    os.waitpid(pid, 0)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return answer["result"]


def available(*programs: str) -> Sequence[str]:
    """Those of the programs that this machine has."""
    return [program for program in programs if shutil.which(program)]

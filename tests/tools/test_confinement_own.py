"""What commands could change of crow itself: its Python, and the directories that it makes for them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crow import programs
from tests.tools.confined import USERS, Place, as_user, run

users = pytest.mark.parametrize("user", USERS)


@contextmanager
def installed_in(place: Path) -> Iterator[None]:
    """Crow runs from a virtual environment at this place."""
    before, sys.prefix = sys.prefix, str(place)
    try:
        yield
    finally:
        sys.prefix = before


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@users
@pytest.mark.parametrize("needs", ["bubblewrap", "Landlock"])
def test_a_command_cannot_change_the_python_that_runs_crow(
    user: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needs == "Landlock":
        monkeypatch.setattr(programs, "SYSTEM_PLACES", ())  # no bubblewrap

    async def scenario(place: Place) -> Any:
        (place.root / ".venv" / "bin").mkdir(parents=True)
        (place.root / ".venv" / "bin" / "python").write_text("crow")
        (place.root / "src").mkdir()
        with installed_in(place.root / ".venv"):
            workspace = place.open()
            attack = (
                "echo x >.venv/bin/python; rm -rf .venv; mv .venv away; touch .venv/bin/bwrap; chmod -R 777 .venv; "
                "ln .venv/bin/python src/python; echo x >src/python; cat .venv/bin/python; echo; echo y >src/new; ls"
            )
            output = (await run(workspace, "write", attack))[1]
            asks = workspace.protection(place.root / ".venv" / "bin" / "new"), workspace.protection(place.root / "new")
            await workspace.close()
        left = sorted(str(path.relative_to(place.root)) for path in (place.root / ".venv").rglob("*"))
        text = (place.root / ".venv" / "bin" / "python").read_text()
        return output, asks, left, text, (place.root / "src" / "new").read_text()

    output, asks, left, text, new = as_user(user, scenario, needs=needs)
    assert (left, text, new) == ([".venv/bin", ".venv/bin/python"], "crow", "y\n")
    assert "crow" in output, "it can be read"
    assert "src" in output.split(), "the workspace can be listed"
    assert asks == ["ask", "none"]


@pytest.mark.parametrize("starter", ["helper", "bubblewrap"])
def test_a_confined_command_can_start_the_python_of_crow_in_a_place_that_it_does_not_see(
    starter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.path.realpath(sys.executable)

    async def scenario(place: Place) -> Any:
        python = place.base / "installed" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(real)
        (place.base / "installed" / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        with installed_in(place.base / "installed"):
            workspace = place.open()
            if starter == "bubblewrap":
                monkeypatch.setattr(sys, "executable", "/bin/false")
            command = f"{python} -c 'import sys; print(sys.prefix)'; cat {programs.__file__}; touch {python.parent}/new"
            return place.base, [await run(workspace, access, command) for access in ("read", "write")]

    base, results = as_user(USERS[0], scenario, needs="bubblewrap")
    for code, output in results:
        assert output.startswith(f"{base}/installed\n{Path(programs.__file__).read_text()}")
        assert (code, "Read-only file system" in output) == (1, True)


@users
def test_no_directory_above_the_caches_can_be_changed_by_others(user: str) -> None:
    async def scenario(place: Place) -> Any:
        before = os.umask(0)
        try:
            workspace = place.open(caches=place.base / "cache" / "crow" / "commands")
            await run(workspace, "read", "true")
            await workspace.close()
        finally:
            os.umask(before)
        return [mode(place.base / "cache"), mode(place.base / "cache" / "crow")]

    assert as_user(user, scenario) == [0o700, 0o700]


@pytest.mark.long
@users
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_caches_of_commands_are_private_whatever_the_umask_is(user: str, mask: int) -> None:
    async def scenario(place: Place) -> Any:
        before = os.umask(mask)
        try:
            workspace = place.open()
            made = await run(workspace, "write", "umask 0; mkdir -p $XDG_CACHE_HOME/deep; echo x >$XDG_CACHE_HOME/file")
            await workspace.close()
        finally:
            os.umask(before)
        caches = place.base / "caches"
        own = next(caches.iterdir())
        first = {mode(path) for path in (caches, own, own / "caches", own / "kept", own / "caches" / "pytest")}

        (place.outside / "target").mkdir()
        (place.outside / "target").chmod(0o755)
        (own / "caches" / "linked").symlink_to(place.outside / "target")
        (caches / "0123456789abcdef" / "caches").mkdir(parents=True)
        for path in (caches, caches / "0123456789abcdef", own, own / "caches", own / "caches" / "pytest"):
            path.chmod(0o777)
        workspace = place.open()
        await run(workspace, "read", "true")
        await workspace.close()
        mended = {mode(path) for path in (caches, *caches.iterdir(), own / "caches", own / "caches" / "xdg")}
        return made, sorted(first), sorted(mended), mode(own / "caches" / "pytest"), mode(place.outside / "target")

    made, first, mended, pytest_cache, target = as_user(user, scenario)
    assert made[0] == 0, made
    assert (first, mended, pytest_cache) == ([0o700], [0o700], 0o700)
    assert target == 0o755, "a link that a command made is not followed"


@users
def test_bubblewrap_loads_nothing_that_the_environment_names(user: str) -> None:
    """The loader writes this file for each program that gets the variables and may write there."""

    async def scenario(place: Place) -> Any:
        variables = {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(place.outside / "loaded"), "BASH_ENV": "/nowhere"}
        os.environ.update(variables)
        try:
            workspace = place.open()
            shown = [(await run(workspace, access, 'echo "$LD_DEBUG $BASH_ENV"'))[1] for access in ("read", "write")]
            await workspace.close()
        finally:
            for name in variables:
                del os.environ[name]
        return shown, sorted(os.listdir(place.outside))

    shown, files = as_user(user, scenario, needs="bubblewrap")
    assert ["libs /nowhere" in text for text in shown] == [True, True], "the command itself gets them"
    assert files == ["file"]

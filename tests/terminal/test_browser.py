"""Pages are opened by a program of the system, or by the one that the user named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crow import programs
from crow.programs import Programs
from crow.terminal.browser import open_page

URL = "https://example.test/a?b=c&d=%s"


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which programs write what they were asked to open. Programs of the system are in `system`, and a
    planted one is on PATH."""
    log = tmp_path / "opened"
    for folder in ("system", "planted"):
        for name in ("xdg-open", "firefox", "wslview"):
            program = tmp_path / folder / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/sh\necho "{folder}/{name} $* $LD_PRELOAD" >>{log}\n')
            program.chmod(0o755)
    monkeypatch.setattr(programs, "SYSTEM_PLACES", ())
    monkeypatch.setattr(programs, "_USER_PLACES", ((str(tmp_path / "system"), (str(tmp_path / "system"),)),))
    monkeypatch.setenv("PATH", f"{tmp_path / 'planted'}:{os.environ['PATH']}")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.delenv("BROWSER", raising=False)
    return log


def test_a_page_is_opened_by_a_program_of_the_system(opened: Path) -> None:
    assert open_page(URL, Programs(opened.parent / "ledger"))
    assert opened.read_text().split() == ["system/xdg-open", URL]


def test_a_page_is_opened_by_nothing_if_the_system_has_no_program(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_USER_PLACES", ())
    assert not open_page(URL, Programs(opened.parent / "ledger"))
    assert not opened.exists()


@pytest.mark.parametrize(
    ("browser", "expected"),
    [
        ("firefox", ["planted/firefox", URL]),
        ("firefox --new %s", ["planted/firefox", "--new", URL]),
        ("missing:firefox", ["planted/firefox", URL]),
        (":'", ["system/xdg-open", URL]),
        ("false", ["system/xdg-open", URL]),
    ],
)
def test_the_browser_that_the_user_named_comes_first(
    opened: Path, monkeypatch: pytest.MonkeyPatch, browser: str, expected: list[str]
) -> None:
    monkeypatch.setenv("BROWSER", browser)
    assert open_page(URL, Programs(opened.parent / "ledger"))
    assert opened.read_text().split() == expected

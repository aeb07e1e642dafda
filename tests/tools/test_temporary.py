"""Temporary directories of a process that was killed are removed, and those of a living one are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from crow.tools.temporary import Kind, TemporaryDirectory

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs locks")

OWNER = """
import pathlib, sys
from crow.tools.temporary import TemporaryDirectory
made = [TemporaryDirectory.create(kind, pathlib.Path(sys.argv[1])) for kind in sys.argv[2:]]
(made[0].path / "closed").mkdir(mode=0)
print("made", flush=True)
sys.stdin.read()
"""


def names(place: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in place.iterdir())


def test_directories_stay_while_their_process_lives_and_go_after_it_was_killed(tmp_path: Path) -> None:
    kinds = get_args(Kind)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), *kinds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"made\n"
        own = [TemporaryDirectory.create(kind, tmp_path) for kind in kinds]
        assert names(tmp_path) == sorted(f"crow-{kind}" for kind in (*kinds, *kinds))
        owner.send_signal(signal.SIGKILL)
    for made in own:
        made.remove()
    assert names(tmp_path) == sorted(f"crow-{kind}" for kind in kinds)

    for kind in kinds:
        TemporaryDirectory.create(kind, tmp_path).remove()
    assert names(tmp_path) == []


def test_only_the_users_own_left_over_directories_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "new-crow-probe-old", tmp_path / "new-crow-probe-young"
    kept = [tmp_path / "elsewhere", young]
    for path in (old, *kept):
        path.mkdir()
    os.utime(old, (1, 1))
    (tmp_path / "crow-probe-file").touch()
    (tmp_path / "crow-probe-link").symlink_to("elsewhere")
    if os.geteuid() == 0:
        kept.append(tmp_path / "crow-probe-foreign")
        kept[-1].mkdir()
        os.chown(kept[-1], 12_345, -1)

    made = TemporaryDirectory.create("probe", tmp_path)

    left = {*kept, tmp_path / "crow-probe-file", tmp_path / "crow-probe-link", made.path}
    assert {*tmp_path.iterdir()} == left
    assert made.path.stat().st_mode & 0o777 == 0o700
    made.remove()

"""`crow demo` against a real crow process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crow.demo import DemoFailed
from crow.demo import _CrowProcess as CrowProcess


def run_demo(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CROW_") and name not in {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
    }
    return subprocess.run(
        [sys.executable, "-m", "crow", "demo"],
        env=clean | {"TMPDIR": str(tmp_path)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.long
def test_the_demo_plays_every_scene_with_the_offline_model_and_leaves_nothing_behind(tmp_path: Path) -> None:
    others = {"OPENAI_API_KEY": "sk-of-another-program", "OPENAI_BASE_URL": "not-a-url", "CROW_MODEL": "other"}
    # what an encoding cannot show is escaped
    done = run_demo(tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0", **others)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.encode().decode("unicode_escape")
    expected = [
        "1. A prompt",
        "you › read README.md",
        "2. A tool call with its diff",
        "● Write notes.txt",
        "+Crow keeps everything.",
        "(•) Allow",
        "✓ Write notes.txt",
        "-Crow keeps everything.",
        "+Crow keeps every step.",
        "3. kill -9 in the middle of a turn",
        "✗ killed",
        "4. A new process loads the session",
        "you › read README.md",
        "you › count to 200",
        "came back",
        "you › summarise",
        '"agent_servers"',
    ]
    position = 0
    for part in expected:
        assert part in shown[position:], part
        position = shown.index(part, position) + len(part)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_demo_says_why_crow_does_not_start(tmp_path: Path) -> None:
    broken, scratch = tmp_path / "broken", tmp_path / "scratch"
    broken.mkdir()
    scratch.mkdir()
    (broken / "acp.py").write_text("raise ImportError('acp is broken')\n", "utf-8")
    done = run_demo(scratch, PYTHONPATH=str(broken))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "crow: crow ended during initialize: crow: internal error: ImportError: acp is broken"
    )
    assert list(scratch.iterdir()) == []


def test_a_crow_that_ends_before_a_request_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with CrowProcess(tmp_path, print) as crow:
        crow._process.kill()
        crow._process.wait()
        (tmp_path / "stderr.txt").write_text("out of memory")
        with pytest.raises(DemoFailed, match="crow ended during initialize: out of memory"):
            crow.request("initialize", {"protocolVersion": 1})

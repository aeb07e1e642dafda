"""`crow demo`, as `make run` calls it: the real thing, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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


def test_the_demo_tells_its_whole_story_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run_demo(tmp_path, OPENAI_API_KEY="sk-of-another-program")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    parts = [
        "1. A new session",
        "2. A prompt and its answer",
        "you › read README.md",
        "3. A tool call that must be allowed",
        "+Crow keeps everything.",
        "? may crow run this: Write notes.txt",
        "4. A diff",
        "-Crow keeps everything.",
        "+Crow keeps every step.",
        "5. A compaction",
        "6. kill -9 in the middle of a turn",
        "✗ killed",
        "7. A new process loads the session",
        "you  │ read README.md",
        "you  │ count to 200",
        "8. And goes on",
        "What you saw",
        '"agent_servers"',
    ]
    places = [said.find(part) for part in parts]
    assert -1 not in places, [part for part, place in zip(parts, places, strict=True) if place == -1]
    assert places == sorted(places)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_answer_fails_the_demo_with_words(tmp_path: Path) -> None:
    done = run_demo(tmp_path, CROW_MODEL="some-model", OPENAI_BASE_URL="not-a-url")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        'crow: the demo failed in "A prompt and its answer": session/prompt: environment OPENAI_BASE_URL'
    )
    assert list(tmp_path.iterdir()) == []

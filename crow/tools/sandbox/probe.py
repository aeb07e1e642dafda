"""Finds out whether a sandbox really confines commands, by trying."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from crow.tools.sandbox import Confinement

RunConfined: TypeAlias = Callable[[Sequence[str], Confinement], "subprocess.CompletedProcess[bytes]"]
"""Runs a command to its end; standard error goes to the output. Raises OSError if it cannot be started."""

OUTPUT_CHARS = 500


def try_confinement(run: RunConfined) -> str:
    """Try to read and write where a confined command must not, and to write where it may.

    Returns an empty string if the sandbox works, otherwise the problem in words.
    """
    with tempfile.TemporaryDirectory(prefix="crow-probe-") as name:
        directory = Path(os.path.realpath(name))
        allowed, forbidden = directory / "allowed", directory / "forbidden"
        allowed.mkdir()
        forbidden.mkdir()
        (forbidden / "file").write_text("secret")
        confinement = Confinement(access="write", masked=(directory,), temporary=allowed)
        script = 'echo > "$1/file"; cat "$2/file"; echo > "$2/file"; true'
        try:
            ended = run(["/bin/sh", "-c", script, "sh", str(allowed), str(forbidden)], confinement)
        except OSError as error:
            return f"a confined command cannot be started: {error.strerror}"
        output = ended.stdout.decode(errors="replace")
        if ended.returncode:
            return f"a confined command failed: {output[-OUTPUT_CHARS:].strip()}"
        if "secret" in output.split():
            return "a confined command could read a file that was masked"
        if (forbidden / "file").read_text() != "secret":
            return "a confined command could write to a file that was masked"
        return "" if (allowed / "file").exists() else "a confined command could not write to its temporary directory"

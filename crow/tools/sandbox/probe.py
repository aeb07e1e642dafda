"""Tries out whether a sandbox really confines commands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from crow.tools.sandbox import Confinement
from crow.tools.temporary import TemporaryDirectory

RunConfined: TypeAlias = Callable[[Sequence[str], Confinement], "subprocess.CompletedProcess[bytes]"]
"""Runs a command to its end. The output includes standard error. Raises OSError if the command cannot be started."""

_OUTPUT_CHARS = 500


def try_confinement(run: RunConfined, *, has_overlay: bool = False) -> str:
    """Test a sandbox: try to read and write where a confined command must not, and to write where it may.

    With `has_overlay`, also test that a command can change a throwaway tree and that its changes do not last. Return
    an empty string if the sandbox works, otherwise the problem in words.
    """
    try:
        scratch = TemporaryDirectory.create("probe")
    except OSError as error:
        return f"a temporary directory cannot be made: {error.strerror or error}"
    try:
        return _try_in(scratch.path, run, has_overlay=has_overlay)
    except OSError as error:
        return f"the probe's temporary files cannot be used: {error.strerror or error}"
    finally:
        scratch.remove()


def _try_in(directory: Path, run: RunConfined, *, has_overlay: bool) -> str:
    """Do what `try_confinement` does, in an empty directory. :raises OSError: crow cannot use files in it."""
    allowed, forbidden, throwaway, layers = (directory / part for part in ("allowed", "forbidden", "tree", "layers"))
    for folder in (allowed, forbidden, throwaway, layers):
        folder.mkdir()
    (forbidden / "file").write_text("secret")
    confinement = Confinement(
        access="write",
        masked=(directory,),
        temporary=allowed,
        throwaway=(throwaway,) if has_overlay else (),
        layers=layers if has_overlay else None,
    )
    script = 'echo > "$1/file"; cat "$2/file"; echo > "$2/file"; [ -z "$3" ] || echo > "$3/file"'
    try:
        ended = run(
            ["/bin/sh", "-c", script, "sh", str(allowed), str(forbidden), str(throwaway) if has_overlay else ""],
            confinement,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"a confined command cannot be started: {getattr(error, 'strerror', None) or error}"
    output = ended.stdout.decode(errors="replace")
    if ended.returncode:
        return f"a confined command failed: {output[-_OUTPUT_CHARS:].strip() or f'exit code {ended.returncode}'}"
    if "secret" in output.split():
        return "a confined command could read a file that was masked"
    if (forbidden / "file").read_text() != "secret":
        return "a confined command could write to a file that was masked"
    if (throwaway / "file").exists():
        return "what a confined command wrote to a throwaway tree has lasted"
    return "" if (allowed / "file").exists() else "a confined command could not write to its temporary directory"

"""A sandbox that does not confine is found out."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from crow.tools.sandbox import Confinement
from crow.tools.sandbox.probe import try_confinement

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs /bin/sh")


def run(argv: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_command_that_is_not_confined_is_found_out() -> None:
    assert try_confinement(lambda argv, _: run(argv)) == "a confined command could read a file that was masked"


def test_a_write_that_was_not_stopped_is_found_out() -> None:
    def hide(argv: Sequence[str], confinement: Confinement) -> subprocess.CompletedProcess[bytes]:
        script = argv[2].replace("cat", "true")
        return run([*argv[:2], script, *argv[3:]])

    assert try_confinement(hide) == "a confined command could write to a file that was masked"


def test_a_sandbox_that_allows_too_little_is_found_out() -> None:
    found = try_confinement(lambda argv, _: run(["/bin/sh", "-c", "true"]))
    assert found == "a confined command could not write to its temporary directory"


def test_a_change_to_a_throwaway_tree_that_lasts_is_found_out() -> None:
    def hide(argv: Sequence[str], confinement: Confinement) -> subprocess.CompletedProcess[bytes]:
        script = argv[2].replace("cat", "true").replace('echo > "$2/file"', "true")
        return run([*argv[:2], script, *argv[3:]])

    found = try_confinement(hide, has_overlay=True)
    assert found == "what a confined command wrote to a throwaway tree has lasted"


def test_failures_are_told_in_words() -> None:
    def missing(argv: Sequence[str], confinement: Confinement) -> subprocess.CompletedProcess[bytes]:
        return run([str(Path(os.sep) / "no" / "such" / "program")])

    assert try_confinement(missing) == "a confined command cannot be started: No such file or directory"
    found = try_confinement(lambda argv, _: run(["/bin/sh", "-c", "echo no namespaces; exit 1"]))
    assert found == "a confined command failed: no namespaces"


def test_a_probe_that_cannot_write_its_files_says_so() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        found = try_confinement(lambda argv, _: run(argv))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == "the probe's temporary files cannot be used: File too large"

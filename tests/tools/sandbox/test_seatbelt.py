"""The profiles for Seatbelt, as text: no test runs on a Mac."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from crow.tools.sandbox import Confinement
from crow.tools.sandbox.seatbelt import PROGRAM, Seatbelt, confined_command, make_profile

HOME = Path("/Users/somebody")
CONFINEMENT = Confinement(
    access="write",
    masked=(Path("/Users"),),
    readable=(HOME / ".cargo",),
    writable=(HOME / "project",),
    throwaway=(HOME / "other",),
    read_only=(HOME / "project/.git/hooks",),
    hidden=(HOME / ".cargo/credentials.toml",),
    temporary=Path("/private/tmp/crow"),
)


def rules(confinement: Confinement) -> list[str]:
    """The rules of a profile with the paths in their places."""
    text, parameters = make_profile(confinement)
    for name, path in sorted(parameters.items(), key=lambda item: -len(item[0])):
        text = text.replace(f'(param "{name}")', path)
    return text.splitlines()


def test_rules_for_paths_stand_in_the_order_in_which_later_ones_win() -> None:
    trees = "(subpath /Users/somebody/.cargo) (subpath /Users/somebody/other) (subpath /Users/somebody/project)"
    assert [rule for rule in rules(CONFINEMENT) if "/Users" in rule] == [
        "(deny file-read-data file-read-xattr (subpath /Users))",
        f"(allow file-read-data file-read-xattr {trees} (subpath /private/tmp/crow))",
        "(allow file-write* (subpath /Users/somebody/project) (subpath /private/tmp/crow))",
        "(deny file-write* (subpath /Users/somebody/project/.git/hooks))",
        "(deny file-read-data file-read-xattr file-write* (subpath /Users/somebody/.cargo/credentials.toml))",
        "(deny file-write-unlink (literal /Users/somebody/project) (literal /Users/somebody/project/.git))",
    ]
    assert rules(CONFINEMENT)[:2] == ["(version 1)", "(deny default)"]


def test_a_read_command_may_write_only_temporary_files() -> None:
    confinement = Confinement(access="read", readable=(HOME,), temporary=Path("/private/tmp/crow"))
    assert [rule for rule in rules(confinement) if rule.startswith("(allow file-write*")] == [
        "(allow file-write* (subpath /private/tmp/crow))"
    ]


@pytest.mark.parametrize("has_network", [False, True])
def test_the_network_is_allowed_without_the_sockets_of_other_programs(has_network: bool) -> None:
    confinement = Confinement(access="write", temporary=Path("/private/tmp/crow"), has_network=has_network)
    found = [rule for rule in rules(confinement) if "network" in rule]
    expected = [
        "(allow network*)",
        "(deny network-outbound (remote unix-socket))",
        '(allow network-outbound (literal "/private/var/run/mDNSResponder"))',
    ]
    assert found == (expected if has_network else [])


def test_no_path_is_taken_for_a_rule() -> None:
    path = Path('/Users/somebody/a")) (allow default) (deny file* (literal "\\')
    confinement = Confinement(access="write", writable=(path,), temporary=Path("/private/tmp/crow"))
    program, option, profile, *definitions, end, shell = confined_command(["/bin/sh"], confinement)
    assert (program, option, end, shell) == (PROGRAM, "-p", "--", "/bin/sh")
    assert "somebody" not in profile
    assert f"PATH_0={path}" in definitions
    assert profile.count("(") == profile.count(")")


@pytest.mark.skipif(sys.platform == "darwin", reason="it works there")
def test_the_probe_says_why_it_does_not_work_here() -> None:
    assert Seatbelt().probe() == "Seatbelt is a part of macOS"

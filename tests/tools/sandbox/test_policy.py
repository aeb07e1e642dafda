"""What commands may see and change, and the variables that they get."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.tools.sandbox.policy import Policy, PrivateDirectories, SandboxOptions


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def private(tmp_path: Path) -> PrivateDirectories:
    return PrivateDirectories(
        temporary=tmp_path / "temporary", caches=tmp_path / "caches", blank=tmp_path / "temporary" / "blank"
    )


def policy(home: Path, env: dict[str, str], **options: object) -> Policy:
    return Policy((home / "project",), SandboxOptions(**options), env)  # type: ignore[arg-type]


def test_programs_on_path_are_readable_but_not_the_directories_of_the_user(
    home: Path, private: PrivateDirectories
) -> None:
    for folder in (
        "tool/bin",
        "tool/lib",
        "work/bin",
        "work/secret",
        "bin",
        ".local/bin",
        ".local/share",
        "project/bin",
    ):
        (home / folder).mkdir(parents=True)
    (home / "linked").symlink_to(home / "tool")
    names = ["tool/bin", "work/bin", "bin", ".local/bin", "project/bin", "", ".local", "missing/bin", "linked/bin"]
    path = ":".join([*(str(home / name) for name in names), ".", "relative/bin", "/usr/bin"])
    confinement = policy(home, {"PATH": path}).confinement("read", private)
    readable = {str(path.relative_to(home)) for path in confinement.readable if path.is_relative_to(home)}
    assert readable == {"tool", "work/bin", "bin", ".local/bin"}
    assert confinement.throwaway == (home / "project",)
    assert home in confinement.masked


def test_only_a_write_command_gets_the_workspace_and_the_network(home: Path, private: PrivateDirectories) -> None:
    rules = policy(home, {}, network=True)
    read, write = rules.confinement("read", private), rules.confinement("write", private)
    assert (read.writable, read.has_network) == ((private.caches,), False)
    assert (write.writable, write.has_network) == ((private.caches, home / "project"), True)
    assert not rules.confinement("read", private).read_only


def test_caches_are_private_unless_the_user_made_them_writable(home: Path, private: PrivateDirectories) -> None:
    for folder in (".cache/go-build", ".cache/pre-commit", ".npm"):
        (home / folder).mkdir(parents=True)
    closed = policy(home, {}).environment("write", private)
    opened = policy(home, {"GOPROXY": "https://proxy"}, network=True, writable=("~/.npm",)).environment(
        "write", private
    )
    assert closed["TMPDIR"] == closed["TMP"] == str(private.temporary)
    assert {closed[name] for name in ("npm_config_cache", "GOCACHE")} == {
        str(private.caches / "npm"),
        str(private.caches / "go-build"),
    }
    assert closed["PRE_COMMIT_HOME"] == str(home / ".cache/pre-commit")
    assert closed["GOPROXY"] == f"file://{home}/go/pkg/mod/cache/download,off"
    assert opened["GOPROXY"] == f"file://{home}/go/pkg/mod/cache/download,https://proxy"
    assert "npm_config_cache" not in opened
    assert ("CARGO_HOME" in closed, "CARGO_HOME" in opened) == (False, True)


def test_a_home_that_is_a_directory_of_the_system_is_not_masked(
    monkeypatch: pytest.MonkeyPatch, home: Path, private: PrivateDirectories
) -> None:
    monkeypatch.setenv("HOME", "/")
    assert Path("/") not in policy(home, {}).confinement("read", private).masked

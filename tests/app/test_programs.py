"""Crow starts only programs that no confined command and no other user can change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crow import programs
from crow.programs import (
    SYSTEM_PROGRAMS,
    Programs,
    helper_environment,
    is_private_group,
    named_program,
    own_trees,
    steps_to,
    system_owners,
    trusted_path,
)

NOBODY = 65_534
ROOT = Path(__file__).parents[2]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a helper that the user installed. The system has no helper."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(programs, "SYSTEM_PLACES", (str(tmp_path / "system"),))
    make_program(home / ".local" / "bin" / "helper")
    return home


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_helpers_of_the_system_are_found_whatever_path_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_program(tmp_path / "sh")
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path), "", ".", f"{tmp_path}:/usr/bin"):
        monkeypatch.setenv("PATH", path)
        found = Programs().find("sh")
        assert found in ("/usr/bin/sh", "/bin/sh", "/run/current-system/sw/bin/sh")
    monkeypatch.delenv("PATH")
    assert Programs().find("sh") == found
    assert Programs().find("no-such-helper") is None
    assert Programs().find("../../bin/sh/") is None


def test_a_helper_of_the_user_is_found_if_the_system_has_none(home: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "data" / "ledger"
    assert Programs().find("helper") is None, "without a ledger, nobody knows where commands could write"
    assert Programs(ledger).find("helper") == str(home / ".local" / "bin" / "helper")
    Programs(ledger).distrust([tmp_path / "elsewhere", home / "project"])
    assert Programs(ledger).find("helper") is not None
    assert not ledger.exists()


@pytest.mark.parametrize("where", ["", ".local", ".local/bin", ".local/share/project", "../.."])
def test_nothing_is_taken_from_a_tree_in_which_crow_has_worked(home: Path, tmp_path: Path, where: str) -> None:
    """The record outlives the session and the process, and holds for directories above, below and behind a link."""
    ledger = tmp_path / "data" / "ledger"
    (home / ".local" / "share" / "project").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home / where)
    Programs(ledger).distrust([tmp_path / "link"])
    assert Programs(ledger).find("helper") is None
    assert ledger.stat().st_mode & 0o777 == 0o600
    size = ledger.stat().st_size
    Programs(ledger).distrust([home / where])
    assert ledger.stat().st_size == size, "each tree is recorded once"


@root_only
@pytest.mark.parametrize("where", ["", ".local", ".local/bin"])
def test_a_directory_that_is_mounted_elsewhere_is_the_same_directory(home: Path, tmp_path: Path, where: str) -> None:
    mounted = tmp_path / "mounted"
    (mounted / "project").mkdir(parents=True)
    (home / where / "project").mkdir()
    script = f"""
from pathlib import Path
from crow import programs
programs.SYSTEM_PLACES = ()
ledger = programs.Programs(Path({str(tmp_path / "ledger")!r}))
found = [ledger.find("helper") is None]
ledger.distrust(["{tmp_path}/elsewhere"])
found.append(ledger.find("helper") is None)
ledger.distrust(["{mounted}"])
print(found, ledger.find("helper"))
"""
    command = f'mount --bind "{home / where}" "{mounted}" && exec "{sys.executable}" -c "$0"'
    unshare = SYSTEM_PROGRAMS.find("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    done = subprocess.run(
        [unshare, "--mount", "/bin/sh", "-c", command, script], capture_output=True, text=True, check=False
    )
    if "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "[False, False] None\n", done.stderr


def test_a_helper_with_another_name_is_not_used(home: Path, tmp_path: Path) -> None:
    """Package managers link the files of their cache, also into the environments of workspaces."""
    os.link(home / ".local" / "bin" / "helper", tmp_path / "in-a-workspace")
    assert Programs(tmp_path / "ledger").find("helper") is None
    (tmp_path / "in-a-workspace").unlink()
    assert Programs(tmp_path / "ledger").find("helper") is not None


def test_a_ledger_that_cannot_be_read_distrusts_everything(home: Path, tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    assert Programs(tmp_path / "ledger").find("helper") is None


def test_a_link_out_of_its_tree_is_not_followed(home: Path, tmp_path: Path) -> None:
    """A user may link to a program in a workspace, which is never recorded."""
    ledger, place = tmp_path / "ledger", home / ".local" / "bin"
    (place / "linked").symlink_to(make_program(tmp_path / "project" / "linked"))
    (place / "inner").symlink_to("../lib/inner")
    make_program(home / ".local" / "lib" / "inner")
    (place / "chain").symlink_to(tmp_path / "project" / "back")
    (tmp_path / "project" / "back").symlink_to(place / "helper")
    (place / "loop").symlink_to("loop")
    (place / "folder").mkdir()
    make_program(place / "plain").chmod(0o644)
    (place / "shell").symlink_to("/bin/sh")
    found = {name for name in os.listdir(place) if Programs(ledger).find(name)}
    # root also owns the places that a link out of the tree goes through
    assert found == {"helper", "inner"} | ({"shell"} if os.geteuid() != 0 else set())


@pytest.mark.parametrize("part", ["", ".local", ".local/bin", ".local/bin/helper"])
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_helper_that_others_can_change_is_not_used(home: Path, tmp_path: Path, part: str, mode: int) -> None:
    (home / part).chmod(mode)
    assert Programs(tmp_path / "ledger").find("helper") is None


@root_only
@pytest.mark.parametrize("part", ["", ".local", ".local/bin", ".local/bin/helper"])
def test_a_helper_that_belongs_to_another_user_is_not_used(home: Path, tmp_path: Path, part: str) -> None:
    os.chown(home / part, NOBODY, NOBODY)
    assert Programs(tmp_path / "ledger").find("helper") is None


@root_only
def test_the_place_of_the_system_must_belong_to_root(home: Path, tmp_path: Path) -> None:
    make_program(tmp_path / "system" / "helper")
    assert Programs().find("helper") == str(tmp_path / "system" / "helper")
    os.chown(tmp_path / "system", NOBODY, NOBODY)
    assert Programs().find("helper") is None


@root_only
def test_what_root_worked_on_is_not_used_as_a_program_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "ROOT_TREES", (str(tmp_path / "usr"),))
    monkeypatch.setattr(programs, "SYSTEM_PLACES", (str(tmp_path / "usr" / "bin"), str(tmp_path / "usr" / "sbin")))
    ledger = Programs(tmp_path / "ledger")
    for place in ("bin", "sbin"):
        make_program(tmp_path / "usr" / place / "helper")
    assert ledger.find("helper") == str(tmp_path / "usr" / "bin" / "helper")
    ledger.distrust([tmp_path / "usr" / "bin"])
    assert ledger.find("helper") == str(tmp_path / "usr" / "sbin" / "helper")


def test_a_sticky_directory_protects_what_its_owners_put_there(home: Path, tmp_path: Path) -> None:
    (home / ".local").chmod(0o1777)
    assert Programs(tmp_path / "ledger").find("helper") is not None
    assert {step.owner for step in steps_to(str(home / ".local" / "bin" / "helper"))} <= {0, os.geteuid()}


def test_a_group_is_private_if_it_is_named_after_its_only_member() -> None:
    status = os.stat("/")
    assert is_private_group(status)
    assert not is_private_group(os.stat_result((*status[:4], os.geteuid(), 54_321, *status[6:])))


def test_files_of_an_unmapped_root_belong_to_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container without privileges, where the system's files seem to belong to the overflow user."""
    overflow = tmp_path / "overflowuid"
    monkeypatch.setattr(programs, "OVERFLOW_ID", overflow)
    assert system_owners() == {0}
    overflow.write_text("4294967294\n")
    mapped = any(int(line.split()[2]) == 4_294_967_295 for line in Path("/proc/self/uid_map").read_text().splitlines())
    assert system_owners() == ({0} if mapped else {0, 4_294_967_294})


def test_crows_own_python_is_fixed_inside_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "project" / ".venv"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "python"))
    assert own_trees([tmp_path / "project"]) == (tmp_path / "project" / ".venv",)
    assert own_trees([tmp_path / "other"]) == ()
    assert own_trees([tmp_path]) == (tmp_path / "project" / ".venv", tmp_path / "python")
    of_system = {Path("/usr"), Path("/etc")} if os.geteuid() == 0 else set()
    assert of_system <= set(own_trees([Path("/")]))
    assert own_trees([Path("/etc")]) == (), "the workspace itself stays writable"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "project"), str(tmp_path / "user" / "site-packages"), ""])
    assert own_trees([tmp_path / "user"]) == (tmp_path / "user" / "site-packages",)


def test_a_link_in_the_workspace_is_resolved_before_a_command_can_replace_it(tmp_path: Path) -> None:
    """Crow runs from a virtual environment to which a link leads, and later imports a module that it has not used."""
    real = tmp_path / "environments" / "one"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(real)], check=True)
    packages = next(real.glob("lib/python*/site-packages"))
    (packages / "crow").symlink_to(ROOT / "crow")
    (packages / "late.py").write_text("print('installed')\n")
    (real / "bin" / "late.py").write_text("print('beside the program')\n")
    (tmp_path / "link").symlink_to(real)
    planted = tmp_path / "planted"
    for folder in (packages.relative_to(real), Path("bin")):
        (planted / folder).mkdir(parents=True)
        (planted / folder / "late.py").write_text("print('planted')\n")
    script = real / "bin" / "crow"
    script.write_text(f"""
import os, sys
import crow.__main__
crow.__main__.settle_places(sys.argv[0])
os.unlink({str(tmp_path / "link")!r})
os.symlink({str(planted)!r}, {str(tmp_path / "link")!r})
import late
print(sys.executable, sys.prefix)
""")
    command = [str(tmp_path / "link" / "bin" / "python"), str(tmp_path / "link" / "bin" / "crow")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    executable, prefix = real / "bin" / "python", real
    assert done.stdout == f"installed\n{executable} {prefix}\n", done.stderr


def test_a_helper_gets_no_variables_that_load_code() -> None:
    loaders = {"LD_PRELOAD": "x", "LD_LIBRARY_PATH": "y", "GCONV_PATH": "z", "BASH_FUNC_cd%%": "() { :; }", "ENV": "e"}
    assert helper_environment({"HOME": "/h", "PATH": "/bin", **loaders}) == ({"HOME": "/h", "PATH": "/bin"}, loaders)


def test_a_program_that_the_user_named_is_found_on_path_outside_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the user's choice where such a program comes from, except for relative directories and the workspace."""
    for folder in ("work/bin", "other/.venv/bin"):
        make_program(tmp_path / folder / "named")
    (tmp_path / "link").symlink_to(tmp_path / "work" / "bin")
    monkeypatch.chdir(tmp_path / "work")
    places = ("", ".", "bin", str(tmp_path / "work" / "bin"), str(tmp_path / "link"))
    monkeypatch.setenv("PATH", os.pathsep.join((*places, str(tmp_path / "other" / ".venv" / "bin"))))

    def is_inside(path: Path) -> bool:
        return path.is_relative_to(tmp_path / "work")

    assert named_program("named", is_inside) == str(tmp_path / "other" / ".venv" / "bin" / "named")
    assert named_program("named") == str(tmp_path / "work" / "bin" / "named")
    assert named_program("named", lambda _path: True) == named_program("named"), "if the workspace is /"
    assert trusted_path(is_inside) == str(tmp_path / "other" / ".venv" / "bin")
    assert named_program(str(tmp_path / "work" / "bin" / "named")) == str(tmp_path / "work" / "bin" / "named")
    assert named_program(str(tmp_path / "work" / "bin" / "missing")) is None

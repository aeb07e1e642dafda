"""The entry for the editors' agent registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

import crow
from release.archive import PLATFORMS
from release.registry import entry

ROOT = Path(__file__).parents[2]
ENTRY = json.loads((ROOT / "registry" / "agent.json").read_text())


PUBLISHED = {name: f"https://x.invalid/download/v{crow.__version__}/{each.archive}" for name, each in PLATFORMS.items()}


def test_the_entry_is_the_one_that_make_registry_writes() -> None:
    assert entry({}) == ENTRY


@pytest.mark.parametrize("archives", [{}, PUBLISHED], ids=["in the repository", "of a release"])
def test_the_entry_has_the_format_of_the_registry_and_this_version(archives: dict[str, str]) -> None:
    made = entry(archives)
    assert made.keys() <= {"id", "name", "version", "description", "repository", "website", "authors", "license"} | {
        "distribution"
    }
    assert re.fullmatch(r"[a-z][a-z0-9-]*", made["id"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", made["version"])
    assert all(isinstance(made[key], str) and made[key] for key in ("name", "description", "license"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (made["id"], made["version"]) == (project["name"], crow.__version__)
    assert made["license"] == project["license"]
    assert made["distribution"]["uvx"] == {"package": f"{project['name']}=={crow.__version__}", "args": ["acp"]}
    # `uvx PACKAGE ARGS` runs the command named like the package.
    assert project["scripts"][project["name"]] == project["scripts"]["crow"]


def test_the_entry_of_a_release_has_an_archive_and_a_command_for_each_platform() -> None:
    binary = entry(PUBLISHED)["distribution"]["binary"]
    assert {name.partition("-")[0] for name in binary} == {"darwin", "linux", "windows"}
    assert {name: each.keys() for name, each in binary.items()} == {
        key: {"archive", "cmd", "args"} for key in PLATFORMS
    }
    assert {each["cmd"] for each in binary.values()} == {"./crow-acp/crow", "./crow-acp/python.exe"}
    assert all(each["args"][-1] == "acp" for each in binary.values())
    assert {name: each["archive"] for name, each in binary.items()} == PUBLISHED
    assert "binary" not in entry({})["distribution"]


def test_the_icon_is_16_by_16_and_uses_the_current_colour() -> None:
    icon = ElementTree.parse(ROOT / "registry" / "icon.svg").getroot()
    assert (icon.get("width"), icon.get("height"), icon.get("viewBox")) == ("16", "16", "0 0 16 16")
    paints = [value for node in icon.iter() for name, value in node.items() if name in ("fill", "stroke", "style")]
    assert set(paints) == {"none", "currentColor"}


@pytest.mark.long
def test_the_registry_finds_an_authentication_method_without_a_home(tmp_path: Path) -> None:
    capabilities = {"terminal": True, "_meta": {"terminal_output": True, "terminal-auth": True}}
    request = {"protocolVersion": 1, "clientCapabilities": capabilities}
    line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": request})
    done = subprocess.run(
        [sys.executable, "-m", "crow", *ENTRY["distribution"]["uvx"]["args"]],
        input=line + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TERM": "dumb"},
    )
    methods = json.loads(done.stdout.splitlines()[0])["result"]["authMethods"]
    assert [method.get("type", "agent") for method in methods] == ["agent", "terminal"]

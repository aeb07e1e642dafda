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

import crow

ROOT = Path(__file__).parents[2]
ENTRY = json.loads((ROOT / "registry" / "agent.json").read_text())


def test_the_entry_has_the_format_of_the_registry_and_this_version() -> None:
    assert ENTRY.keys() <= {"id", "name", "version", "description", "repository", "website", "authors", "license"} | {
        "distribution"
    }
    assert re.fullmatch(r"[a-z][a-z0-9-]*", ENTRY["id"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", ENTRY["version"])
    assert all(isinstance(ENTRY[key], str) and ENTRY[key] for key in ("name", "description", "license"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ENTRY["version"] == crow.__version__
    assert ENTRY["license"] == project["license"]
    (start,) = ENTRY["distribution"].values()
    assert start == {"package": f"{project['name']}=={crow.__version__}", "args": ["acp"]}
    # `uvx PACKAGE ARGS` runs the command named like the package.
    assert project["scripts"][project["name"]] == project["scripts"]["crow"]


def test_the_icon_is_16_by_16_and_uses_the_current_colour() -> None:
    icon = ElementTree.parse(ROOT / "registry" / "icon.svg").getroot()
    assert (icon.get("width"), icon.get("height"), icon.get("viewBox")) == ("16", "16", "0 0 16 16")
    paints = [value for node in icon.iter() for name, value in node.items() if name in ("fill", "stroke", "style")]
    assert set(paints) == {"none", "currentColor"}


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

"""The entry of crow in the registry of agents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crow.version import __version__
from release.archive import FOLDER, PLATFORMS

DESCRIPTION = "A coding agent for any OpenAI-compatible endpoint and any MCP server: nothing is lost, small and quick."


def entry(archives: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of this version. `archives` maps platforms to the addresses of their archives."""
    binary = {name: {"archive": address, **_start(name)} for name, address in archives.items()}
    uvx = {"package": f"crow-acp=={__version__}", "args": ["acp"]}
    return {
        "id": "crow-acp",
        "name": "Crow",
        "version": __version__,
        "description": DESCRIPTION,
        "authors": ["The Crow developers"],
        "license": "Apache-2.0",
        "distribution": ({"binary": binary} if binary else {}) | {"uvx": uvx},
    }


def _start(name: str) -> dict[str, Any]:
    """Return how an editor starts crow on a platform. On Windows, an editor cannot start `crow.cmd` without a shell."""
    if PLATFORMS[name].is_windows:
        return {"cmd": f"./{FOLDER}/{PLATFORMS[name].interpreter}", "args": ["-I", "-m", "crow", "acp"]}
    return {"cmd": f"./{FOLDER}/crow", "args": ["acp"]}


def main() -> None:
    """Write registry/agent.json. It names no archives, whose addresses are known only when they are published."""
    file = Path(__file__).parents[1] / "registry" / "agent.json"
    file.write_text(json.dumps(entry({}), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()

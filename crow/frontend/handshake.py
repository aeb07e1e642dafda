"""What crow says of itself at `initialize`: capabilities, and the ways to authenticate.

Strategy: constant but for what the client's own gates decide. The first authentication method is answered here at once;
the second is a program for the client's terminal, offered only where the client runs such programs. Pure.
"""

from __future__ import annotations

import sys
from typing import Any

from acp import PROTOCOL_VERSION

from crow.frontend.params import ClientCapabilities

__all__ = ["CONFIGURED", "initialize_answer"]

CONFIGURED = "configured"
"""The id of the authentication method that needs nothing but a configuration."""


def initialize_answer(version: str, caps: ClientCapabilities) -> dict[str, Any]:
    """The result of `initialize`. What is not supported is left out: some clients look for keys, not values."""
    return {
        "protocolVersion": PROTOCOL_VERSION,
        "agentInfo": {"name": "crow", "title": "Crow", "version": version},
        "agentCapabilities": {
            "loadSession": True,
            "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
            "mcpCapabilities": {"http": True, "sse": True},
            "sessionCapabilities": {
                "list": {},
                "resume": {},
                "close": {},
                "delete": {},
                "fork": {},
                "additionalDirectories": {},
            },
            "auth": {"logout": {}},
        },
        "authMethods": auth_methods(caps),
        "_meta": {"steering": {"supported": True}},
    }


def auth_methods(caps: ClientCapabilities) -> list[dict[str, Any]]:
    """The ways in, the one that needs no user first."""
    methods: list[dict[str, Any]] = [
        {
            "id": CONFIGURED,
            "name": "Endpoint from the configuration",
            "description": "Uses OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL, or [model] in config.toml.",
        }
    ]
    if caps.terminal_auth:
        login: dict[str, Any] = {
            "id": "login",
            "name": "Set up endpoint, key and model",
            "description": "Asks for them in a terminal, tries them, and writes them to config.toml.",
            "type": "terminal",
            "args": ["--setup"],
        }
        if caps.terminal_auth_by_meta:
            # -P: the terminal stands in a workspace, from which nothing may be imported.
            start = ["-P", "-m", "crow", "login"]
            command = {"label": "crow login", "command": sys.executable, "args": start, "env": {}}
            login["_meta"] = {"terminal-auth": command}
        methods.append(login)
    return methods

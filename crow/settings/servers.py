"""Replaces the variables in the settings of MCP servers by their values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from crow.settings.values import McpServerSettings

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Matches a variable in the settings of an MCP server, such as `${NAME}`. The pattern's group is the name."""


def expand_variables(
    server: McpServerSettings, env: Mapping[str, str], *, workspace: str
) -> tuple[McpServerSettings, str]:
    """Return the server with its variables replaced by their values, and an empty string. If some variables cannot be
    replaced, return the server unchanged, and a text that names these variables.

    In args and env, `${workspace}` is replaced by the parameter `workspace`.
    """
    local = (*server.args, *server.env.values())
    client = (server.oauth_client_id or "", server.oauth_client_secret or "")
    others = (server.command or "", server.url or "", *server.headers.values(), *client)
    missing = dict.fromkeys(name for text in (*others, *local) for name in VARIABLE.findall(text) if name not in env)
    if "workspace" in missing:
        if any("${workspace}" in text for text in others):
            return server, "${workspace} can only be used in args and env"
        del missing["workspace"]
    if missing:
        plural = len(missing) > 1
        names = f"environment variable{'s' if plural else ''} {', '.join(missing)} {'are' if plural else 'is'} not set"
        is_meant = any(name.casefold().startswith("workspace") for name in missing)
        return server, names + ("; ${workspace} stands for the session's working directory" if is_meant else "")

    def expand(text: str, variables: Mapping[str, str] = env) -> str:
        return VARIABLE.sub(lambda match: variables[match[1]], text)

    with_workspace = {**env, "workspace": workspace}
    changes = {
        "command": None if server.command is None else expand(server.command),
        "args": tuple(expand(text, with_workspace) for text in server.args),
        "url": None if server.url is None else expand(server.url),
        "env": {name: expand(text, with_workspace) for name, text in server.env.items()},
        "headers": {name: expand(text) for name, text in server.headers.items()},
        "oauth_client_id": server.oauth_client_id and expand(server.oauth_client_id),
        "oauth_client_secret": server.oauth_client_secret and expand(server.oauth_client_secret),
    }
    return server.model_copy(update=changes), ""

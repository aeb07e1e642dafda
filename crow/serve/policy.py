"""The rules of a server with tokens: which settings it needs, and which requests its clients may send."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from crow.domain.errors import ArgumentError, ConfigError
from crow.frontend.requests import OPENING
from crow.protocol.frames import describe_member
from crow.protocol.params import OpenRequest
from crow.settings.values import PRINCIPAL_PART, ServeSettings, static_part
from crow.store import Store
from crow.store.principals import PrincipalStore, check_principal
from crow.tools import SandboxStatus


def check_server(settings: ServeSettings, mode: str, sandbox: SandboxStatus) -> None:
    """Check that these settings separate principals from each other and from the rest of this machine.

    :raises ConfigError: a setting is missing or unsafe. The message says which setting to change.
    """
    if not settings.roots:
        raise ConfigError(
            "A server with tokens needs serve.roots, which lists the directories below which its users may work. Write "
            'roots = ["/srv/crow/{principal}"] under [serve] in config.toml.'
        )
    for root in settings.roots:
        if problem := _problem_of_root(root):
            raise ConfigError(f'serve.roots: "{root}" {problem}; expected a path such as "/srv/crow/{{principal}}".')
    if mode == "auto" and not sandbox.name:
        raise ConfigError(
            'permissions.mode is "auto", and nothing confines commands on this machine, so no session may use this '
            'mode. Choose another mode, or install bubblewrap; "crow doctor" says what is missing.'
        )


class ServePolicy:
    """The rules for the requests of one principal.

    An error message contains only the client's own parameters and the principal's own roots. So the message does not
    show whether a path exists.
    """

    def __init__(self, settings: ServeSettings, principal: str, *, is_confining: bool) -> None:
        self._settings = settings
        self._is_confining = is_confining
        """Whether a sandbox works on this machine."""
        self.roots = tuple(root.replace(PRINCIPAL_PART, check_principal(principal)) for root in settings.roots)

    async def check_params(self, method: str, params: Any, store: Store) -> None:
        """Check the raw parameters of a request. Call this method before crow uses any path in the parameters.

        :raises ArgumentError: the principal may not send this request.
        """
        assert isinstance(store, PrincipalStore), "only principals have a policy"
        if not isinstance(params, Mapping):
            return
        if method in OPENING:
            await self._check_directories(method, params, store)
        asks_mode = {
            "session/set_mode": params.get("modeId"),
            "session/set_config_option": params.get("value") if params.get("configId") == "mode" else None,
        }
        if asks_mode.get(method) == "auto" and not self._is_confining:
            raise ArgumentError("Mode auto is not available: nothing confines commands on this server.")

    def check(self, request: OpenRequest) -> None:
        """Check a request that opens a session. :raises ArgumentError: the principal may not send this request."""
        if request.servers and not self._settings.client_servers:
            names = ", ".join(describe_member(server.name) for server in request.servers[:5])
            raise ArgumentError(
                f"mcpServers: this server does not start or call MCP servers for its clients ({names}). Remove them "
                "from the client's settings, or ask the operator to add them to config.toml."
            )

    async def _check_directories(self, method: str, params: Mapping[str, Any], store: PrincipalStore) -> None:
        given = [("cwd", params.get("cwd"))]
        others = params.get("additionalDirectories")
        given += [("additionalDirectories", each) for each in (others if isinstance(others, list | tuple) else ())]
        paths = [(name, path) for name, path in given if isinstance(path, str)]  # other types are refused elsewhere
        session_id: Any = params.get("sessionId")
        is_load = method in ("session/load", "session/resume") and isinstance(session_id, str)
        if is_load and await store.access(session_id) in ("read", "write"):
            # Only the owner can change a session's directories. So other users gain no access by naming the present
            # directories of a session that is shared with them.
            row = await store.session(session_id)
            known = {row.cwd, *row.additional_directories}
            paths = [(name, path) for name, path in paths if path not in known]
        for name, path in paths:
            if not await anyio.to_thread.run_sync(self.contains, path):
                below = " or ".join(self.roots)
                raise ArgumentError(
                    f"{name} is {describe_member(path)}; on this server, expected a directory below {below}."
                )

    def contains(self, path: str) -> bool:
        """Return whether a path, with its links resolved, is in one of the principal's roots. This method blocks."""
        if not os.path.isabs(path) or "\0" in path:
            return False
        try:
            real = Path(os.path.realpath(path))
            return any(real.is_relative_to(os.path.realpath(root)) for root in self.roots)
        except (OSError, ValueError):
            return False


def _problem_of_root(root: str) -> str:
    if not os.path.isabs(root) or "\0" in root:
        return "is not an absolute path"
    top = static_part(root)
    if os.path.realpath(top) == os.sep:
        return "would allow the whole machine"
    if PRINCIPAL_PART in str(top):
        return "has {principal} beside other text; it must be a whole directory name"
    if not os.path.isdir(top):
        return f"cannot be used, because {top} is not a directory"
    return ""

"""The environment variables by which programs find the proxy of a command."""

from __future__ import annotations

from collections.abc import Mapping

from crow.tools.network import LISTENER_PORT

_PROXY = f"http://127.0.0.1:{LISTENER_PORT}"
_LOCAL = "localhost,127.0.0.1,::1"
_WAIT_S = 600
"""How long programs wait for an answer of the proxy, which may have to ask the user."""

_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_WAITS = {
    "PIP_DEFAULT_TIMEOUT": _WAIT_S,
    "UV_HTTP_TIMEOUT": _WAIT_S,
    "CARGO_HTTP_TIMEOUT": _WAIT_S,
    "npm_config_fetch_timeout": _WAIT_S * 1_000,
}
"""The variables that set how long a tool waits for an answer. Without them, these tools give up after 30 seconds or
less. pip, uv and cargo count seconds, npm counts milliseconds."""


def proxy_environment(env: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a command whose environment is `env`, together with those in `more`. They replace a
    proxy that the user has set, because the command cannot reach it."""
    variables = {form: _PROXY for name in _NAMES for form in (name, name.lower())}
    variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), _LOCAL)
    variables |= {name: str(value) for name, value in _WAITS.items() if name not in env}
    return variables | dict(more)

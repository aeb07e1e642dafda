"""`crow doctor` and `crow models`: what works, what does not, and what to do about it.

Strategy: `checks` tries one thing after the other, as a prompt would need them, and yields what it found; `shown` puts
findings and lists of models on a terminal or into a pipe. Runs outside of sessions, and stores nothing but what an
endpoint tells of itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from crow.doctor.checks import examine, repaired
from crow.doctor.shown import show_findings, show_models
from crow.domain.errors import ArgumentError
from crow.endpoints import endpoint_of, open_model
from crow.llm.listing import Offered
from crow.settings import OFFLINE, Loaded, names_offered, target_of
from crow.tools import StdioServer

__all__ = ["doctor", "models", "repair"]


async def doctor(loaded: Loaded, *, commands: Sequence[str] = (), as_json: bool = False) -> int:
    """Check everything and print it; `commands` start further MCP servers to try. The exit code."""
    servers = tuple(_server(command) for command in commands)
    return await show_findings(examine(loaded, servers=servers), as_json=as_json)


async def repair(loaded: Loaded, *, as_json: bool = False) -> int:
    """Rebuild the database if it is damaged, and print what was done. The exit code.

    :raises ~crow.domain.errors.CrowError: it cannot be done.
    """
    return await show_findings(repaired(loaded.paths.database), as_json=as_json)


async def models(loaded: Loaded, *, provider: str | None = None, as_json: bool = False) -> int:
    """Print what the endpoint of the model in use offers, or that of `provider`. The exit code.

    :raises ~crow.domain.errors.CrowError: it cannot be asked.
    """
    if loaded.problem is not None:
        raise loaded.problem
    settings = loaded.settings
    if provider is not None and provider not in settings.providers:
        there = f"there are {', '.join(settings.providers)}" if settings.providers else f"add [providers.{provider}]"
        raise ArgumentError(f'No provider "{provider}" in {loaded.paths.config_file}; {there}.')
    name = next(iter(names_offered(settings)), "") if provider is None else f"{provider}/"
    if name == OFFLINE:
        show_models((Offered(name=OFFLINE),), default=OFFLINE, as_json=as_json)
        return 0
    target = target_of(name, settings)
    if target.model:
        endpoint_of(target).check()
    model = await open_model(target, None)
    try:
        show_models(await model.models(), default=target.model, as_json=as_json)
    finally:
        await model.close()
    return 0


def _server(command: str) -> StdioServer:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ArgumentError(f"--mcp {command}: {error}; quote it as in a shell.") from None
    if not words:
        raise ArgumentError('--mcp is empty; expected a command, such as "npx -y some-server".')
    return StdioServer(name=words[0].rpartition("/")[2], command=words[0], args=tuple(words[1:]))

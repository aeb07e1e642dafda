"""What the user chooses for a session, stored with it and told to the client: mode, model, options."""

from __future__ import annotations

from crow.agent.branch import Branch
from crow.domain.events import ModeChanged, OptionsChanged
from crow.store import SessionChanges

__all__ = ["set_mode", "set_model", "set_option"]


async def set_mode(branch: Branch, mode: str) -> None:
    """Change the permission mode from the next call on."""
    if mode != branch.row.mode:
        await branch.change(SessionChanges(mode=mode))
    await branch.publish(ModeChanged(mode=mode))


async def set_model(branch: Branch, name: str) -> None:
    """Change the model from the next turn on."""
    if name != branch.row.model:
        await branch.change(SessionChanges(model=name))
    await branch.publish(OptionsChanged())


async def set_option(branch: Branch, name: str, value: str | bool) -> None:
    """Set an entry of the session's configuration, in force from the next turn on."""
    config = branch.row.config
    if config.get(name) != value:
        await branch.change(SessionChanges(config={**config, name: value}))
    await branch.publish(OptionsChanged())

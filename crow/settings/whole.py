"""All settings together: the tables of `values` and `servers`, as `config.toml` holds them."""

# No postponed annotations here: evaluating them again would double what this module costs at every start.

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from crow.settings.servers import McpServerSettings
from crow.settings.values import (
    CompactionSettings,
    Expect,
    LimitSettings,
    LogSettings,
    ModelSettings,
    PermissionSettings,
    Section,
)

__all__ = ["Settings"]


class Settings(Section):
    """Everything that can be set in crow's config.toml."""

    models: Annotated[
        tuple[str, ...], Field(strict=False), Expect('a list of model names, such as ["small", "large"]')
    ] = Field(default=(), description="Further models of the same endpoint, offered for choice in the editor.")
    model: ModelSettings = Field(default_factory=ModelSettings)
    compaction: CompactionSettings = Field(default_factory=CompactionSettings)
    permissions: PermissionSettings = Field(default_factory=PermissionSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    mcp_servers: Annotated[
        Mapping[Annotated[str, Field(min_length=1, max_length=64)], McpServerSettings],
        Expect("a table for each server: [mcp_servers.NAME] with command or url"),
    ] = Field(default_factory=dict, description="MCP servers of every session, by name.")

"""What the user decides: one frozen `Settings` from flag, environment, the user's `config.toml` and defaults.

A setting that cannot be used is reported as a `problem` beside the defaults, so that an editor can still open sessions
and show the words at the first prompt. Nothing in a workspace is ever read here.
"""

from crow.settings.endpoints import Target, names_offered, target_of
from crow.settings.load import Loaded, Paths, load_settings
from crow.settings.values import (
    OFFLINE,
    CompactionSettings,
    EditorSettings,
    LimitSettings,
    LogSettings,
    McpServerSettings,
    ModelSettings,
    PermissionSettings,
    Settings,
    expanded,
)

__all__ = [
    "OFFLINE",
    "CompactionSettings",
    "EditorSettings",
    "LimitSettings",
    "Loaded",
    "LogSettings",
    "McpServerSettings",
    "ModelSettings",
    "Paths",
    "PermissionSettings",
    "Settings",
    "Target",
    "expanded",
    "load_settings",
    "names_offered",
    "target_of",
]

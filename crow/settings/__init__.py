"""The user's settings, from flags, environment, `config.toml` and defaults."""

from crow.settings.endpoints import Target, edit_tool_of, fallback_of, names_offered, target_of
from crow.settings.load import Loaded, load_settings
from crow.settings.values import OFFLINE, ModelSettings, Settings

__all__ = [
    "OFFLINE",
    "Loaded",
    "ModelSettings",
    "Settings",
    "Target",
    "edit_tool_of",
    "fallback_of",
    "load_settings",
    "names_offered",
    "target_of",
]

"""Crow: a coding agent for editors that speak the Agent Client Protocol."""

from __future__ import annotations

from crow.version import __version__ as __version__

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would double the import time
if TYPE_CHECKING:
    from crow.sessions import Sessions as Sessions


def __getattr__(name: str) -> object:
    """Import `Sessions` on first use, because every command of crow imports this package."""
    if name == "Sessions":
        from crow.sessions import Sessions

        return Sessions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

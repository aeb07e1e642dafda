"""Crow: a coding agent for editors that speak the Agent Client Protocol."""

from __future__ import annotations

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would double the import time
if TYPE_CHECKING:
    from crow.sessions import Sessions as Sessions
    from crow.version import __version__ as __version__


def __getattr__(name: str) -> object:
    """Import a member of this package when it is first used, because every command of crow imports the package."""
    if name == "Sessions":
        from crow.sessions import Sessions

        return Sessions
    if name == "__version__":
        from crow.version import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

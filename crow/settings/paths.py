"""Where crow keeps what.

Strategy: everything below CROW_HOME if that is set, else the platform's own directories, else (no HOME, no entry in
the user database) a private directory below the temporary one. Makes no directory but that last one, and reads none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Paths", "find_paths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Absolute paths, of which none need exist. `trace`: where to record the connection; None for nowhere."""

    config_file: Path
    data_dir: Path
    database: Path
    log_file: Path
    trace: Path | None = None


def find_paths(env: Mapping[str, str]) -> Paths:
    """The paths for this user; CROW_CONFIG names another configuration file. Relative ones start at the cwd."""
    if env.get("CROW_HOME"):
        config_dir = data_dir = log_dir = _absolute(env["CROW_HOME"])
    else:
        from platformdirs import PlatformDirs  # CROW_HOME saves its import

        dirs = PlatformDirs("crow", appauthor=False)
        config_dir, data_dir, log_dir = dirs.user_config_path, dirs.user_data_path, dirs.user_log_path
        if env.get("HOME") == "" or not all(path.is_absolute() for path in (config_dir, data_dir, log_dir)):
            config_dir = data_dir = log_dir = _homeless_dir()
    return Paths(
        config_file=_absolute(env["CROW_CONFIG"]) if env.get("CROW_CONFIG") else config_dir / "config.toml",
        data_dir=data_dir,
        database=data_dir / "crow.db",
        log_file=log_dir / "crow.log",
        trace=_absolute(env["CROW_TRACE"]) if env.get("CROW_TRACE") else None,
    )


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _homeless_dir() -> Path:
    """A directory of this user alone: the same for every process where that can be had, else a new one."""
    import tempfile  # needed by hardly anybody

    if hasattr(os, "getuid"):
        own = Path(tempfile.gettempdir()) / f"crow-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if own.is_dir() and not own.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return own
    # Somebody else may have made a directory of that name, to read along or to set an endpoint.
    return Path(tempfile.mkdtemp(prefix="crow-"))

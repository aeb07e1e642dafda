"""Reads the settings for a command."""

from __future__ import annotations

import argparse
import os

from crow.log import start_logging
from crow.settings import Loaded, load_settings


def load(options: argparse.Namespace) -> Loaded:
    """Read the settings. The options of the command line come before all other sources."""
    flags = {
        "model.name": "model",
        "model.base_url": "base_url",
        "permissions.mode": "mode",
        "log.level": "log_level",
        "serve.listen": "listen",
        "serve.tls_cert": "tls_cert",
        "serve.tls_key": "tls_key",
        "serve.log_file": "log_file",
    }
    given = {key: getattr(options, name, None) or "" for key, name in flags.items()}
    return load_settings(given, os.environ)


def load_and_log(options: argparse.Namespace) -> Loaded:
    """Read the settings, and start to write the log."""
    loaded = load(options)
    start_logging(loaded.paths.log_file, loaded.settings.log.level, loaded.settings.secrets())
    return loaded

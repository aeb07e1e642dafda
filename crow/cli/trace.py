"""`crow trace`: prints a recording of an ACP connection."""

from __future__ import annotations

import argparse
from pathlib import Path

from crow.cli.output import say
from crow.trace.record import read_recording
from crow.trace.show import format_recording


def run_trace(options: argparse.Namespace) -> int:
    """Print the recording, one line for each message."""
    for line in format_recording(read_recording(Path(options.file))):
        say(line)
    return 0

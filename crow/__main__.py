"""Starts `crow`, and `python -m crow`, which imports nothing from the current directory."""

import os
import sys


def main() -> int:
    """Run the command line of this process and return the exit code."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        # The parser would take twice as long as Python itself. `make schemas` writes its help into this file.
        with open(os.path.join(os.path.dirname(__file__), "cli", "help.txt"), encoding="utf-8") as text:
            sys.stdout.write(text.read())
        return 0

    from crow.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` put the current directory on sys.path. Files of a workspace must not replace packages.

    sys.exit(main())

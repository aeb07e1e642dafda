"""Starts `crow` and `python -m crow` without importing anything from the current directory."""

import os
import sys


def main() -> int:
    """Run the command in `sys.argv` and return the exit code."""
    if sys.argv[1:] in (["--help"], ["-h"]) and sys.stdout is not None:
        # Building the argument parser would take twice as long as starting Python. `make schemas` writes help.txt.
        with open(os.path.join(os.path.dirname(__file__), "cli", "help.txt"), encoding="utf-8") as text:
            words = text.read()
        try:
            sys.stdout.write(words)
            sys.stdout.flush()
        except OSError as error:
            from crow.stdio import fail

            return fail(error)
        return 0

    if sys.argv[1:2] in ([], ["acp"]):
        from crow.bridge import run_if_asked, run_with_resident

        for run in (run_if_asked, run_with_resident):
            if (exit_code := run(sys.argv[1:])) is not None:
                return exit_code

    from crow.cli import main as run_command
    from crow.stdio import run_with_output

    return run_with_output(run_command)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` put the current directory on sys.path. Files of a workspace must not replace packages.

    sys.exit(main())

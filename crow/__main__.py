"""Starts `crow` and `python -m crow` without importing anything from the current directory."""

import os
import sys

import crow


def main() -> int:
    """Run the command in `sys.argv` and return the exit code."""
    settle_places(sys.argv[0])
    if sys.argv[1:] in (["--help"], ["-h"]) and sys.stdout is not None:
        # Building the argument parser takes 13 ms, as long as all the rest. `make schemas` writes help.txt.
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

    from crow.terminal.early import EARLY_KEYS, opens_line_editor

    try:
        if opens_line_editor(sys.argv[1:]):
            EARLY_KEYS.keep()
        from crow.cli import main as run_command
        from crow.stdio import run_with_output

        return run_with_output(run_command)
    except Exception as error:
        from crow.domain.errors import NO_MEMORY, lacks_memory

        if not lacks_memory(error):
            raise
        sys.stderr.write(f"crow: {NO_MEMORY}\n")
        return 1
    finally:
        EARLY_KEYS.restore()


def settle_places(script: str) -> None:
    """Resolve the links in the paths of the directories from which Python imports modules, once and for all. Remove the
    directory of the program `crow` from these directories.

    Crow imports most of its code later. By then, a command may have replaced a link in the workspace.
    """
    beside = os.path.realpath(os.path.dirname(script))
    places = [os.path.realpath(place) if place else place for place in sys.path]
    sys.path[:] = [place for place in places if place != beside]
    crow.__path__[:] = map(os.path.realpath, crow.__path__)
    sys.prefix, sys.base_prefix = map(os.path.realpath, (sys.prefix, sys.base_prefix))
    if sys.executable:
        folder, name = os.path.split(sys.executable)
        sys.executable = os.path.join(os.path.realpath(folder), name)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` put the current directory on sys.path. Files of a workspace must not replace packages.

    sys.exit(main())

"""`python -m crow` runs the command `crow`, but imports nothing from the current directory."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` put the current directory on sys.path. Files of a workspace must not replace packages.

    from crow.cli import main

    sys.exit(main())

"""`python -m crow`: the command `crow`, without imports from the current directory."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # added by `-m`: a workspace must not replace a package

    from crow.cli import main

    sys.exit(main())

"""`python -m crow`: the same as the command `crow`, which imports nothing from where it is started."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # put there by `-m`: nothing in a workspace may stand in for a package

    from crow.cli import main

    sys.exit(main())

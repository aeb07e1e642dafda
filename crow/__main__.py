"""`python -m crow`: the same as the command `crow`."""

import sys

from crow.cli import main

if __name__ == "__main__":
    sys.exit(main())

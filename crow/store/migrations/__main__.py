"""Write the schema to standard output: `python -m crow.store.migrations > schemas/store.sql`."""

from __future__ import annotations

import sys

from crow.store.migrations import schema

sys.stdout.write(schema())

"""Values and pure functions: no I/O, no third-party package, no clock."""

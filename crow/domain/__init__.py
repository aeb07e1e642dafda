"""Values and pure functions, without I/O, clock or third-party packages."""

"""The real process over stdio, measured as an editor would: see `__main__`."""

"""Limits on cost that are counted, not timed."""

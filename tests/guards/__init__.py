"""Limits on cost, counted instead of timed."""

"""Counts the questions that a user is asked about commands; see `__main__`."""

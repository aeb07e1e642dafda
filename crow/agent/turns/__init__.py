"""Turns: from a stored prompt to its stop reason."""

"""Crow: a coding agent for editors that speak the Agent Client Protocol."""

__version__ = "0.1.0"

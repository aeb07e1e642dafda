"""Checks whether an agent follows the rules of the Agent Client Protocol."""

__version__ = "0.1.0"

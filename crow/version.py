"""The version of crow."""

__version__ = "0.1.0"

"""Measures the real process over stdio."""

"""Subagents: kinds, and the tasks that run."""

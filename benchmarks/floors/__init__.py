"""Minimal agents that show the least an agent can cost. Programs, not modules."""

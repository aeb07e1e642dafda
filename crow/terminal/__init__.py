"""Clients for people at a terminal; they use the front end in this process through the same protocol as an editor."""

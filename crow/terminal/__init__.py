"""Clients for use at a terminal. They use the same protocol as an editor, but the front end runs in the process of the
client."""

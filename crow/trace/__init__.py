"""Recordings of an ACP connection: made, shown, and checked against the protocol."""

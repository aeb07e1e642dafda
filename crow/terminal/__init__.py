"""Clients for use at a terminal. They use the same protocol as an editor. The front end runs in the client's process
or, with `--connect`, in a server."""

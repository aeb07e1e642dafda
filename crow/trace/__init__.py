"""Recordings of an ACP connection: made, shown, and judged against the protocol.

Strategy: `record` writes what crosses the wire, secrets masked; `recording` reads such a file, or any agent's bare
messages; `show` renders one for a person; `schema` and `order` say what the protocol does not allow, and `check` puts
them to a whole recording. The tests of crow's own wire use the same two judges. Knows the protocol, nothing of crow.
"""

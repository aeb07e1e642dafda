"""`crow serve`: the protocol over WebSocket, for several clients. Needs the extra `crow-acp[serve]`."""

"""`crow serve`: serves the protocol over WebSocket to several clients. Needs the packages of the extra `serve`."""

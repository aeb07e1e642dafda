"""`crow serve`: serves the protocol over WebSocket to several clients. It needs the packages of the extra `serve`."""

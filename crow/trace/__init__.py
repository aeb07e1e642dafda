"""Records ACP connections, shows the recordings, and checks them against the protocol."""

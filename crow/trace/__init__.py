"""Records ACP connections, shows recordings, and checks recordings and running agents against the protocol."""

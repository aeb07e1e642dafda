"""Records the messages of ACP connections in files, and shows such recordings."""

"""The front end: serves the Agent Client Protocol (ACP) to clients. Only this package imports `acp`."""

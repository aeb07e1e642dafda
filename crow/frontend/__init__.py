"""Serves the Agent Client Protocol: connects lines on stdin and stdout to the agent. Only this package imports acp."""

"""The Agent Client Protocol, from lines on stdin and stdout to calls of the agent; the only package to import acp."""

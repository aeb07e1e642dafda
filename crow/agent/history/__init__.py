"""The session's log as the agent works on it: the branch, going back in it, searching it, titles, usage."""

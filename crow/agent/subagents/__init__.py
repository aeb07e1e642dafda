"""Sub-agents: kinds, and the tasks that run."""

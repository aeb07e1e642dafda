"""The smallest agents: what an agent costs at least. Programs, not modules."""

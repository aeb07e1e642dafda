"""Makes what a release publishes beside the wheel: archives with a Python of their own, and the registry's entry."""

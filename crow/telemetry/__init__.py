"""Turns the log into OpenTelemetry traces: live, after each turn, and for past sessions."""

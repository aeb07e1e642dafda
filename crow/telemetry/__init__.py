"""Converts the log to OpenTelemetry traces: live, after each turn, and for past sessions."""

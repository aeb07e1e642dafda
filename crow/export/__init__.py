"""Exports a session for people to read: as one HTML file, with secrets masked."""

"""Connects chats to crow: each channel or thread of a chat is a session."""

__version__ = "0.1.0"

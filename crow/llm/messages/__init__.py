"""Anthropic's Messages: requests and answers."""

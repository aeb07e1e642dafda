"""The wire of OpenAI's Chat Completions."""

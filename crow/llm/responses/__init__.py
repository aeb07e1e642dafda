"""The wire of OpenAI's Responses, which Open Responses describes for every server."""

"""Open sessions: prompts, claims, and what runs between two turns."""

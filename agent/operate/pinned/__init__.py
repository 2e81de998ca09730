"""Answers without the agent: from the pinned objects, and from the state that the agent saved."""

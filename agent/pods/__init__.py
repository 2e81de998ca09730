"""The pod model: pods, their conditions and their state."""

"""A real container runtime, in the tests' own node, and what podgate learns from it."""

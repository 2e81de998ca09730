"""Kubernetes as the agent sees it: the API server's pods, and what it is told about them."""

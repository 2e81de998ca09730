"""The probes of all pods, as the agent runs them."""

"""What this node should use of each service, for whoever runs on it."""

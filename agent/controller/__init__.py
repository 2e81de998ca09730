"""The controller of a cluster: what one process does for all nodes."""

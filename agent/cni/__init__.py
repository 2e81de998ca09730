"""podgate-cni: its entry in the node's CNI configuration, and its state file."""

"""podgate-cni by its protocol, and its place in a node's CNI configuration."""

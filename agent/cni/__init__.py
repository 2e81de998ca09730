"""podgate-cni in the node's network: its place there, and what the agent leaves for it."""

"""The kubelet: its identity, the ports that it may reach, and its pods API."""

"""`podgate explain`: what happens to a flow or a pod on this node, and why."""

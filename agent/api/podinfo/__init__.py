"""PodInfo: the conditions of this node's pods, for every process on the node."""

"""The read-only APIs on the node: PodInfo, the kubelet's pods API, service endpoints."""

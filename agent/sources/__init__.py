"""Where pods come from: manifests, or a cluster and its container runtime."""

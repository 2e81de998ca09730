"""Sources of pods: manifests, or a cluster and its container runtime."""

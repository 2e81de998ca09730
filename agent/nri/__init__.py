"""NRI: the container runtime calls podgate for each new sandbox, before its first container."""

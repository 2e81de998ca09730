"""Pods' sandboxes, asked of the container runtime over the CRI."""

"""Kubernetes API: watches of pods, nodes and namespaces, condition patches and Events."""

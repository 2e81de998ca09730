"""Probe definitions, and how pod manifests and annotations specify them."""

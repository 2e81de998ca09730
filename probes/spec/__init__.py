"""What a probe is, and how pod manifests and annotations write it."""

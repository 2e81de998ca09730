"""The messages of version v1alpha1 of both APIs. docs/services.md has the policy for versions."""

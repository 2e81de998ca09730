"""The messages of version v1alpha1 of the services' API."""

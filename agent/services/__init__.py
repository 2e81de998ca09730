"""What follows services: their endpoints for other programs, the hub and the service proxies."""

"""What sig-network's e2e tests of services check (test/e2e/network of Kubernetes)."""

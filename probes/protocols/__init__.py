"""The protocols of probes, and the sockets that transport them."""

"""What probes say on the wire, and the sockets that carry it."""

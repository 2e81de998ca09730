"""Servers of all processes: ports, and what clients can hold of them."""

"""Clients of the node-local APIs; other programs import them. Only grpcio is needed."""

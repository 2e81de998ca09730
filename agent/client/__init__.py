"""Clients of the node-local APIs, for other programs. They need grpcio and protobuf only."""

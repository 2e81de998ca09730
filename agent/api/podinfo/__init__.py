"""What is true of the node's pods, told to anybody on the node over gRPC."""

import os

# gRPC's core writes lines of its own beside the agent's log whenever a peer goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

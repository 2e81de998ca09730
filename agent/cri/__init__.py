"""The container runtime: its sandboxes and containers, over the CRI."""

import os

# Otherwise gRPC's core writes lines of its own to the log whenever a runtime stops.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

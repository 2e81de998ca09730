"""Pods' sandboxes, asked of the container runtime over the CRI."""

import os

# gRPC's core writes lines of its own beside the agent's log whenever a runtime goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

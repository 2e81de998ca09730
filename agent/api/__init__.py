"""The read-only APIs on the node: PodInfo, the kubelet's pods API, service endpoints."""

import os

# gRPC's core logs to stderr by itself whenever a client disconnects. It reads this once, on import.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

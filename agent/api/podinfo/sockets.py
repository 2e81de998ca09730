"""Where PodInfo and the pods API are served, below the run directory.

In directories of their own: clients mount directories, since each agent creates the sockets.
"""

import pathlib


def podinfo(run_directory: pathlib.Path) -> pathlib.Path:
    """For every process on the node."""
    return run_directory / "podinfo" / "podinfo.sock"


def inner(run_directory: pathlib.Path) -> pathlib.Path:
    """gRPC's own, in a directory that only root enters."""
    return run_directory / "admin" / "podinfo.sock"


def pods_api(run_directory: pathlib.Path) -> pathlib.Path:
    """The kubelet's pods API, for root."""
    return run_directory / "pods-api" / "pods-api.sock"

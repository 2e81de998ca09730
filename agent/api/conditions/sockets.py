"""Where the Conditions API is served, below the run directory.

In a directory of its own: clients mount the directory, since each agent creates the socket.
"""

import pathlib


def conditions(run_directory: pathlib.Path) -> pathlib.Path:
    """For every process on the node; ConditionOwners decide who may report."""
    return run_directory / "conditions" / "conditions.sock"


def inner(run_directory: pathlib.Path) -> pathlib.Path:
    """gRPC's own, in a directory that only root enters."""
    return run_directory / "admin" / "conditions.sock"

"""podgate-cni in the cluster: the agent installs it in the runtime's CNI configuration."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests import polling
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode


@contextlib.contextmanager
def installed(
    node: OneNode, podgate: Deployment, *, arguments: Sequence[str] = ()
) -> Iterator[None]:
    """Roll the agent out with podgate-cni and these arguments, and without both afterwards."""
    directories = (node.runtime.cni_directory, node.runtime.plugins)
    where = [f"--cni-conf-dir={directories[0]}", f"--cni-bin-dir={directories[1]}"]
    podgate.set_arguments([*where, *arguments], directories=directories)
    polling.wait_until("podgate-cni is installed", lambda: _is_installed(directories[0]))
    yield
    podgate.set_arguments([])
    remove = [sys.executable, "-m", "agent", "cni", "remove", *where]
    # The output of benches is their figures.
    subprocess.run(remove, check=True, timeout=60, stdout=subprocess.DEVNULL)


def _is_installed(directory: pathlib.Path) -> bool:
    return any("podgate-cni" in file.read_text() for file in directory.glob("*.conflist"))

"""Who reaches what: each source connects to each target; two such results are compared."""

import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.runtime import node_cgroups

_DIALER = pathlib.Path(__file__).with_name("dialer.py")
_ERRORS = "E"
"""What the name of an error begins with; all else is the address that the server saw."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A process that connects: in the network namespace of the process `pid` and in a cgroup, or
    where this process is. node: its node, empty outside; is_host: in that node's own namespace."""

    name: str
    node: str
    is_host: bool
    pid: int = 0
    cgroup: pathlib.Path | None = None

    def command(self) -> list[str]:
        dialer = [sys.executable, "-S", "-E", str(_DIALER)]
        if not self.pid:
            return dialer
        inside = ["nsenter", "-t", str(self.pid), "-n", "--", *dialer]
        assert self.cgroup is not None, f"{self.name} has no cgroup"
        return node_cgroups.command_in(self.cgroup, inside)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A way to a server. node: the server's; by: the node whose port it is, empty for addresses of
    the pod and of services; is_local: of a service with `externalTrafficPolicy: Local`."""

    name: str
    address: str
    port: int
    protocol: str
    node: str
    by: str = ""
    is_local: bool = False

    @property
    def can_connect(self) -> bool:
        """Another node's port leads nowhere if its service is for local endpoints."""
        return not self.is_local or self.by == self.node


Matrix = dict[tuple[Source, Target], str]


def run(sources: Sequence[Source], targets: Sequence[Target]) -> Matrix:
    """All connects, those of a source at once."""
    listed = json.dumps([(one.name, one.address, one.port, one.protocol) for one in targets])

    def results(source: Source) -> dict[str, str]:
        done = subprocess.run(
            source.command(), input=listed, text=True, capture_output=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{source.name}: {done.stderr}"
        found: dict[str, str] = json.loads(done.stdout)
        return found

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(results, sources))
    return {
        (source, target): row[target.name]
        for source, row in zip(sources, rows, strict=True)
        for target in targets
    }


def is_open(result: str) -> bool:
    return not result.startswith(_ERRORS)


def is_own(source: Source, target: Target) -> bool:
    """A process of a node to a server of this node: what podgate closes. A UDP port of another node
    stays open (docs/security.md)."""
    is_another_s = target.by not in ("", target.node)
    is_closed = target.protocol == "tcp" or not is_another_s
    return source.is_host and source.node == target.node and is_closed


def differences(
    before: Matrix, after: Matrix, *, closed: Callable[[Source, Target], bool] | None = None
) -> list[str]:
    """Cells that are not as expected: closed ones that connect, and others that are not as before.
    Without closed ones, nothing may differ."""
    found = []
    expected = {(source.name, target.name): result for (source, target), result in before.items()}
    for (source, target), result in after.items():
        earlier = expected[source.name, target.name]
        if closed is not None and closed(source, target):
            if is_open(result):
                found.append(f"{source.name} to {target.name}: open, the server saw {result}")
        elif result != earlier and (is_open(result) or is_open(earlier)):
            # Errors differ by the kernel's limit of ICMP messages.
            found.append(f"{source.name} to {target.name}: {result}, before {earlier}")
    return found


def summary(made: Matrix) -> str:
    """For the record."""
    count = sum(map(is_open, made.values()))
    return f"{count} of {len(made)} connects open"

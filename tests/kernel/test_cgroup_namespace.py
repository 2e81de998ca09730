"""A node that is a container, as kind's: the node's own cgroup is the root of all that it sees."""

import contextlib
import dataclasses
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, map_specs, pins
from bpf.maps import Map
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_agent import is_dropped, reaches
from tests.kernel.test_policies import OTHER_PORT, PORT, Node, policy

pytestmark = pytest.mark.kernel

# As a container runtime starts a node's first process: namespaces of its own, and the cgroup
# namespace's root as the only cgroup v2 that is mounted.
_ENTER = """
echo $$ > "$0/cgroup.procs"
exec unshare --cgroup --pid --fork --kill-child --mount --mount-proc sh -ec '
grep " - cgroup2 " /proc/self/mountinfo | cut -d" " -f5 | sort -r | xargs -n1 umount -l
mount -t cgroup2 cgroup2 "$0"
exec "$@"
' "$@"
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """A `Launch` on a node that is a container. cgroup: the node's own."""

    cgroup: Cgroup

    def __call__(
        self, arguments: Sequence[str], log: IO[bytes], errors: IO[bytes] | None = None, /
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "agent", *arguments]
        return subprocess.Popen(
            ["sh", "-ec", _ENTER, str(self.cgroup.directory), str(cgroup2_mount()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=errors or log,
        )

    @contextlib.contextmanager
    def below(self, name: str) -> Iterator[tuple[Cgroup, str]]:
        """A cgroup of the node, and its path on the node."""
        with cgroups.cgroup(name, below=self.cgroup) as made:
            yield made, f"/{name}"


@pytest.fixture
def container(isolated: None) -> Iterator[Container]:
    with cgroups.cgroup() as above, cgroups.cgroup("node", below=above) as made:
        yield Container(made)


@pytest.fixture
def node(container: Container, tmp_path: pathlib.Path, installed_pins: pins.Pins) -> Iterator[Node]:
    operator = AgentProcess(tmp_path, installed_pins.bpffs, container)
    with container.below("kubelet") as (_, path):
        operator.kubelet = ("--kubelet", f"cgroup:{path}")
        yield Node(operator, tmp_path / "rules")
        operator.stop(signal.SIGKILL)


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT), pod.listen(OTHER_PORT):
        yield pod


def test_only_the_kubelet_of_the_node_reaches_the_declared_port(
    node: Node, container: Container, web: LabPod
) -> None:
    node.start(web)
    kubelet = Cgroup(container.cgroup.directory / "kubelet", f"{container.cgroup.path}/kubelet")
    with container.below("stranger") as (stranger, _):
        assert reaches(kubelet, web, PORT)
        assert is_dropped(stranger, web, PORT)
        assert is_dropped(kubelet, web, OTHER_PORT)


def test_rules_for_cgroups_below_one_admit_these(
    node: Node, container: Container, web: LabPod
) -> None:
    with (
        container.below("service.slice") as (above, path),
        cgroups.cgroup("a.service", below=above) as below,
        container.below("stranger") as (stranger, _),
    ):
        subtree = {"cgroup": {"path": path, "match": "subtree"}}
        node.write("a.yaml", policy("service", subtree, OTHER_PORT))
        node.start(web)
        assert reaches(below, web, OTHER_PORT)
        assert is_dropped(stranger, web, OTHER_PORT)
    assert node.rules().problems == []


def test_cgroup_of_pods_has_its_depth_below_the_root_of_all(
    node: Node, container: Container, web: LabPod
) -> None:
    """By it programs distinguish processes of pods from the host's."""
    with container.below("kubepods") as (pods, _):
        node.start(web)
        with Map.open(
            str(pins.Pins(node.operator.bpffs).map(map_specs.CONFIG)), map_specs.CONFIG
        ) as config:
            held = abi.CConfig.from_buffer_copy(config.get(bytes(4)) or b"")
        assert (held.pods_cgroup, held.pods_cgroup_level) == (pods.id, pods.level)

"""Sources of drops that a rule admits by now: rules change, and drops stay counted."""

import pathlib

from agent.linux.cgroups import ancestors, cgroup2_mount, existing
from bpf import loader
from bpf.drop_sources import DropSource
from bpf.gate_config import GateConfig
from bpf.gate_reader import GateReader
from bpf.node_config import NodeConfig
from bpf.rule_evaluation import Cgroup, NewFlow, NodeFacts, find_rule
from bpf.verdicts import Mode


class AdmittedSources:
    """The rules that gates have when it is made, which it reads from the maps. Blocks."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._gates = GateReader(loaded)
        self._node = NodeConfig(loaded).facts()
        self._root = cgroup2_mount()
        self._configs: dict[int, GateConfig | None] = {}
        self._cgroups: dict[tuple[int, str], Cgroup] = {}

    def has(self, seen: DropSource, path: str) -> bool:
        """path: of the source's cgroup, or a text in parentheses without one."""
        if seen.ifindex not in self._configs:
            self._configs[seen.ifindex] = self._gates.get(seen.ifindex)
        config = self._configs[seen.ifindex]
        if config is None or not config.rules:
            return False
        key = seen.cgroup, path
        if seen.cgroup and key not in self._cgroups:
            self._cgroups[key] = current_cgroup(seen.cgroup, path, self._root)
        return is_admitted(seen, self._cgroups.get(key), config, self._node)


def is_admitted(
    seen: DropSource, cgroup: Cgroup | None, config: GateConfig, node: NodeFacts
) -> bool:
    """Whether a rule of the gate admits new flows of this source, to all of its ports.

    An unidentified kubelet opens ports to other processes, which no rule admits; in strict it
    connects through the relay.
    """
    is_kubelet = node.is_kubelet_cgroup(cgroup) and config.mode is not Mode.STRICT
    # With many ports it is 0, which rules for all ports alone include.
    flow = NewFlow(seen.protocol, seen.port, cgroup, is_kubelet, is_kernel=cgroup is None)
    return find_rule(config.rules, flow) is not None


def current_cgroup(number: int, path: str, root: pathlib.Path | None) -> Cgroup:
    """The cgroup that is now at this path: a unit has another at each start.

    number: that of the drops. If the cgroup is gone, those above it that exist; rules that include
    cgroups below these admit its successor. root: the mount of cgroup v2.
    """
    if root is None or not path.startswith("/"):
        return Cgroup(number, path, ())
    if found := ancestors(root, path):
        return Cgroup(found[-1], path, tuple(found))
    return Cgroup(number, path, tuple(existing(root, path)))

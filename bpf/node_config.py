"""The configuration shared by all gates and hooks: kubelet, heartbeat, host namespace, tunnels."""

import time
from collections.abc import Callable, Iterable

from bpf import abi, loader, map_specs
from bpf.rule_evaluation import NodeFacts

_KEY = bytes(4)


class NodeConfig:
    """The one value of the config map. One writer: the agent. Each change is atomic."""

    def __init__(self, loaded: loader.Loaded, *, now_ns: Callable[[], int] | None = None) -> None:
        """now_ns: CLOCK_MONOTONIC, the clock of bpf_ktime_get_ns."""
        self._map = loaded.map(map_specs.CONFIG)
        self._remade = loaded.map(map_specs.KUBELET_REMADE)
        self._now_ns = now_ns or time.monotonic_ns

    def set_kubelet(self, cgroup: int | None) -> None:
        """Admit sockets of this cgroup (its id) to the ports that pods declare.

        None: unknown. Then host processes outside pods are admitted, until there is one or the
        kernel records one for the followed unit.
        """
        self._change(kubelet_cgroup=cgroup or 0)

    def set_kubelet_unit(self, number: int) -> None:
        """Admit the cgroup that the kernel has recorded for this unit, too, and open nothing for
        want of a heartbeat. 0: the kernel follows no unit. `bpf/kubelet_unit.py` calls this.
        """
        self._change(kubelet_unit=number)

    def set_pods(self, cgroup: int | None, level: int = 0) -> None:
        """Set the cgroup above all pods' (kubepods), and its depth below the root in directories.

        Processes below it never count as the kubelet, with or without a heartbeat.
        """
        self._change(pods_cgroup=cgroup or 0, pods_cgroup_level=level)

    def set_limits(self, *, stale_after_seconds: float, dead_man_seconds: float) -> None:
        """Set the times without a heartbeat after which gates admit more; 0 means never."""
        self._change(
            stale_after_ns=int(stale_after_seconds * 1e9),
            dead_man_ns=int(dead_man_seconds * 1e9),
        )

    def set_netns(self, cookie: int | None) -> None:
        """Set the host's network namespace (SO_NETNS_COOKIE): hooks act for its sockets only.

        None: for no sockets.
        """
        self._change(node_netns=cookie or 0)

    def set_tunnel_ports(self, ports: Iterable[int]) -> None:
        """Set the UDP ports of the host's tunnels, to which host processes may not send.

        Raises `ValueError` for more than 8.
        """
        distinct = sorted(set(ports))
        if len(distinct) > abi.TUNNEL_PORTS:
            raise ValueError(
                f"the node has tunnels on {len(distinct)} UDP ports and podgate guards "
                f"{abi.TUNNEL_PORTS}; give tunnels of one kind the same port"
            )
        config = self.read()
        config.tunnel_ports[: len(distinct)] = distinct
        config.tunnel_port_count = len(distinct)
        self._map.set(_KEY, bytes(config))

    def set_ovs(self, *, is_there: bool) -> None:
        """Set whether the node has an Open vSwitch datapath. It strips the ingress interface of
        packets that it forwards, so packets without a socket pass.
        """
        self._change(has_ovs=int(is_there))

    def set_node_addresses(self, *, are_kept: bool) -> None:
        """Set whether the map of the host's addresses is kept up to date."""
        self._change(has_node_addresses=int(are_kept))

    def set_enforced(self, *, has_any: bool) -> None:
        """Set whether a pod's gate drops packets of the host."""
        self._change(has_enforced=int(has_any))

    def beat(self) -> None:
        """Write the agent's heartbeat."""
        self._change(heartbeat_ns=self._now_ns())

    def read(self) -> abi.CConfig:
        value = self._map.get(_KEY)
        assert value is not None  # an array has all of its keys
        return abi.CConfig.from_buffer_copy(value)

    def facts(self) -> NodeFacts:
        """What gates and hooks compare now, with what the kernel has recorded of the kubelet."""
        value = self._remade.get(_KEY)
        assert value is not None  # an array has all of its keys
        return NodeFacts.of(self.read(), abi.CKubeletRemade.from_buffer_copy(value))

    def _change(self, **fields: int) -> None:
        config = self.read()
        for name, value in fields.items():
            setattr(config, name, value)
        self._map.set(_KEY, bytes(config))

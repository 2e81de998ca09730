"""The source of a flow, as `podgate explain --from` names it. Reads /proc and cgroups; blocks."""

import dataclasses
import ipaddress
import pathlib
from collections.abc import Callable, Mapping

from agent.errors import PodgateError
from agent.linux.cgroups import ancestors, cgroup2_mount, cgroup_paths
from agent.linux.pods_cgroup import PodsCgroup
from agent.linux.procfs import Procfs
from agent.operate.explain import facts
from agent.operate.explain.facts import Source
from agent.operate.explain.pods import NamedPods
from agent.policy.api_types import RuleSource
from agent.policy.source_cgroups import SourceCgroups
from bpf.abi import IPAddress
from bpf.rule_evaluation import ROOT_CGROUP, Cgroup

KINDS = ("pid", "cgroup", "unit", "pod", "ip")

# No cgroup has it: of a host process of which nothing else is known.
_SOME_CGROUP = (1 << 64) - 1


class SourceError(PodgateError):
    """The source does not exist, or cannot be read; one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class SourceName:
    """A source as named: one of `KINDS`, and its value; or the kind "kernel" without one."""

    kind: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "SourceName":
        """Raises `ValueError` with one sentence."""
        if text == "kernel":
            return cls("kernel", "")
        kind, _, value = text.partition(":")
        if kind not in KINDS or not value:
            forms = ", ".join(f"{kind}:VALUE" for kind in KINDS)
            raise ValueError(f"{text!r} is no source; use one of {forms}, or kernel")
        if kind == "pid" and not value.isdecimal():
            raise ValueError(f"{value!r} is no process id; use its number, as in pid:4711")
        if kind == "cgroup" and not value.startswith("/"):
            raise ValueError(
                f"{value!r} is no cgroup; use its path from the root, as in /proc/PID/cgroup"
            )
        if kind == "ip":
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError(f"{value!r} is no IP address") from None
        return cls(kind, value)


class Sources:
    """Finds sources on this node."""

    def __init__(
        self,
        pods: NamedPods,
        *,
        own_addresses: frozenset[IPAddress],
        owners: Mapping[IPAddress, int],
        procfs: Procfs | None = None,
        root: pathlib.Path | None = None,
        path_of: Callable[[int], str] | None = None,
    ) -> None:
        """own_addresses: the node's; owners: of pods' addresses; root: the mount of cgroup v2;
        path_of: the path of a cgroup by its id."""
        self._pods = pods
        self._own_addresses = own_addresses
        self._owners = owners
        self._procfs = procfs or Procfs()
        self._root = root or cgroup2_mount()
        self._path_of = path_of or (lambda number: cgroup_paths({number})[number])

    def find(self, name: SourceName) -> Source:
        """Raises `SourceError`."""
        match name.kind:
            case "kernel":
                return Source(facts.KERNEL, "the host kernel")
            case "pid":
                return self._process(int(name.value))
            case "unit":
                return self._unit(name.value)
            case "pod":
                return self._pod(name.value)
            case "ip":
                return self._address(ipaddress.ip_address(name.value))
        path = name.value.rstrip("/") or "/"
        return Source(facts.HOST, f"a process in cgroup {path}", self._cgroup(path))

    def _process(self, pid: int) -> Source:
        namespace = self._procfs.namespace(pid, "net")
        path = self._procfs.cgroup(pid)
        if namespace is None or path is None:
            raise SourceError(
                f"process {pid} does not exist, or its namespace cannot be read; look it up with "
                "'pgrep -a NAME', and run as root"
            )
        text = f"{self._procfs.name(pid)} (pid {pid})"
        if namespace != self._procfs.namespace("self", "net"):
            return Source(facts.POD, f"{text}, in another network namespace than the host's")
        return Source(facts.HOST, f"{text} in cgroup {path}", self._cgroup(path))

    def _unit(self, unit: str) -> Source:
        found = SourceCgroups(self._root).resolve((RuleSource("unit", unit),), {}).get(unit, ())
        if not found:
            raise SourceError(f"unit {unit} has no cgroup: does it run? See 'systemctl status'")
        path = self._path_of(found[0].id)
        return Source(facts.HOST, f"unit {unit}", self._cgroup(path))

    def _pod(self, name: str) -> Source:
        pod = self._pods.find(name)
        if not pod.host_network:
            return Source(facts.POD, f"pod {pod.full_name}")
        source = RuleSource("pods", name)
        pods_cgroup = PodsCgroup(self._root, self._procfs)
        pods_cgroup.search((pod.uid,))
        cgroups = SourceCgroups(self._root, pods_cgroup)
        found = cgroups.resolve((source,), {name: (pod.uid,)}).get(name, ())
        if not found:
            raise SourceError(f"hostNetwork pod {pod.full_name} has no cgroup on this node")
        text = f"hostNetwork pod {pod.full_name}"
        return Source(facts.HOST, text, self._cgroup(self._path_of(found[0].id)))

    def _address(self, address: IPAddress) -> Source:
        if address in self._own_addresses or address.is_loopback:
            text = f"a host process without a rule of its own ({address} is the node's)"
            return Source(facts.HOST, text, Cgroup(_SOME_CGROUP, "", (ROOT_CGROUP,)))
        if address in self._owners:
            return Source(facts.POD, f"the pod with {address}")
        return Source(facts.OUTSIDE, f"{address}")

    def _cgroup(self, path: str) -> Cgroup:
        if self._root is None:
            raise SourceError("no cgroup v2 is mounted, so sources cannot be distinguished")
        found = ancestors(self._root, path)
        if not found:
            raise SourceError(f"cgroup {path} does not exist below {self._root}")
        return Cgroup(found[-1], path, tuple(found))

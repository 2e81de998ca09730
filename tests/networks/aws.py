"""AWS' VPC CNI plugin and its network policy agent and controller, on the node of a cluster.

What they request from EC2 is served by a stand-in (tests/networks/ec2.py): addresses of pods, which
ipamd has from network interfaces, and instance metadata. Everything else is theirs: host
interfaces, routes, rules, eBPF programs, PolicyEndpoints.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from agent.lab.lab import NODE_IPV4
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.api import Api, Json
from tests.cluster.daemons import Daemon
from tests.cluster.one_node import OneNode
from tests.networks import ec2, health, traffic, uplink

_AGENT, _CONTROLLER, _PLUGIN = "network-policy-agent", "network-policy-controller", "aws-cni"
_PROBES = ("tc.v4ingress.bpf.o", "tc.v4egress.bpf.o", "v4events.bpf.o")
PROGRAMS = (_AGENT, _CONTROLLER, _PLUGIN, *_PROBES, "aws-eks-na-cli", "VERSION")
"""In the directory `aws` of NETWORKS. network-policy-agent and aws-eks-na-cli, both linked
statically, and *.o: of github.com/aws/aws-network-policy-agent; network-policy-controller: of
amazon-network-policy-controller-k8s; aws-cni: the plugin routed-eni-cni-plugin of
amazon-vpc-cni-k8s; VERSION: one line, for the record."""
PODS = "198.18.16.0/20"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_DEFINITIONS = ("policyendpoints", "clusterpolicyendpoints")
_SOCKETS = pathlib.Path("/run/aws-node")
_METADATA_PORT, _HEALTH_PORT, _METRICS_PORT = 18161, 8163, 8162
_PREFIX = "eni"
_INSTALLED = "host/opt/cni/bin"
# The agent's image: its programs are in the root, where it starts.
_IN_ROOT = (
    'for d in proc sys run; do mount --rbind /$d "$0/$d" || exit; done; exec chroot "$0" "$@"'
)


class Aws:
    """AWS' network of one cluster, IPv4: a `Network`."""

    families = 1
    has_programs = True
    translates = False

    def __init__(self, node: OneNode, programs: pathlib.Path) -> None:
        self.version = (programs / "VERSION").read_text(encoding="utf-8").strip()
        self._node = node
        self._programs = programs
        self._root = node.runtime.directory / "aws"
        mounted = cgroup2_mount()
        assert mounted is not None
        self.cgroup = mounted / node.runtime.name
        kubeconfig = f"--kubeconfig={node.control_plane.kubeconfig('admin')}"
        self.engine = self._daemon(
            "agent",
            *("env", "-i", f"PATH={os.environ['PATH']}"),
            f"AWS_EC2_METADATA_SERVICE_ENDPOINT=http://127.0.0.1:{_METADATA_PORT}",
            *("unshare", "--mount", "--propagation", "slave", "sh", "-c", _IN_ROOT),
            *(str(self._root), f"/{_AGENT}", kubeconfig, "--enable-network-policy"),
            *("--log-file=stdout", "--log-level=info"),
            f"--metrics-bind-addr=127.0.0.1:{_METRICS_PORT}",
            f"--health-probe-bind-addr=127.0.0.1:{_HEALTH_PORT}",
        )
        self.programmer = self._daemon(
            "controller",
            *(str(programs / _CONTROLLER), kubeconfig),
            *("--enable-configmap-check=false", "--enable-leader-election=false"),
            *("--metrics-bind-addr=0", "--health-probe-bind-addr=0"),
        )
        self._ec2 = self._daemon(
            "ec2",
            *(sys.executable, "-m", "tests.networks.ec2", str(_SOCKETS / "ipamd.sock")),
            *(PODS, str(NODE_IPV4), str(_METADATA_PORT)),
        )

    @property
    def api(self) -> Api:
        return self._node.api

    def pod_addresses(self) -> set[str]:
        return traffic.routed_addresses(_PREFIX)

    def install(self) -> None:
        """What the init container of aws-node does."""
        uplink.add()
        for family in ([], ["-6"]):
            route = ["ip", *family, "-j", "route", "show", "default"]
            (default,) = json.loads(_run(*route))
            table = ["table", str(ec2.SECOND_TABLE)]
            _run(
                *("ip", *family, "route", "add", "default", "via", default["gateway"]),
                *("dev", default["dev"], *table),
            )
        shutil.copytree(self._programs, self._root)
        for name in ("proc", "sys", "run", "var", _INSTALLED):
            (self._root / name).mkdir(parents=True)
        (self._root / "var/run").symlink_to("/run")
        _SOCKETS.mkdir()
        shutil.copy(self._programs / _PLUGIN, self._node.runtime.plugins)
        # The first by its name is in force.
        directory = self._node.runtime.cni_directory
        (directory / "00-aws.conflist").write_text(json.dumps(self._conflist()))
        (directory / "10-pods.conflist").unlink()

    def start(self) -> None:
        self._ec2.start()
        self.programmer.start()
        polling.wait_until("AWS' definitions exist", self._is_defined)
        self.engine.start()
        self.wait_until_ready()

    def restart(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.engine.stop(number)
        self.engine.start()
        self.wait_until_ready()

    def flush(self) -> None:
        """As an update whose programs differ: the agent removes its filters of all pods, and
        attaches the new ones."""
        self.engine.stop()
        for name in _PROBES[:2]:
            (self._root / _INSTALLED / name).unlink()
        self.engine.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        polling.wait_until("AWS' network policy agent is ready", self._is_ready)

    def remove(self) -> None:
        for daemon in (self.engine, self.programmer, self._ec2):
            daemon.kill()
        uplink.remove()

    def _daemon(self, name: str, *command: str) -> Daemon:
        log = self._node.runtime.directory / f"aws-{name}.log"
        return Daemon(list(command), self.cgroup / f"aws-{name}", log, name=f"aws-{name}")

    def _is_defined(self) -> bool:
        self.programmer.check()
        return all(self.api.find(f"{_CRDS}/{one}.networking.k8s.aws") for one in _DEFINITIONS)

    def _is_ready(self) -> bool:
        self.engine.check()
        url = f"http://127.0.0.1:{_HEALTH_PORT}/readyz"
        return health.is_healthy(url)

    def _conflist(self) -> Json:
        plugin = {
            "name": "aws-cni",
            "type": _PLUGIN,
            "vethPrefix": _PREFIX,
            "mtu": "1500",
            "podSGEnforcingMode": "strict",
            "pluginLogFile": str(self._node.runtime.directory / "aws-cni.log"),
            "pluginLogLevel": "INFO",
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
        return {
            "name": "aws-cni",
            "cniVersion": "0.4.0",
            "disableCheck": True,
            "plugins": [plugin, portmap],
        }


def missing(programs: pathlib.Path) -> str:
    """One sentence of what is missing in NETWORKS, or nothing."""
    lost = [name for name in PROGRAMS if not (programs / name).exists()]
    if lost:
        return f"{programs} has no {', '.join(lost)}; build AWS' programs from their sources."
    return ""


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout

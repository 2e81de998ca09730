"""The kubelet: its configuration, and its process in a cgroup of its own, as systemd runs it."""

import json
import pathlib
from collections.abc import Sequence

from tests import polling
from tests.cluster.control_plane import ControlPlane
from tests.cluster.daemons import Daemon

DIRECTORY = pathlib.Path("/var/lib/kubelet")
# What the kubelet sets for the whole machine (pkg/kubelet/cm/container_manager_linux.go).
TUNABLES = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
FEATURE_GATES = {"PodsAPI": True, "KubeletCrashLoopBackOffMax": True}
LOG_LEVEL = 2
_MAX_PODS = 250


_NO_AUTHORIZATION: dict[str, object] = {
    "authentication": {"webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
}


class Kubelet:
    """The kubelet of the node `name`; standalone without a control plane."""

    def __init__(
        self,
        binary: pathlib.Path,
        directory: pathlib.Path,
        control_plane: ControlPlane | None,
        *,
        name: str,
        address: str,
        socket: pathlib.Path,
        cgroups: tuple[pathlib.Path, str],
        within: Sequence[str] = (),
    ) -> None:
        """directory: empty; socket: the runtime's; cgroups: the directory for its own, and the path
        of the one above those of pods; within: as of `Daemon`."""
        self.name = name
        self._api = control_plane.api if control_plane else None
        self.manifests = directory / "manifests"
        """Of static pods."""
        self.manifests.mkdir(parents=True)
        own, root = cgroups
        self._file = directory / "config.json"
        self._content = self._config(directory, socket, root)
        authorized = []
        if control_plane:
            user = f"kubelet-{name}"
            control_plane.pki.sign(user, user=f"system:node:{name}", groups=("system:nodes",))
            self._content |= _authorization(control_plane)
            authorized.append(f"--kubeconfig={control_plane.kubeconfig(user)}")
        else:
            self._content |= _NO_AUTHORIZATION
        self._write()
        self.daemon = Daemon(
            [
                str(binary),
                f"--config={self._file}",
                *authorized,
                f"--hostname-override={name}",
                f"--node-ip={address}",
                f"-v={LOG_LEVEL}",
            ],
            own,
            directory / "kubelet.log",
            name="kubelet",
            within=within,
        )

    def start(self) -> None:
        self.daemon.start()

    def stop(self) -> None:
        self.daemon.stop()

    def restart(self) -> None:
        """As `systemctl restart`: its cgroup is made again, with another id."""
        self.stop()
        self.start()

    def restart_at(self, *addresses: str) -> None:
        """With these addresses of the node, from now on; the first one's family comes first."""
        self._set_flag("--node-ip", ",".join(addresses))
        self.restart()

    def restart_verbose(self, level: int = LOG_LEVEL) -> None:
        """With this level of its log, from now on; pkg/kubelet/prober logs each success at 3."""
        self._set_flag("-v", str(level))
        self.restart()

    def restart_with(self, **settings: object) -> None:
        """With these fields of its configuration, from now on."""
        self._content |= settings
        self._write()
        self.restart()

    def wait_until_ready(self) -> None:
        polling.wait_until("the node is ready", self._is_ready)

    def _set_flag(self, name: str, value: str) -> None:
        flags = [flag for flag in self.daemon.command if not flag.startswith(f"{name}=")]
        self.daemon.command = [*flags, f"{name}={value}"]

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._content))

    def _is_ready(self) -> bool:
        self.daemon.check()
        assert self._api is not None  # Standalone, it has no node.
        node = self._api.find(f"/api/v1/nodes/{self.name}")
        conditions = node["status"].get("conditions", []) if node else []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _config(
        self,
        directory: pathlib.Path,
        socket: pathlib.Path,
        cgroup_root: str,
    ) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{socket}",
            "staticPodPath": str(self.manifests),
            "podLogsDir": str(directory / "pod-logs"),
            "volumePluginDir": str(directory / "plugins"),
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "maxPods": _MAX_PODS,
            "featureGates": FEATURE_GATES,
            # Tests end containers often.
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
            # Below a cgroup of the tests' own, with which all containers end.
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup_root,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            # The disk is the machine's, and how full it is no matter of the tests.
            "localStorageCapacityIsolation": False,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {
                "imagefs.available": "0%",
                "nodefs.available": "0%",
                "nodefs.inodesFree": "0%",
                "memory.available": "100Mi",
            },
        }


def _authorization(control_plane: ControlPlane) -> dict[str, object]:
    return {
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(control_plane.pki.authority)},
        },
        "authorization": {"mode": "Webhook"},
    }

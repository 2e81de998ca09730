"""A machine of a cluster of several nodes: namespaces with a network interface and daemons."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping

from tests import polling
from tests.cluster.daemons import Daemon
from tests.cluster.kubelet import Kubelet
from tests.runtime import images

UPLINK = "uplink0"
SOCKET = pathlib.Path("/run/containerd/containerd.sock")
CNI_DIRECTORY, PLUGINS = pathlib.Path("/run/cni/net.d"), pathlib.Path("/run/cni/bin")
_INSTALLED_PLUGINS = pathlib.Path("/usr/lib/cni")
_UNSHARE = (
    *("unshare", "--mount", "--net", "--pid", "--uts", "--ipc"),
    *("--fork", "--kill-child", "--propagation", "private"),
)


class Machine:
    """Namespaces of its own (mount, network, PID, UTS, IPC), with containerd. Start the runtime,
    then the kubelet."""

    def __init__(
        self,
        name: str,
        addresses: tuple[str, str],
        directory: pathlib.Path,
        cgroup: pathlib.Path,
    ) -> None:
        """addresses: of each family, IPv4 first; directory: empty, seen by all machines; cgroup:
        its directory, for those of the machine's processes."""
        self.name = name
        self._kubelet: Kubelet | None = None
        self.addresses = addresses
        self.directory = directory
        self.cgroup = cgroup
        directory.mkdir(parents=True)
        self._init = subprocess.Popen(
            [*_UNSHARE, sys.executable, "-m", "tests.cluster.machine_init", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"ready\n", f"machine {name} did not start"
        children = pathlib.Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        (pid,) = children.read_text().split()
        self.pid = int(pid)
        """Of the machine's first process."""
        self._daemons: list[Daemon] = []
        self.runtime = self.daemon(["containerd", "--config", str(self._write_config())], True)

    @property
    def within(self) -> tuple[str, ...]:
        """The command that enters its namespaces."""
        return ("nsenter", "-t", str(self.pid), "-m", "-n", "-u", "-i", "-p", "--wd=/", "--")

    @property
    def kubelet(self) -> Kubelet:
        assert self._kubelet is not None, f"{self.name} has no kubelet"
        return self._kubelet

    def start_kubelet(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        kubelet.start()

    def path(self, inside: pathlib.Path | str) -> pathlib.Path:
        """A path of the machine, as this process sees it."""
        return pathlib.Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def run(self, *command: str) -> str:
        """Run a command on the machine, and return its output."""
        done = subprocess.run(
            [*self.within, *command], check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command} on {self.name}: {done.stderr}{done.stdout}"
        return done.stdout

    def daemon(self, command: list[str], has_children: bool = False) -> Daemon:
        """A program of the machine, named by its first word."""
        name = pathlib.Path(command[0]).name
        made = Daemon(
            command,
            self.cgroup / name,
            self.directory / f"{name}.log",
            within=self.within,
            has_children=has_children,
        )
        self._daemons.append(made)
        return made

    def start_runtime(self) -> None:
        self.runtime.start()
        polling.wait_until("containerd responds", self._has_runtime)

    def import_images(self, *archives: pathlib.Path) -> None:
        for archive in archives:
            self.run(
                *("ctr", "--address", str(SOCKET), "--namespace", "k8s.io"),
                *("images", "import", str(archive)),
            )

    def install_network(
        self, conflist: dict[str, object], others: Mapping[str, pathlib.Path] | None = None
    ) -> None:
        """The runtime's list of CNI plugins; others: by name, those that are in no package."""
        for installed in _INSTALLED_PLUGINS.iterdir():
            self.path(PLUGINS / installed.name).symlink_to(installed)
        for name, program in (others or {}).items():
            self.path(PLUGINS / name).unlink(missing_ok=True)
            self.path(PLUGINS / name).symlink_to(program)
        self.path(CNI_DIRECTORY / "10-network.conflist").write_text(json.dumps(conflist))

    def containers_of(self, uid: str) -> list[int]:
        """Pids of a pod's processes, by its cgroup."""
        found = []
        for directory in self.cgroup.glob(f"kubepods/**/pod{uid}/**/cgroup.procs"):
            found += [int(line) for line in directory.read_text().split()]
        return found

    def end(self) -> None:
        """All its processes, and with them its namespaces."""
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        if self._kubelet is not None:
            self._kubelet.daemon.kill()
        for daemon in reversed(self._daemons):
            daemon.kill()
        self._init.stdin.close()
        self._init.stdout.close()
        self._init.wait(polling.PATIENCE_SECONDS)

    def _has_runtime(self) -> bool:
        self.runtime.check()
        command = ("ctr", "--address", str(SOCKET), "version")
        done = subprocess.run([*self.within, *command], check=False, capture_output=True)
        return done.returncode == 0

    def _write_config(self) -> pathlib.Path:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        file = self.directory / "containerd.toml"
        file.write_text(f"""
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
address = "{SOCKET}"

[{cri}]
sandbox_image = "{images.PAUSE}"
# Without CAP_SYS_RESOURCE no process may be made less likely to be killed.
restrict_oom_score_adj = true

[{cri}.cni]
bin_dir = "{PLUGINS}"
conf_dir = "{CNI_DIRECTORY}"
""")
        return file

"""Open vSwitch with its own daemons: a switch to which the node and its pods are connected."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Iterator

from agent.lab import lab as labs
from tests import polling
from tests.kernel import links, traffic

NAME = "ovs-pg"

# Debian's path; in PATH is only a link that its package makes when it is installed.
_VSWITCHD = "/usr/lib/openvswitch-switch/ovs-vswitchd"
_SCHEMA = "/usr/share/openvswitch/vswitch.ovsschema"


@dataclasses.dataclass(frozen=True, slots=True)
class Daemons:
    """ovsdb-server and ovs-vswitchd, with all of their files in `directory`."""

    directory: pathlib.Path

    def configure(self, *arguments: str) -> None:
        """Run ovs-vsctl, which returns when ovs-vswitchd has applied the change."""
        _run("ovs-vsctl", f"--db={self._database}", f"--timeout={_SECONDS}", *arguments)

    def control(self, *arguments: str) -> str:
        """Run ovs-appctl of ovs-vswitchd."""
        target = self.directory / "vswitchd.ctl"
        return _run("ovs-appctl", f"--target={target}", f"--timeout={_SECONDS}", *arguments)

    @property
    def _database(self) -> str:
        return f"unix:{self.directory / 'db.sock'}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        database = self.directory / "conf.db"
        _run("ovsdb-tool", "create", str(database), _SCHEMA)
        with contextlib.ExitStack() as stack:
            listening = self.directory / "db.sock"
            server = ("ovsdb-server", str(database), f"--remote=p{self._database}")
            control = f"--unixctl={self.directory / 'ovsdb.ctl'}"
            stack.enter_context(self._daemon(listening, *server, control))
            configure = ("ovs-vsctl", f"--db={self._database}", "--no-wait")
            _run(*configure, "init")
            # One handler sends packets again in the order in which they came.
            _run(*configure, "set", "Open_vSwitch", ".", "other_config:n-handler-threads=1")
            listening = self.directory / "vswitchd.ctl"
            control = f"--unixctl={listening}"
            stack.enter_context(self._daemon(listening, _VSWITCHD, self._database, control))
            yield

    @contextlib.contextmanager
    def _daemon(self, listening: pathlib.Path, *arguments: str) -> Iterator[None]:
        log = self.directory / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
            )

        def listens() -> bool:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            return listening.exists()

        try:
            polling.wait_until(f"{arguments[0]} listens", listens)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def _environment(self) -> dict[str, str]:
        names = ("OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR")
        return {**os.environ, **dict.fromkeys(names, str(self.directory))}


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
    """A bridge of Open vSwitch, whose internal port has the node's addresses."""

    daemons: Daemons
    lab: labs.Lab

    def connect(self, pod: labs.LabPod) -> None:
        """Move a routed pod behind the switch, which pods reach each other by: the node then sends
        to it by the internal port."""
        links.ip(
            f"address del {traffic.NODE[4]}/32 dev {pod.interface}",
            f"address del {traffic.NODE[6]}/128 dev {pod.interface}",
            f"route replace {pod.ipv4}/32 dev {NAME}",
            f"route replace {pod.ipv6}/128 dev {NAME}",
        )
        links.ip_inside(
            pod, "route add 198.18.1.0/24 dev eth0", "route add fd00:18:0:1::/64 dev eth0"
        )
        self.daemons.configure("add-port", NAME, pod.interface)

    def forget_flows(self) -> None:
        """Each flow's next packet goes to ovs-vswitchd, which sends it again."""
        self.daemons.control("revalidator/purge")

    def add_flow(self, flow: str) -> None:
        """Run ovs-ofctl add-flow; the flow ends with the switch."""
        target = f"unix:{self.daemons.directory / NAME}.mgmt"
        _run("ovs-ofctl", "add-flow", target, flow)


@contextlib.contextmanager
def daemons(directory: pathlib.Path) -> Iterator[Daemons]:
    made = Daemons(directory)
    with made.running():
        yield made


@contextlib.contextmanager
def switch(started: Daemons, lab: labs.Lab) -> Iterator[Switch]:
    started.configure("add-br", NAME)
    try:
        links.ip(
            f"address add {traffic.NODE[4]}/32 dev {NAME}",
            f"address add {traffic.NODE[6]}/128 dev {NAME} nodad",
            f"link set {NAME} up",
        )
        yield Switch(started, lab)
    finally:
        started.configure("del-br", NAME)


def _run(*command: str) -> str:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=2 * _SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


_SECONDS = round(polling.PATIENCE_SECONDS)

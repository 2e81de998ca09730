"""A mesh's exemption for the node's probes, as Istio's ambient mode has it: sockets of the node
become 169.254.7.127, which the pod's rules let past the proxy. Nothing but nft is needed."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from tests import redirected
from tests.kernel import cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_relay_conditions import RANGES, is_enforced, is_strict
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

EXEMPT = "169.254.7.127"
APP, PROXY = 8080, 15006
PROBE = {"readinessProbe": {"tcpSocket": {"port": APP}, "periodSeconds": 3600}}

# Prints what the server sends, or the error.
REQUEST = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 2) as s:
        print(s.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""
REFUSED_BY_A_HOOK = "PermissionError"
REJECTED_BY_THE_MESH = ""


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def other() -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


def serve(listener: socket.socket, answer: Callable[[str], bytes]) -> None:
    """Until the listener is closed. answer: to a client by its address."""
    with contextlib.suppress(OSError):
        while True:
            connection, peer = listener.accept()
            # A probe resets its connection.
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(answer(peer[0].removeprefix("::ffff:")))


def own_address(client: str) -> bytes:
    return client.encode()


def nothing(_client: str) -> bytes:
    return b""


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    """Its application sends each client the client's address; its proxy nothing."""
    made = lab.add_pod("web", 1)
    with contextlib.ExitStack() as undo:
        for port, answer in ((APP, own_address), (PROXY, nothing)):
            listener = undo.enter_context(made.listen(port))
            listener.settimeout(None)
            thread = threading.Thread(target=serve, args=(listener, answer))
            thread.start()
            undo.callback(thread.join)
            undo.callback(listener.shutdown, socket.SHUT_RDWR)
        redirected.nft(
            made.netns,
            "table ip mesh { chain pre { type nat hook prerouting priority -100; "
            f"ip saddr != {EXEMPT} meta l4proto tcp redirect to :{PROXY}; }}; }}",
        )
        yield made


@contextlib.contextmanager
def exempt(pod: LabPod) -> Iterator[None]:
    """The node's rule: packets of a socket get the source that the pod's rules exempt."""
    rules = (
        "table ip mesh-of-node { chain post { type nat hook postrouting priority 100; "
        f"ip daddr {pod.ipv4} meta skuid 0-65535 snat to {EXEMPT}; }}; }}"
    )
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "ip", "mesh-of-node"], check=True)


def answer_to(source: Cgroup, pod: LabPod) -> str:
    done = source.run([*BARE_PYTHON, "-c", REQUEST, pod.ipv4, str(APP)])
    return done.stdout.decode().strip()


def test_strict_needs_no_exemption_and_enforce_closes_it_to_host_processes(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, other: Cgroup, no_relays: None
) -> None:
    def set_mode(mode: str) -> None:
        operator.write_manifest(pod, mode=mode, container=PROBE)

    with exempt(pod):
        assert (answer_to(kubelet, pod), answer_to(other, pod)) == (EXEMPT, EXEMPT)
        set_mode("enforce")
        operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES)
        operator.wait_for("enforced", is_enforced)
        assert (answer_to(kubelet, pod), answer_to(other, pod)) == (EXEMPT, REFUSED_BY_A_HOOK)
    assert (answer_to(kubelet, pod), answer_to(other, pod)) == (
        REJECTED_BY_THE_MESH,
        REFUSED_BY_A_HOOK,
    )
    set_mode("strict")
    operator.wait_for("strict", is_strict)
    assert (answer_to(kubelet, pod), answer_to(other, pod)) == (pod.ipv4, REFUSED_BY_A_HOOK)
    with exempt(pod):
        assert (answer_to(kubelet, pod), answer_to(other, pod)) == (pod.ipv4, REFUSED_BY_A_HOOK)

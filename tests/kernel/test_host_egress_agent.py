"""HostEgressPolicies with an agent: from files to what hostNetwork pods and units can reach."""

import contextlib
import errno
import json
import pathlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.report import EgressPolicyStatus
from agent.lab.lab import Lab, LabPod
from agent.linux.cgroups import cgroup2_mount
from agent.logs import Event
from bpf import abi, host_egress, pins, program_specs
from bpf.host_egress_tables import EgressRule
from tests import polling
from tests.docs import blocks
from tests.kernel import cgroups, links, sending
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_host_egress import Destination, attempting, of_schema, send, ways_of
from tests.kernel.test_policies import Node
from tests.kernel.test_policy_sources import UIDS, Kubelet, add_host_pod, kubelet, node

__all__ = ["kubelet", "node"]
pytestmark = pytest.mark.kernel

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "host-egress.md"
ETCD = 2379
EVERY_POD: dict[str, Any] = {"hostNetworkPods": {"podSelector": {}}}
TRUSTED = {"hostNetworkPods": {"podSelector": {"matchLabels": {"app": "trusted"}}}}
DENIED, ADMITTED = {"tcp": errno.EPERM}, {"tcp": 0}


def policy(name: str = "secrets", **spec: Any) -> dict[str, Any]:
    subjects: dict[str, Any] = {"subjects": [EVERY_POD], "deny": [{"preset": "Etcd"}]}
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostEgressPolicy",
        "metadata": {"name": name},
        "spec": subjects | {name.rstrip("_"): value for name, value in spec.items()},
    }


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(8080):
        yield pod


@pytest.fixture
def etcd(lab: Lab) -> Iterator[None]:
    """A server of the node, over both families."""
    with socket.create_server(("", ETCD), family=socket.AF_INET6, dualstack_ipv6=True):
        yield


@pytest.fixture
def other(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


def egress_of(node: Node) -> list[EgressPolicyStatus]:
    return node.rules().egress


def wait(node: Node, group: Cgroup, expected: dict[str, int], address: str = "127.0.0.1") -> None:
    node.operator.wait_for(
        f"{group.path}: {expected}",
        lambda _: send(group, address, "tcp", other=group, port=ETCD) == expected,
    )


def explained(node: Node, uid: str, address: str) -> tuple[str, str]:
    """The verdict of `podgate explain` on a connect of a pod, and the policy that denies it."""
    where = ("--run-directory", str(node.operator.run_directory))
    bpffs = ("--bpffs", str(node.operator.bpffs))
    flow = ("--from", f"pod:monitoring/{uid}", "--to", address, "--port", str(ETCD))
    done = node.operator.run("explain", *flow, "-o", "json", *where, *bpffs)
    answer = json.loads(done.stdout)
    assert done.returncode == (answer["verdict"] == "drop")
    return answer["verdict"], (answer["egressRule"] or {}).get("policy", "")


def test_of_two_host_network_pods_one_is_admitted_and_one_gets_eperm(
    node: Node, web: LabPod, kubelet: Kubelet, etcd: None, other: Cgroup
) -> None:
    """In audit both pass and are counted; then without the agent, and after the policy."""
    installation = pins.Pins(node.operator.bpffs)
    add_host_pod(node, UIDS[0])
    add_host_pod(node, UIDS[1], app="trusted")
    node.start(web)
    # No policy, no program.
    assert not host_egress.is_installed(installation)
    with kubelet.pod(UIDS[0]) as pod, kubelet.pod(UIDS[1]) as trusted:
        node.write("a.yaml", policy(except_=[TRUSTED]))
        node.wait_for_rules("in audit", lambda report: bool(report.egress))
        node.operator.event(Event.HOST_EGRESS_APPLIED, destinations=1)
        assert send(pod, "127.0.0.1", "tcp", other=other, port=ETCD) == ADMITTED
        assert send(trusted, "::1", "tcp", other=other, port=ETCD) == ADMITTED
        assert explained(node, UIDS[0], "127.0.0.1") == ("would-drop", "secrets")
        [status] = egress_of(node)
        assert (status.action, status.would_drop, status.drop) == ("Audit", 1, 0)
        assert status.denied == ["the node TCP 2379-2380"]
        [source] = status.sources
        assert (source.cgroup, source.protocol, source.attempts) == (pod.path, "tcp", 1)
        assert source.process.startswith("python")

        node.write("a.yaml", policy(action="Enforce", except_=[TRUSTED]))
        for address in ("127.0.0.1", "::1", "198.18.0.1", "fd00:18::1"):
            wait(node, pod, DENIED, address)
            for untouched in (trusted, other):
                assert send(untouched, address, "tcp", other=other, port=ETCD) == ADMITTED
            assert explained(node, UIDS[0], address) == ("drop", "secrets")
            assert explained(node, UIDS[1], address) == ("pass", "")
        shown = node.podgate("rules")
        assert "secrets" in shown
        assert "198.18.0.1" not in shown
        metrics = node.podgate("metrics")
        assert 'podgate_host_egress_attempts_total{policy="secrets",verdict="drop"}' in metrics

        node.operator.stop(signal.SIGKILL)
        assert send(pod, "127.0.0.1", "tcp", other=other, port=ETCD) == DENIED
        assert send(trusted, "127.0.0.1", "tcp", other=other, port=ETCD) == ADMITTED
        node.operator.start("--rules", str(node.directory))
        node.operator.event(Event.HOST_EGRESS_APPLIED, destinations=1)
        assert send(pod, "127.0.0.1", "tcp", other=other, port=ETCD) == DENIED

        (node.directory / "a.yaml").unlink()
        wait(node, pod, ADMITTED)
        polling.wait_until("removal", lambda: not host_egress.is_installed(installation))


def test_node_port_of_another_node_leads_back_until_a_policy_denies_it(
    node: Node, web: LabPod, lab: Lab, kubelet: Kubelet, other: Cgroup
) -> None:
    """By the policy of the guide, over UDP: no gate sees who sent what another node sends back."""
    in_audit = blocks.files(GUIDE)["node-ports.yaml"]
    neighbour, port = lab.add_pod("neighbour", 9), 30080
    links.let_forward(neighbour)
    body = (
        "chain translated { type nat hook prerouting priority -100; "
        f"ip daddr {neighbour.ipv4} udp dport {port} dnat to {web.ipv4}:8080; }}\n"
        "chain masqueraded { type nat hook postrouting priority 100; ct status dnat masquerade; }\n"
    )
    add_host_pod(node, UIDS[0])
    node.start(web)
    with (
        kubelet.pod(UIDS[0]) as pod,
        links.table_inside(neighbour, "ip", body),
        web.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
    ):
        server.settimeout(polling.PATIENCE_SECONDS)
        server.bind(("", 8080))
        assert send(pod, web.ipv4, "tcp", other=other, port=8080) == DENIED
        assert send(pod, neighbour.ipv4, "udp", other=other, port=port) == {"udp": 0}
        assert server.recv(100) == b"udp"
        node.write("a.yaml", in_audit.replace("spec:", "spec:\n  action: Enforce"))
        node.operator.event(Event.HOST_EGRESS_APPLIED, destinations=2)
        for way in ("udp", "tcp"):
            denied = send(pod, neighbour.ipv4, way, other=other, port=port)
            assert denied == {way: errno.EPERM}
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(100)


def test_two_host_network_pods_by_every_way_while_no_agent_runs(
    node: Node, web: LabPod, lab: Lab, kubelet: Kubelet, other: Cgroup, tmp_path: pathlib.Path
) -> None:
    """TCP, UDP, raw, io_uring and passed sockets, over both families, after the agent was killed
    and after it was stopped. The pod that the policy excepts, as a CSI driver would be, the
    kubelet, and what no policy names reach the destination by each of them."""
    add_host_pod(node, UIDS[0])
    add_host_pod(node, UIDS[1], app="trusted")
    path = node.operator.kubelet[1].removeprefix("cgroup:")
    own = Cgroup(cgroups.root().directory / path.lstrip("/"), path)
    with contextlib.closing(Destination(lab.add_pod("metadata", 2))) as metadata:
        deny = [{"cidr": address} for address in map(str, metadata.pod.addresses)]
        node.write("a.yaml", policy(deny=deny, action="Enforce", except_=[TRUSTED]))
        with kubelet.pod(UIDS[0]) as pod, kubelet.pod(UIDS[1]) as trusted:
            node.start(web)
            wait(node, pod, DENIED, metadata.address(4))
            metadata.arrived(4)
            with attempting(pod, metadata.address(4), tmp_path / "end") as results:
                node.operator.stop(signal.SIGKILL)
                node.operator.start("--rules", str(node.directory))
                node.operator.wait_for("its pods", lambda report: report.is_synced)
                wait(node, pod, DENIED, metadata.address(6))
            assert results == {errno.EPERM}
            for how in (signal.SIGKILL, signal.SIGTERM):
                node.operator.stop(how)
                for version in (4, 6):
                    address, ways = metadata.address(version), ways_of(version)
                    denied = send(pod, address, *ways, other=other)
                    # The process that connects by a socket of the pod is no subject, so its SYN
                    # is dropped instead.
                    assert denied == dict.fromkeys(ways, errno.EPERM) | {"given-tcp": 0}
                    assert metadata.arrived(version) == (0, set())
                    for untouched in (trusted, own, other):
                        done = send(untouched, address, *ways, other=other)
                        assert done == dict.fromkeys(ways, 0)
                        connections = sum(way in sending.CONNECTIONS for way in ways)
                        arrived = connections, set(sending.DATAGRAMS)
                        assert metadata.arrived(version) == arrived
                if how is signal.SIGKILL:
                    node.operator.start("--rules", str(node.directory))
                    node.operator.event(Event.HOST_EGRESS_APPLIED, destinations=2)


def test_unit_is_a_subject_each_time_it_starts(
    node: Node, web: LabPod, etcd: None, other: Cgroup
) -> None:
    name = cgroups.unique("started.service")
    unit = {"systemdUnit": {"name": name}}
    node.write("a.yaml", policy(subjects=[unit], action="Enforce"))
    node.start(web)
    for _ in range(2):
        with cgroups.cgroup(name, below=cgroups.root()) as started:
            wait(node, started, DENIED)
            assert send(other, "127.0.0.1", "tcp", other=other, port=ETCD) == ADMITTED


def test_podgate_s_own_pods_and_what_runs_in_its_cgroup_are_no_subjects(
    node: Node, web: LabPod, kubelet: Kubelet, etcd: None, other: Cgroup
) -> None:
    """The next agent is a new pod, and needs the API server and the kubelet."""
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "podgate",
            "namespace": "podgate",
            "uid": UIDS[0],
            "labels": {"app.kubernetes.io/name": "podgate"},
        },
        "spec": {"hostNetwork": True, "containers": [{"name": "app", "image": "none"}]},
    }
    node.operator.write_file("own.yaml", json.dumps(document))
    add_host_pod(node, UIDS[1])
    node.write("a.yaml", policy(action="Enforce"))
    with kubelet.pod(UIDS[0]) as own, kubelet.pod(UIDS[1]) as pod:
        node.start(web)
        wait(node, pod, DENIED)
        assert send(own, "127.0.0.1", "tcp", other=other, port=ETCD) == ADMITTED


def test_off_opens_and_on_closes_again(
    node: Node, web: LabPod, kubelet: Kubelet, etcd: None, other: Cgroup
) -> None:
    add_host_pod(node, UIDS[0])
    node.write("a.yaml", policy(action="Enforce"))
    with kubelet.pod(UIDS[0]) as pod:
        node.start(web)
        wait(node, pod, DENIED)
        where = ("--run-directory", str(node.operator.run_directory))
        bpffs = ("--bpffs", str(node.operator.bpffs))
        done = node.operator.run("off", "--node", *where, *bpffs)
        assert done.returncode == 0, done.stderr
        wait(node, pod, ADMITTED)
        done = node.operator.run("on", "--node", *where, *bpffs)
        assert done.returncode == 0, done.stderr
        wait(node, pod, DENIED)


def test_hook_that_another_program_detaches_is_attached_again(
    node: Node, web: LabPod, kubelet: Kubelet, etcd: None
) -> None:
    add_host_pod(node, UIDS[0])
    node.write("a.yaml", policy(action="Enforce"))
    with kubelet.pod(UIDS[0]) as pod:
        node.start(web)
        wait(node, pod, DENIED)
        installation = pins.Pins(node.operator.bpffs)
        for hook in program_specs.EGRESS_HOOKS:
            (installation.links / hook.name).unlink()
        wait(node, pod, DENIED)


def test_what_a_node_cannot_put_in_force_is_a_finding_and_an_invalid_policy_too(
    node: Node, web: LabPod, lab: Lab
) -> None:
    far = {"systemdUnit": {"name": "nowhere.service"}}
    many = [{"cidr": f"198.18.{number}.0/32"} for number in range(129)]
    node.write("a.yaml", policy(subjects=[far]), policy("wrong", deny=[{"cidr": "198.18.0.1/24"}]))
    node.start(web)
    [status] = node.wait_for_rules("policies", lambda report: bool(report.egress)).egress
    assert status.problems == ["This node has no cgroup of unit nowhere.service."]
    node.write("b.yaml", policy("many", deny=many))

    def sentences() -> list[str]:
        report = node.operator.report()
        kind = kinds.HOST_EGRESS_NOT_IN_FORCE.name
        found = report.findings if report else []
        return [one.sentence for one in found if one.kind == kind]

    polling.wait_until("findings", lambda: len(sentences()) == 2)
    invalid, full = sentences()
    assert "spec.deny[0].cidr: 198.18.0.1/24 has host bits set" in invalid
    assert "there are 130 destinations, and room for 128" in full


def test_policies_of_another_schema_stay_until_they_are_taken_over(
    node: Node, web: LabPod, kubelet: Kubelet, etcd: None, other: Cgroup
) -> None:
    """Its directory stays as long: its links would end with it."""
    add_host_pod(node, UIDS[0])
    many = [{"cidr": f"198.18.{number}.0/32"} for number in range(129)]
    node.write("a.yaml", policy(deny=many, action="Enforce"))
    newer = pins.Pins(node.operator.bpffs, abi.SCHEMA + 1)
    ours = pins.Pins(node.operator.bpffs)
    mount = cgroup2_mount()
    assert mount is not None
    with kubelet.pod(UIDS[0]) as pod:
        with of_schema(newer) as before:
            before.set(pod, rules=[EgressRule(0, is_nodes=True)])
            assert not [one for one in before.kernel.attach(mount) if one.problem]
        node.start(web)
        node.operator.event(Event.HOST_EGRESS_NOT_APPLIED)
        assert send(pod, "127.0.0.1", "tcp", other=other, port=ETCD) == DENIED
        assert newer.schema.is_dir()
        node.write("a.yaml", policy(action="Enforce"))
        node.operator.event(Event.HOST_EGRESS_APPLIED)
        polling.wait_until("take-over", lambda: not host_egress.is_of_another_schema(ours))
        polling.wait_until("no other schema", lambda: not newer.schema.exists())
        assert send(pod, "127.0.0.1", "tcp", other=other, port=ETCD) == DENIED


def test_metadata_service_is_out_of_reach_of_pods_by_its_address(
    node: Node, web: LabPod, lab: Lab, kubelet: Kubelet, other: Cgroup
) -> None:
    """Also over UDP, with a port named."""
    add_host_pod(node, UIDS[0])
    with contextlib.closing(Destination(lab.add_pod("metadata", 2))) as metadata:
        deny = {"cidr": f"{metadata.pod.ipv4}/32", "ports": [{"protocol": "UDP", "port": ETCD}]}
        node.write("a.yaml", policy(deny=[deny], action="Enforce"))
        with kubelet.pod(UIDS[0]) as pod:
            node.start(web)
            address = metadata.address(4)
            node.operator.wait_for(
                "denied",
                lambda _: send(pod, address, "udp", other=other, port=ETCD) == {"udp": errno.EPERM},
            )
            assert send(pod, address, "tcp", other=other, port=ETCD) == ADMITTED

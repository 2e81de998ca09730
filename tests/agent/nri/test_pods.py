"""Pods of NRI as sandboxes of the runtime."""

import ipaddress

from agent.cri.models import NetworkedSandbox, Sandbox
from agent.nri import nri_pb2, pods

NETWORK = nri_pb2.LinuxNamespace(type="network", path="/run/netns/web")


def pod(
    *namespaces: nri_pb2.LinuxNamespace, id: str = "sandbox", uid: str = "uid-web"
) -> nri_pb2.PodSandbox:
    linux = nri_pb2.LinuxPodSandbox(namespaces=namespaces)
    named = nri_pb2.PodSandbox(id=id, uid=uid, name="web", namespace="shop", runtime_handler="kata")
    named.MergeFrom(nri_pb2.PodSandbox(linux=linux, ips=["198.18.1.1"]))
    return named


def test_pod_that_starts_is_a_sandbox_that_is_not_ready_yet() -> None:
    found = pods.read(pod(nri_pb2.LinuxNamespace(type="pid"), NETWORK))
    sandbox = Sandbox(
        id="sandbox",
        pod_uid="uid-web",
        pod_name="web",
        pod_namespace="shop",
        attempt=0,
        created=None,
        runtime_handler="kata",
        is_ready=False,
        ips=(ipaddress.ip_address("198.18.1.1"),),
    )
    assert found == NetworkedSandbox(sandbox, "/run/netns/web")


def test_pod_of_the_nodes_network_or_of_another_client_is_none() -> None:
    assert pods.read(pod(nri_pb2.LinuxNamespace(type="network"))) is None
    assert pods.read(pod(NETWORK, uid="")) is None
    assert pods.read(pod(NETWORK, id="")) is None
    assert pods.read(pod(nri_pb2.LinuxNamespace(type="pid", path="/run/netns/web"))) is None

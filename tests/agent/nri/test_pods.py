"""Pods of NRI as sandboxes of the runtime."""

from agent.nri import nri_pb2, pods

NETWORK = nri_pb2.LinuxNamespace(type="network", path="/run/netns/web")


def pod(*namespaces: nri_pb2.LinuxNamespace, uid: str = "uid-web") -> nri_pb2.PodSandbox:
    linux = nri_pb2.LinuxPodSandbox(namespaces=namespaces)
    named = nri_pb2.PodSandbox(id="sandbox", uid=uid, name="web", namespace="shop")
    named.MergeFrom(nri_pb2.PodSandbox(linux=linux, ips=["198.18.1.1"]))
    return named


def test_pod_that_starts_is_a_sandbox_that_is_not_ready_yet() -> None:
    found = pods.read(pod(nri_pb2.LinuxNamespace(type="pid"), NETWORK))
    assert found is not None
    assert found.netns_path == "/run/netns/web"
    assert not found.sandbox.is_ready
    assert (found.sandbox.pod_namespace, found.sandbox.pod_name) == ("shop", "web")
    assert [str(one) for one in found.sandbox.ips] == ["198.18.1.1"]


def test_pod_of_the_nodes_network_or_of_another_client_is_none() -> None:
    assert pods.read(pod(nri_pb2.LinuxNamespace(type="network"))) is None
    assert pods.read(pod(NETWORK, uid="")) is None

"""The mesh of a pod in words, from real namespaces with minimal rules and listeners."""

import contextlib
from collections.abc import Iterator

import pytest

from agent.admin.report import PodStatus
from agent.labels import ISOLATION_READY
from agent.operate import meshes
from agent.operate.doctor import meshes as doctor
from agent.operate.meshes import PodMesh
from probes.redirection import InnerWay, Redirection
from probes.results import ProbeResult
from tests import redirected
from tests.agent.operate.page.reports import condition, pod, probe, report
from tests.probes.conftest import V4, Sandbox, sandbox_netns

OUTSIDE = "the kubelet's probes come from outside, so its rules apply to them"
INSIDE = "the kubelet's probes come from inside (strict), so its rules do not apply to them"
OWN = "podgate's own come from inside and reach the application"
TO_PROXY = Redirection(15001, 5995, "Consul")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with sandbox_netns() as made:
        yield made


def status(sandbox: Sandbox, name: str = "web") -> PodStatus:
    return pod(name, netns=sandbox.path, addresses=[V4])


@contextlib.contextmanager
def listening(sandbox: Sandbox, *ports: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(sandbox.listen(port=port))
        yield


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("ports", "name"),
    [
        ((4140, 4143, 4191), "Linkerd"),
        ((15001, 15006, 15021, 15090), "Istio"),
        ((15001, 15006, 15008, 15021), "Istio"),
        ((15001, 15006, 15008), "Istio ambient"),
        ((15001, 20000), "Consul"),
        ((15001, 15006), "a mesh with Envoy"),
    ],
)
def test_mesh_is_named_by_its_listeners(
    sandbox: Sandbox, ports: tuple[int, ...], name: str
) -> None:
    with listening(sandbox, *ports):
        assert meshes.read(status(sandbox)) == PodMesh(name, {})


@pytest.mark.kernel
def test_pod_without_a_mesh_has_none(sandbox: Sandbox) -> None:
    with listening(sandbox, 8080, 9650):
        assert meshes.read(status(sandbox)) is None
    assert meshes.read(pod(netns="/run/netns/none")) is None
    assert meshes.read(pod(netns=None)) is None


@pytest.mark.kernel
def test_rules_that_redirect_are_found(sandbox: Sandbox) -> None:
    redirected.nft(sandbox.netns, redirected.CONSUL)
    with redirected.proxy(sandbox.netns), listening(sandbox, 20000):
        found = meshes.read(status(sandbox))
        (line,) = doctor.check(report(*(status(sandbox, name) for name in "abcd")))
    assert found == PodMesh("Consul", {V4: InnerWay(TO_PROXY, 5995)})
    assert line.text == (
        f"shop/a, shop/b, shop/c and 1 more: Consul: {OUTSIDE}; connections from inside the pod "
        "are redirected to port 15001 (Consul, user 5995); podgate connects as user 5995, which "
        "the rules exempt."
    )


def test_sentence_names_whose_probes_the_rules_apply_to() -> None:
    strict = pod(mode="strict", conditions=[condition(ISOLATION_READY, "True", "Strict")])
    assert meshes.describe(pod(), PodMesh("Istio", {})) == f"Istio: {OUTSIDE}; {OWN}"
    assert meshes.describe(strict, PodMesh("Istio", {})) == f"Istio: {INSIDE}; {OWN}"


def test_sentence_names_probes_without_a_result() -> None:
    lost = probe(result=ProbeResult.UNKNOWN, is_redirected=True)
    mesh = PodMesh("Consul", {V4: InnerWay(TO_PROXY, None)})
    assert meshes.describe(pod(probes=[lost, probe(type="Liveness")]), mesh) == (
        f"Consul: {OUTSIDE}; connections from inside the pod are redirected to port 15001 (Consul, "
        "user 5995), podgate's probes as well; no result of app Readiness"
    )


def test_sentence_names_the_first_rules_and_the_user_whom_they_exempt() -> None:
    other = InnerWay(Redirection(9, 1, "Other"), None)
    mesh = PodMesh("Consul", {V4: InnerWay(TO_PROXY, 5995), "other": other})
    lost = [
        probe(type=kind, result=ProbeResult.UNKNOWN, is_redirected=True)
        for kind in ("Liveness", "Startup")
    ]
    others = [
        condition(ISOLATION_READY, "False", "Strict"),
        condition(ISOLATION_READY, "True", "Enforced"),
    ]
    assert meshes.describe(pod(probes=lost, conditions=others), mesh) == (
        f"Consul: {OUTSIDE}; connections from inside the pod are redirected to port 15001 (Consul, "
        "user 5995); podgate connects as user 5995, which the rules exempt; no result of app "
        "Liveness, app Startup"
    )


def test_pod_whose_namespace_cannot_be_read_has_no_mesh() -> None:
    pods = [pod(netns=None), pod(netns="/run/netns/none")]
    assert [meshes.read(one) for one in pods] == [None, None]
    assert doctor.check(report(*pods)) == []

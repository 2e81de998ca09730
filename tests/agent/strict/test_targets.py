"""Which addresses and ports the relay is told to carry, and whose they are."""

from agent.pods.pod_state import PodState
from agent.strict.targets import plan_of, uid_of, why_never
from bpf.verdicts import Mode
from tests.agent.strict.strict_pods import HTTP_8080, guarded, tcp

ONE, OTHER = "198.18.1.1", "198.18.1.2"


def claims(*pods: PodState) -> dict[str, tuple[int, ...]]:
    """By pod's name, of its only target."""
    names = {pod.pod.uid: pod.pod.name for pod in pods}
    targets = plan_of(pods).targets
    return {names[uid_of(target.key)]: target.claims for target in targets}


def test_each_address_is_a_target_with_the_ports_that_the_gate_admits() -> None:
    web = guarded("web", ONE, "fd00:18::1", container=tcp(5432))
    targets = plan_of([web]).targets
    assert [target.address for target in targets] == [ONE, "fd00:18::1"]
    assert {target.ports for target in targets} == {((5432, 5432),)}
    assert {target.claims for target in targets} == {(5432,)}
    assert {target.netns_inode for target in targets} == {web.netns.inode if web.netns else 0}


def test_an_address_that_the_pod_only_claims_is_no_target() -> None:
    (target,) = plan_of([guarded("web", ONE, claimed=(OTHER,))]).targets
    assert target.address == ONE
    assert plan_of([guarded("web", claimed=(OTHER,))]).targets == ()
    why = why_never(guarded("web", claimed=(OTHER,)))
    assert why == "no address in the pod's network namespace is confirmed as its own."


def test_a_claim_takes_no_port_from_the_pod_whose_address_it_is() -> None:
    pods = [guarded("web", ONE, container=tcp(80)), guarded("b", OTHER, claimed=(ONE,))]
    assert claims(*pods) == {"web": (80,), "b": (8080, 0)}


def test_any_port_of_a_pod_with_http_is_carried() -> None:
    (target,) = plan_of([guarded("web", ONE)]).targets
    assert target.ports == ((0, 65535),)
    assert target.claims == (8080, 0)


def test_pod_that_declares_nothing_needs_no_target() -> None:
    assert plan_of([guarded("idle", ONE, container={})]).targets == ()


def test_only_strict_pods_whose_gate_stands_are_carried_to() -> None:
    pods = [
        guarded("early", "198.18.1.3", stands=False),
        guarded("open", "198.18.1.4", mode=Mode.ENFORCE),
        guarded("direct", "198.18.1.5", is_relayed=False),
        guarded("kata", "198.18.1.6", taps=("tap0_kata",)),
        guarded("web", ONE),
    ]
    assert claims(*pods) == {"web": (8080, 0)}


def test_pods_that_are_never_carried_to_say_why() -> None:
    assert why_never(guarded("web", ONE)) is None
    off = why_never(guarded("direct", ONE, is_relayed=False))
    assert off == "the annotation podgate.io/relay keeps the relay off."
    machine = why_never(guarded("kata", ONE, taps=("tap0_kata",)))
    assert machine is not None
    assert "virtual machine behind tap0_kata" in machine
    nowhere = why_never(guarded("kata", "fe80::1"))
    assert nowhere == "no address of the pod is on an interface in its network namespace."


def test_port_that_two_pods_of_one_address_declare_is_neithers_and_both_say_so() -> None:
    pods = [
        guarded("a", ONE, container=tcp(80)),
        guarded("b", ONE, container=tcp(80)),
        guarded("c", OTHER, container=tcp(80)),
    ]
    assert claims(*pods) == {"c": (80,)}
    assert plan_of(pods).shared == {
        "uid-a": "pod shop/b of this node has the address 198.18.1.1 as well, so the kubelet's "
        "connections to these ports cannot be told apart: 80.",
        "uid-b": "pod shop/a of this node has the address 198.18.1.1 as well, so the kubelet's "
        "connections to these ports cannot be told apart: 80.",
    }


def test_ports_that_only_one_of_them_declares_go_to_it() -> None:
    pods = [guarded("a", ONE, container=tcp(80)), guarded("b", ONE, container=tcp(81))]
    assert claims(*pods) == {"a": (80,), "b": (81,)}
    assert plan_of(pods).shared == {}


def test_all_other_ports_go_to_the_one_with_http() -> None:
    pods = [guarded("a", ONE, container=tcp(80)), guarded("b", ONE)]
    assert claims(*pods) == {"a": (80,), "b": (8080, 0)}


def test_other_ports_are_neithers_where_both_have_http() -> None:
    other = {"readinessProbe": {"httpGet": {"port": 9090}}}
    pods = [guarded("a", ONE), guarded("b", ONE, container=other)]
    assert claims(*pods) == {"a": (8080,), "b": (9090,)}
    assert plan_of(pods).shared["uid-a"].endswith("cannot be told apart: others.")


def test_port_that_is_neithers_does_not_fall_to_the_one_with_all_others() -> None:
    """A connect that finds no claim of its own is redirected by 0."""
    pods = [guarded("a", ONE), guarded("b", ONE, container=tcp(8080))]
    assert claims(*pods) == {}


def test_pod_that_is_not_in_strict_keeps_its_ports_too() -> None:
    enforced = guarded("b", ONE, container=tcp(81), mode=Mode.ENFORCE)
    assert claims(guarded("a", ONE, container=tcp(81)), enforced) == {}
    assert claims(guarded("a", ONE), enforced) == {"a": (8080,)}
    idle = guarded("b", ONE, container={}, mode=Mode.ENFORCE)
    assert claims(guarded("a", ONE, container=HTTP_8080), idle) == {"a": (8080, 0)}

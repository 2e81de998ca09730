"""Held SYNs, with real pods to connect to, and a clock set by the test."""

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Iterator

import pytest

from agent.lab.lab import Lab, LabPod
from agent.relay import held_syns, segments
from agent.relay.epoll import EpollPoller
from agent.relay.held_syns import HeldSyns
from agent.relay.messages import RelayTargetSpec
from agent.relay.outcomes import AnswerCounter, OutcomeCounter
from agent.relay.segments import Syn
from agent.relay.targets import RelayTarget, Targets

pytestmark = pytest.mark.kernel

_SUBNETS = [ipaddress.ip_network(net) for net in ("198.18.64.0/21", "fd00:18:64::/67")]
_PEER = socket.inet_aton("198.18.64.1")
_OPEN_PORT, _FULL_PORT, _CLOSED_PORT, _OTHER_PORT = 8080, 8081, 8082, 9999


class RecordingInjector:
    """Records SYNs instead of sending packets."""

    def __init__(self) -> None:
        self.reinjected: list[Syn] = []
        self.rejected: list[Syn] = []

    def reinject(self, syn: Syn) -> None:
        self.reinjected.append(syn)

    def send_reset(self, syn: Syn) -> None:
        self.rejected.append(syn)


class SilentListeners:
    """Listeners, each of which never accepts a connection."""

    def prepare(self, port: int) -> "SilentListeners":
        return self

    def accept(self) -> bool:
        return False


@dataclasses.dataclass
class Relay:
    """Held SYNs without a relay's namespace: no packet arrives."""

    poller: EpollPoller
    targets: Targets
    counter: OutcomeCounter
    sent: RecordingInjector
    held: HeldSyns
    target: RelayTarget
    seconds: list[float]
    full: list[None]

    def syn(self, port: int, *, sequence: int = 1, peer_port: int = 40000) -> Syn:
        return Syn(_PEER, peer_port, self.target.relay.packed, port, sequence, b"")

    def outcomes(self) -> dict[str, int]:
        return {sample.outcome: sample.count for sample in self.counter.drain()}

    def turn(self) -> None:
        self.poller.poll(0.05)


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    made = lab.add_pod("web", 1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(made.listen(_OPEN_PORT))
        full = stack.enter_context(made.listen(_FULL_PORT))
        full.listen(0)
        # A backlog of 0 accepts one connection.
        filler = stack.enter_context(made.open_socket(socket.AF_INET, socket.SOCK_STREAM))
        filler.connect((made.ipv4, _FULL_PORT))
        yield made


@pytest.fixture
def relay(pod: LabPod, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    sent = RecordingInjector()
    monkeypatch.setattr(held_syns, "SynInjector", lambda: sent)
    monkeypatch.setattr(held_syns, "PortListeners", lambda poller, handler: SilentListeners())
    seconds = [100.0]
    targets = Targets(_SUBNETS, lambda: seconds[0])
    counter = OutcomeCounter()
    answered = AnswerCounter()
    full: list[None] = []
    netns = pod.netns
    target = targets.add(
        RelayTargetSpec(
            *("web", netns.path, netns.device, netns.inode, pod.ipv4),
            ((_OPEN_PORT, _CLOSED_PORT),),
            (_OPEN_PORT,),
        )
    )
    with contextlib.closing(EpollPoller()) as poller:
        held = HeldSyns(
            poller,
            targets,
            counter,
            answered,
            way=set(),
            maximum=3,
            on_full=lambda: full.append(None),
            on_exhausted=lambda: None,
            on_warning=pytest.fail,
            now=lambda: seconds[0],
        )
        yield Relay(poller, targets, counter, sent, held, target, seconds, full)
        held.abandon(target)


def test_syn_is_released_when_the_pod_accepts(relay: Relay) -> None:
    syn = relay.syn(_OPEN_PORT)
    relay.held.hold(syn)
    assert relay.sent.reinjected == [syn]
    assert relay.held.count == 1


def test_retransmitted_syn_is_injected_again_without_another_dial(
    relay: Relay, pod: LabPod
) -> None:
    syn = relay.syn(_OPEN_PORT)
    relay.held.hold(syn)
    relay.held.hold(syn)
    assert relay.sent.reinjected == [syn, syn]
    assert relay.held.count == 1


def test_closed_port_is_rejected_at_once(relay: Relay) -> None:
    relay.held.hold(relay.syn(_CLOSED_PORT))
    assert [syn.port for syn in relay.sent.rejected] == [_CLOSED_PORT]
    assert relay.held.count == 0
    assert relay.outcomes() == {"refused": 1}


def test_undeclared_port_and_unknown_address_are_rejected_without_a_dial(relay: Relay) -> None:
    relay.held.hold(relay.syn(_OTHER_PORT))
    foreign = dataclasses.replace(relay.syn(_OPEN_PORT), local=_SUBNETS[0][99].packed)
    relay.held.hold(foreign)
    assert len(relay.sent.rejected) == 2
    assert relay.outcomes() == {"undeclared": 1, "unknown_address": 1}


def test_syn_to_a_silent_pod_gets_no_response(relay: Relay) -> None:
    syn = relay.syn(_FULL_PORT)
    relay.held.hold(syn)
    relay.turn()
    assert relay.held.count == 1
    assert not relay.sent.reinjected
    assert not relay.sent.rejected


def test_syn_is_held_while_the_kubelet_retransmits_and_no_longer(relay: Relay) -> None:
    syn = relay.syn(_FULL_PORT)
    started = relay.seconds[0]
    # Retransmissions by RFC 6298.
    for after in (0.0, 1.0, 3.0, 7.0, 15.0):
        relay.seconds[0] = started + after
        relay.held.expire()
        relay.held.hold(syn)
        assert relay.held.count == 1
    relay.seconds[0] = started + 15.0 + 2.5 * 15.0
    relay.held.expire()
    assert relay.held.count == 1
    relay.seconds[0] += 0.1
    relay.held.expire()
    assert relay.held.count == 0
    assert relay.outcomes() == {"timeout": 1}


def test_syn_without_a_retransmission_expires_soon(relay: Relay) -> None:
    relay.held.hold(relay.syn(_FULL_PORT))
    relay.seconds[0] += 1.6
    relay.held.expire()
    assert relay.held.count == 0


def test_another_syn_from_the_same_port_replaces_the_previous(
    relay: Relay,
) -> None:
    relay.held.hold(relay.syn(_FULL_PORT, sequence=1))
    relay.held.hold(relay.syn(_FULL_PORT, sequence=2))
    assert relay.held.count == 1
    assert relay.outcomes() == {"timeout": 1}


def test_held_syn_is_rejected_when_its_sandbox_goes(relay: Relay) -> None:
    syn = relay.syn(_FULL_PORT)
    relay.held.hold(syn)
    relay.held.abandon(relay.target)
    assert relay.sent.rejected == [syn]
    assert relay.held.is_empty
    assert relay.outcomes() == {"sandbox_gone": 1}


def test_syn_to_a_deleted_namespace_is_rejected(relay: Relay, lab: Lab) -> None:
    lab.remove_pod("web")
    relay.held.hold(relay.syn(_OPEN_PORT))
    assert len(relay.sent.rejected) == 1
    assert relay.outcomes() == {"sandbox_gone": 1}


def test_last_syn_that_fits_reports_that_the_relay_is_full(relay: Relay) -> None:
    for peer_port in (40000, 40001):
        relay.held.hold(relay.syn(_FULL_PORT, peer_port=peer_port))
    assert not relay.full
    relay.held.hold(relay.syn(_FULL_PORT, peer_port=40002))
    assert len(relay.full) == 1
    assert relay.held.is_full


def test_reset_has_the_length_of_the_kernels() -> None:
    syn = Syn(_PEER, 40000, _SUBNETS[0][16].packed, 80, 7, b"")
    assert len(segments.reset_for(syn)) == 40

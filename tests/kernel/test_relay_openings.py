"""What becomes of openings that are held: real pods to dial, and time that the test says."""

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Iterator

import pytest

from agent.lab.lab import Lab, LabPod
from agent.relay import held_syns, segments
from agent.relay.epoll import Poller
from agent.relay.held_syns import HeldOpenings
from agent.relay.messages import WantedTarget
from agent.relay.segments import Opening
from agent.relay.stats import Tally
from agent.relay.targets import Target, Targets

pytestmark = pytest.mark.kernel

_SUBNETS = [ipaddress.ip_network(net) for net in ("198.18.64.0/21", "fd00:18:64::/67")]
_PEER = socket.inet_aton("198.18.64.1")
_OPEN_PORT, _FULL_PORT, _CLOSED_PORT, _OTHER_PORT = 8080, 8081, 8082, 9999


class Sent:
    """In the injector's place: openings that went on, and those that were refused."""

    def __init__(self) -> None:
        self.again: list[Opening] = []
        self.refused: list[Opening] = []

    def open_again(self, opening: Opening) -> None:
        self.again.append(opening)

    def refuse(self, opening: Opening) -> None:
        self.refused.append(opening)


class NobodyComes:
    """In the listeners' place, and in that of each: what goes on never arrives."""

    def prepare(self, port: int) -> "NobodyComes":
        return self

    def accept(self) -> bool:
        return False


@dataclasses.dataclass
class Relay:
    """A relay's openings without its namespace: nothing arrives by itself."""

    poller: Poller
    targets: Targets
    tally: Tally
    sent: Sent
    held: HeldOpenings
    target: Target
    seconds: list[float]
    full: list[None]

    def opening(self, port: int, *, sequence: int = 1, peer_port: int = 40000) -> Opening:
        return Opening(_PEER, peer_port, self.target.relay.packed, port, sequence, b"")

    def outcomes(self) -> dict[str, int]:
        return {sample.outcome: sample.count for sample in self.tally.take()}

    def turn(self) -> None:
        self.poller.poll(0.05)


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    made = lab.add_pod("web", 1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(made.listen(_OPEN_PORT))
        full = stack.enter_context(made.listen(_FULL_PORT))
        full.listen(0)
        # A queue of 0 has room for one.
        filler = stack.enter_context(made.open_socket(socket.AF_INET, socket.SOCK_STREAM))
        filler.connect((made.ipv4, _FULL_PORT))
        yield made


@pytest.fixture
def relay(pod: LabPod, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    sent = Sent()
    monkeypatch.setattr(held_syns, "Injector", lambda: sent)
    monkeypatch.setattr(held_syns, "Listeners", lambda poller, arrivals: NobodyComes())
    seconds = [100.0]
    targets = Targets(_SUBNETS, lambda: seconds[0])
    tally = Tally()
    full: list[None] = []
    netns = pod.netns
    target = targets.add(
        WantedTarget(
            *("web", netns.path, netns.device, netns.inode, pod.ipv4),
            ((_OPEN_PORT, _CLOSED_PORT),),
            (_OPEN_PORT,),
        )
    )
    with contextlib.closing(Poller()) as poller:
        held = HeldOpenings(
            poller,
            targets,
            tally,
            most=3,
            on_full=lambda: full.append(None),
            on_exhausted=lambda: None,
            on_trouble=pytest.fail,
            now=lambda: seconds[0],
        )
        yield Relay(poller, targets, tally, sent, held, target, seconds, full)
        held.abandon(target)


def test_an_opening_goes_on_once_the_pod_has_answered(relay: Relay) -> None:
    opening = relay.opening(_OPEN_PORT)
    relay.held.take(opening)
    assert relay.sent.again == [opening]
    assert relay.held.count == 1


def test_one_that_comes_again_because_it_got_lost_goes_on_again_without_another_dial(
    relay: Relay, pod: LabPod
) -> None:
    opening = relay.opening(_OPEN_PORT)
    relay.held.take(opening)
    relay.held.take(opening)
    assert relay.sent.again == [opening, opening]
    assert relay.held.count == 1


def test_a_closed_port_is_refused_at_once(relay: Relay) -> None:
    relay.held.take(relay.opening(_CLOSED_PORT))
    assert [opening.port for opening in relay.sent.refused] == [_CLOSED_PORT]
    assert relay.held.count == 0
    assert relay.outcomes() == {"refused": 1}


def test_an_undeclared_port_and_an_unknown_address_are_refused_undialled(relay: Relay) -> None:
    relay.held.take(relay.opening(_OTHER_PORT))
    stranger = dataclasses.replace(relay.opening(_OPEN_PORT), local=_SUBNETS[0][99].packed)
    relay.held.take(stranger)
    assert len(relay.sent.refused) == 2
    assert relay.outcomes() == {"undeclared": 1, "unknown": 1}


def test_a_pod_that_does_not_answer_is_not_answered_for(relay: Relay) -> None:
    opening = relay.opening(_FULL_PORT)
    relay.held.take(opening)
    relay.turn()
    assert relay.held.count == 1
    assert not relay.sent.again
    assert not relay.sent.refused


def test_while_the_kubelet_asks_again_it_is_waited_for_and_no_longer(relay: Relay) -> None:
    opening = relay.opening(_FULL_PORT)
    began = relay.seconds[0]
    # RFC 6298's waits, from the first second on.
    for after in (0.0, 1.0, 3.0, 7.0, 15.0):
        relay.seconds[0] = began + after
        relay.held.expire()
        relay.held.take(opening)
        assert relay.held.count == 1
    relay.seconds[0] = began + 15.0 + 2.5 * 15.0
    relay.held.expire()
    assert relay.held.count == 1
    relay.seconds[0] += 0.1
    relay.held.expire()
    assert relay.held.count == 0
    assert relay.outcomes() == {"unanswered": 1}


def test_one_that_gives_up_before_the_first_second_is_forgotten_soon(relay: Relay) -> None:
    relay.held.take(relay.opening(_FULL_PORT))
    relay.seconds[0] += 1.6
    relay.held.expire()
    assert relay.held.count == 0


def test_another_opening_from_the_same_port_takes_the_place_of_the_one_before(
    relay: Relay,
) -> None:
    relay.held.take(relay.opening(_FULL_PORT, sequence=1))
    relay.held.take(relay.opening(_FULL_PORT, sequence=2))
    assert relay.held.count == 1
    assert relay.outcomes() == {"unanswered": 1}


def test_what_waits_for_a_sandbox_that_goes_is_refused(relay: Relay) -> None:
    opening = relay.opening(_FULL_PORT)
    relay.held.take(opening)
    relay.held.abandon(relay.target)
    assert relay.sent.refused == [opening]
    assert relay.held.is_empty
    assert relay.outcomes() == {"gone": 1}


def test_a_namespace_that_is_gone_before_anybody_said_so_is_refused(relay: Relay, lab: Lab) -> None:
    lab.remove_pod("web")
    relay.held.take(relay.opening(_OPEN_PORT))
    assert len(relay.sent.refused) == 1
    assert relay.outcomes() == {"gone": 1}


def test_that_there_is_no_room_for_more_is_told_with_the_last_one(relay: Relay) -> None:
    for peer_port in (40000, 40001):
        relay.held.take(relay.opening(_FULL_PORT, peer_port=peer_port))
    assert not relay.full
    relay.held.take(relay.opening(_FULL_PORT, peer_port=40002))
    assert len(relay.full) == 1
    assert relay.held.is_full


def test_a_refusal_reads_as_one_of_the_kernels() -> None:
    opening = Opening(_PEER, 40000, _SUBNETS[0][16].packed, 80, 7, b"")
    assert len(segments.refusal(opening)) == 40

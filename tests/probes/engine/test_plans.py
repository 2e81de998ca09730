"""What is the same in every run of a probe is prepared once."""

import msgspec
import pytest

from probes.engine import prober
from probes.engine.families import NO_INTERFACES
from probes.engine.prober import ProbePlan
from probes.protocols.client_certificates import ClientCertificate
from probes.spec.definitions import Exec, Probe, TcpSocket
from tests.probes.authorities import Authority

ADDRESSES = ("198.18.0.1", "fd00:18::1", "198.18.0.2", "fd00:18::2")


@pytest.mark.parametrize(
    ("count", "timeout", "delay"),
    [
        # Half of the time is divided among the addresses after the first.
        (1, 0.2, 0.1),
        (2, 0.2, 0.1),
        (3, 0.2, 0.05),
        (4, 0.9, 0.15),
        (1, 2.0, 0.25),
        (2, 0.5, 0.25),
        (4, 2.0, 0.25),
    ],
)
def test_each_address_has_half_of_the_time_or_a_quarter_of_a_second_passes(
    count: int, timeout: float, delay: float
) -> None:
    plan = prober.plan(Probe(TcpSocket(80), timeout_seconds=timeout), ADDRESSES[:count])
    assert [candidate.address for candidate in plan.candidates] == list(ADDRESSES[:count])
    assert len(plan.groups) == 1
    assert (plan.timeout_seconds, plan.rejection, plan.is_unknown) == (timeout, "", False)
    assert plan.attempt_delay_seconds == pytest.approx(delay)


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (Probe(Exec(("true",))), "are run by the kubelet, never by podgate"),
        (Probe(TcpSocket(80), timeout_seconds=0.0), "must be positive, not 0.0"),
        (Probe(TcpSocket(80), timeout_seconds=-0.5), "must be positive, not -0.5"),
        (Probe(TcpSocket(80), timeout_seconds=float("nan")), "must be positive, not nan"),
    ],
)
def test_probe_that_cannot_be_run_is_rejected(probe: Probe, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prober.plan(probe, ADDRESSES)


def test_pod_without_an_address_has_a_plan_that_names_the_reason() -> None:
    plan = prober.plan(Probe(TcpSocket(80)), ["fe80::1"], NO_INTERFACES)
    assert plan == ProbePlan((), 1.0, 1.0, "the pod has no address to probe")
    assert plan.candidates == ()


def test_plans_have_the_same_certificate_or_lack_it_for_the_same_reason() -> None:
    authority = Authority()
    one, other = (ClientCertificate(*authority.issue()) for _ in range(2))
    plans = [
        ProbePlan((), 1.0, 1.0),
        ProbePlan((), 1.0, 1.0, certificate=one),
        ProbePlan((), 1.0, 1.0, certificate=other),
        ProbePlan((), 1.0, 1.0, certificate_problem="it does not exist"),
        ProbePlan((), 1.0, 1.0, certificate_problem="it has expired"),
    ]
    for place, plan in enumerate(plans):
        found = [plan.has_certificate_of(each) for each in plans]
        assert found == [number == place for number in range(len(plans))]
        later = msgspec.structs.replace(plan, timeout_seconds=2.0, rejection="no address")
        assert plan.has_certificate_of(later)

"""Whose word counts of a local pod's readiness: podgate's or the API's."""

import datetime
from typing import Any

import msgspec
import pytest

from agent.api.services.local_readiness import LocalReadiness, ProbeReadiness, effective_readiness
from agent.kube.objects import ApiPod
from agent.pods.conditions import FALSE, TRUE, Condition

NOON = datetime.datetime(2026, 1, 1, 12, 0, 0, tzinfo=datetime.UTC)
PROBE = {"httpGet": {"port": 80}}
GATE = "podgate.io/probes-passing"


def at(seconds: float) -> datetime.datetime:
    return NOON + datetime.timedelta(seconds=seconds)


def pod(
    ready: str | None = "True",
    since: str | None = "2026-01-01T12:00:00Z",
    *,
    probe: dict[str, Any] | None = PROBE,
    is_container_ready: bool = True,
    gates: tuple[str, ...] = (),
    conditions: dict[str, str] | None = None,
    uid: str = "api-1",
    ip: str = "198.19.0.1",
    **spec: Any,
) -> ApiPod:
    told = [{"type": kind, "status": status} for kind, status in (conditions or {}).items()]
    if ready is not None:
        told.append({"type": "Ready", "status": ready, "lastTransitionTime": since})  # type: ignore[dict-item]
    return msgspec.convert(
        {
            "metadata": {"name": "web", "namespace": "default", "uid": uid},
            "spec": {
                "containers": [{"name": "app", "readinessProbe": probe}],
                "readinessGates": [{"conditionType": gate} for gate in gates],
                **spec,
            },
            "status": {
                "podIPs": [{"ip": ip}],
                "conditions": told,
                "containerStatuses": [{"name": "app", "ready": is_container_ready}],
            },
        },
        ApiPod,
    )


@pytest.mark.parametrize(
    ("word", "found", "verdict"),
    [
        # Nobody probes it.
        (None, pod("True"), None),
        # Both say the same: so it is, whatever the slices still say.
        (ProbeReadiness(True, at(-9)), pod("True"), True),
        (ProbeReadiness(False, at(-9)), pod("False"), False),
        # Who changed his mind last is believed.
        (ProbeReadiness(False, at(1)), pod("True"), False),
        (ProbeReadiness(False, at(-1)), pod("True"), None),
        (ProbeReadiness(True, at(1)), pod("False", is_container_ready=False), True),
        (ProbeReadiness(True, at(-1)), pod("False", is_container_ready=False), None),
        # In the same second: podgate, since the API's time was cut off.
        (ProbeReadiness(False, at(0.5)), pod("True"), False),
        (ProbeReadiness(False, at(0)), pod("True"), False),
        # The kubelet has not said anything, or not when.
        (ProbeReadiness(False, at(-1)), pod(None), False),
        (ProbeReadiness(False, at(-1)), pod("True", None), False),
        (ProbeReadiness(False, at(-1)), pod("True", "yesterday"), False),
        (ProbeReadiness(True, at(1)), pod(None, is_container_ready=False), True),
        # That probes pass is not enough where something else is missing.
        (ProbeReadiness(True, at(1)), pod("False", is_container_ready=False, probe=None), None),
        (
            ProbeReadiness(True, at(1)),
            pod("False", is_container_ready=False, probe={"exec": {"command": ["true"]}}),
            None,
        ),
        (ProbeReadiness(True, at(1)), pod("False", gates=("other",)), None),
        (
            ProbeReadiness(True, at(1)),
            pod("False", gates=("other",), conditions={"other": "False"}),
            None,
        ),
        (
            ProbeReadiness(True, at(1)),
            pod("False", gates=("other",), conditions={"other": "True"}),
            True,
        ),
        (
            ProbeReadiness(True, at(1)),
            pod("False", gates=(GATE,), conditions={GATE: "False"}),
            True,
        ),
        # That they fail is enough.
        (
            ProbeReadiness(False, at(1)),
            pod("True", gates=("other",), conditions={"other": "True"}),
            False,
        ),
        # The node's own address is not the pod's.
        (ProbeReadiness(False, at(1)), pod("True", hostNetwork=True), None),
    ],
)
def test_who_changed_his_mind_last_is_believed(
    word: ProbeReadiness | None, found: ApiPod, verdict: bool | None
) -> None:
    assert effective_readiness(word, found) is verdict


def test_a_container_that_nobody_has_started_is_not_ready() -> None:
    bare = msgspec.structs.replace(
        pod("False"), status=msgspec.structs.replace(pod("False").status, container_statuses=())
    )
    assert effective_readiness(ProbeReadiness(True, at(1)), bare) is None


class Heard:
    """The news, with a clock of the test's, and whom they were told of."""

    def __init__(self) -> None:
        self.now = at(10)
        self.told: list[frozenset[str]] = []
        self.readiness = LocalReadiness(on_changed=self.told.append, now=lambda: self.now)

    def note(self, reason: str) -> None:
        status = TRUE if reason == "ProbesPassing" else FALSE
        self.readiness.set_probes("api-1", Condition(GATE, status, reason, "", self.now))

    def is_ready(self) -> bool | None:
        return self.readiness.is_ready("api-1", "198.19.0.1")


BOTH = frozenset(("api-1", "198.19.0.1"))


def test_a_pod_that_fails_is_told_once_by_uid_and_address() -> None:
    heard = Heard()
    heard.readiness.set_pod(pod())
    assert heard.is_ready() is None
    heard.note("ProbeFailing")
    heard.note("ProbeFailing")
    assert heard.is_ready() is False
    assert heard.readiness.is_ready("", "198.19.0.1") is False
    assert heard.readiness.is_ready("another", "198.19.0.1") is None
    assert heard.told == [BOTH]


def test_since_when_is_when_the_word_changed_and_not_the_condition() -> None:
    heard = Heard()
    heard.now = at(-5)
    heard.note("NoNetns")
    heard.now = at(10)
    heard.note("ProbeFailing")
    heard.readiness.set_pod(pod())
    assert heard.is_ready() is False


@pytest.mark.parametrize("reason", ["NoProbes", "HostNetwork", "NoNetns", "PodSpecUnknown"])
def test_reasons_that_tell_of_no_probe_are_no_news(reason: str) -> None:
    heard = Heard()
    heard.readiness.set_pod(pod())
    heard.note(reason)
    assert heard.is_ready() is None


def test_an_agent_that_has_just_begun_has_no_news() -> None:
    heard = Heard()
    heard.readiness.set_pod(pod())
    heard.note("ProbePending")
    assert heard.is_ready() is None


def test_a_pod_that_recovers_stays_out_until_it_has_passed_often_enough() -> None:
    heard = Heard()
    heard.readiness.set_pod(pod())
    for reason in ("ProbesPassing", "ProbeFailing", "ProbePending"):
        heard.note(reason)
    assert heard.is_ready() is False
    heard.note("ProbesPassing")
    assert heard.is_ready() is True


def test_the_kubelets_later_word_takes_over() -> None:
    heard = Heard()
    heard.readiness.set_pod(pod())
    heard.note("ProbeFailing")
    heard.readiness.set_pod(pod("True", "2026-01-01T12:00:20Z"))
    assert heard.is_ready() is None
    assert heard.told == [BOTH, BOTH]


def test_a_pod_that_is_gone_says_nothing_of_the_next_one_at_its_address() -> None:
    heard = Heard()
    heard.readiness.set_pod(pod())
    heard.note("ProbeFailing")
    heard.readiness.forget("api-1")
    heard.readiness.set_pod(pod(uid="api-2"))
    assert heard.readiness.is_ready("", "198.19.0.1") is None
    assert heard.is_ready() is None
    assert heard.told == [BOTH, BOTH]


def test_a_pod_gets_its_address_later() -> None:
    heard = Heard()
    heard.note("ProbeFailing")
    heard.readiness.set_pod(pod(ip="198.19.0.9"))
    assert heard.is_ready() is False
    heard.readiness.set_pod(pod())
    assert heard.readiness.is_ready("", "198.19.0.1") is False
    assert heard.readiness.is_ready("", "198.19.0.9") is None

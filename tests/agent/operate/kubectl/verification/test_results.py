"""What outcomes of tries show about a pod, a node and the whole run."""

import dataclasses
from typing import Any

import pytest

from agent.operate.kubectl.verification import results
from agent.operate.kubectl.verification.results import NodeResult, Path, Report, Try
from agent.operate.kubectl.verification.targets import Port, Target

PORTS = (Port("TCP", 80, is_declared=True), Port("UDP", 80))
TARGET = Target("shop", "web", "u", "enforce", ("198.18.0.9", "2001:db8::9"), PORTS, True)


def path(*outcomes: str, mode: str = "enforce", kubelet: bool | None = None) -> Path:
    tries = tuple(Try(PORTS[0], outcome, "so") for outcome in outcomes)
    return Path("a", dataclasses.replace(TARGET, mode=mode), "198.18.0.9", tries, kubelet)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (path("closed", "unclear"), "closed"),
        (path("unclear", "unclear"), "unclear"),
        (path(), "unclear"),
        (path("closed", "open", kubelet=False), "HOLE"),
        (path("closed", "open", mode="strict"), "HOLE"),
        (path("closed", "open", mode="audit"), "open"),
        (path("closed", kubelet=False), "kubelet blocked"),
        (path("unclear", kubelet=False), "kubelet blocked"),
        (path("closed", kubelet=True), "closed"),
    ],
)
def test_verdict_is_the_worst_outcome(found: Path, verdict: str) -> None:
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("nodes", "is_well", "has_hole"),
    [
        ((NodeResult("a", (path("closed"), path("open", mode="off"))),), True, False),
        ((NodeResult("a", (path("closed"),)), NodeResult("b")), True, False),
        ((NodeResult("a"),), False, False),
        ((), False, False),
        ((NodeResult("a", (path("closed"),), problems=("it hangs",)),), False, False),
        ((NodeResult("a", (path("closed"), path("closed", kubelet=False))),), False, False),
        ((NodeResult("a", (path("closed"), path("open"))),), False, True),
    ],
)
def test_run_is_well_if_all_was_tried_and_nothing_is_wrong(
    nodes: tuple[NodeResult, ...], *, is_well: bool, has_hole: bool
) -> None:
    report = Report(nodes, "", "")
    assert (report.is_well, report.has_hole) == (is_well, has_hole)


def test_run_without_a_try_is_one_sentence() -> None:
    assert Report((NodeResult("a"),), "", "").sentences() == ["Nothing was tried."]


def answer(outcome: str, detail: str, **changes: Any) -> dict[str, object]:
    of = {"address": "198.18.0.9", "protocol": "TCP", "port": 80}
    return {**of, "outcome": outcome, "detail": detail, **changes}


@pytest.mark.parametrize("is_canary", [False, True])
def test_answers_are_those_of_each_address_and_port(*, is_canary: bool) -> None:
    target = dataclasses.replace(TARGET, is_canary=is_canary)
    answers = [
        answer("unclear", "no answer"),
        answer("unclear", "no answer", protocol="UDP"),
        answer("open", "answered", address="2001:db8::9", protocol="UDP"),
        answer("open", "answered", port=81),
    ]
    tcp, udp = PORTS
    silent = "closed" if is_canary else "unclear"
    first = (Try(tcp, "unclear", "no answer"), Try(udp, silent, "no answer"))
    second = (Try(tcp, "unclear", "not tried"), Try(udp, "open", "answered"))
    found = results.of_target("a", target, answers)
    assert found == [
        Path("a", target, "198.18.0.9", first, True),
        Path("a", target, "2001:db8::9", second, None),
    ]
    assert [one.family for one in found] == ["IPv4", "IPv6"]

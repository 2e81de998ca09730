"""Policies suggested from dropped sources: what they admit, and that --rules accepts them."""

import datetime
import pathlib
from collections.abc import Iterable

import msgspec
import pytest
import yaml

from agent.admin.report import SourceProcessStatus
from agent.drops.source_processes import NO_SOCKET, protocol_word
from agent.linux.cgroups import CgroupId
from agent.pods import documents
from agent.pods.pod import Pod
from agent.policy import api_types, suggestions
from agent.policy.api_types import HostAccessPolicy
from agent.policy.matching import RuleSet
from bpf import abi
from bpf.rules import Rule, SourceKind

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
WEB = Pod(uid="1", namespace="demo", name="web-1", labels={"app": "web", "pod-template-hash": "1"})
OTHER = Pod(uid="2", namespace="demo", name="other", labels={"app": "other"})
A, B = "/system.slice/a.service", "/system.slice/b.service"


def process(sender: str, protocol: int, port: int = 0, pod: Pod = WEB) -> SourceProcessStatus:
    return SourceProcessStatus(
        namespace=pod.namespace,
        pod=pod.name,
        mode="audit",
        protocol=protocol_word(protocol),
        port=port,
        cgroup=sender,
        process="",
        packets=1,
        first=NOW,
        last=NOW,
        labels=pod.labels,
    )


def taken(suggested: Iterable[HostAccessPolicy], directory: pathlib.Path) -> RuleSet:
    """What --rules makes of what `podgate suggest` writes."""
    path = directory / "suggested.yaml"
    path.write_text(yaml.safe_dump_all(msgspec.to_builtins(one) for one in suggested))
    read = [api_types.read(document, source="x") for document in documents.read_all(path)]
    book = RuleSet.of(read)
    return book.with_cgroups({one: (CgroupId(index, 2),) for index, one in enumerate([A, B], 1)})


def admitted(book: RuleSet, pod: Pod) -> set[tuple[SourceKind, int, int, int, int]]:
    def short(rule: Rule) -> tuple[SourceKind, int, int, int, int]:
        return rule.source, rule.cgroup, rule.protocol, rule.first_port, rule.last_port

    admission = book.admit(pod, ())
    assert admission.problem == ""
    return {short(rule) for rule in admission.rules}


def test_scan_of_many_ports_is_no_reason_for_a_policy() -> None:
    scan = msgspec.structs.replace(process(A, 6), has_many_ports=True)
    policies, nameless = suggestions.suggest([scan])
    assert (policies, nameless) == ([], [])


def test_suggestions_admit_the_dropped_sources_only(tmp_path: pathlib.Path) -> None:
    seen = [
        process(A, 6, 80),
        process(A, 6, 81),
        process(B, 6, 80),
        process(B, 17, 53),
        process(A, 1),
        process(NO_SOCKET, 47),
        process(A, 6, 443, OTHER),
    ]
    suggested, nameless = suggestions.suggest(seen)
    assert nameless == []
    book = taken(suggested, tmp_path)
    assert admitted(book, WEB) == {
        (SourceKind.CGROUP, 1, 6, 80, 81),
        (SourceKind.CGROUP, 1, 1, 0, 65535),
        (SourceKind.CGROUP, 1, 58, 0, 65535),
        (SourceKind.CGROUP, 2, 6, 80, 80),
        (SourceKind.CGROUP, 2, 17, 53, 53),
        (SourceKind.KERNEL, 0, 47, 0, 65535),
    }
    assert admitted(book, OTHER) == {(SourceKind.CGROUP, 1, 6, 443, 443)}


def test_sources_with_equal_ports_share_a_policy() -> None:
    suggested, _ = suggestions.suggest([process(A, 6, 80), process(B, 6, 80)])
    assert [len(policy.spec.from_) for policy in suggested] == [2]


def test_labels_of_a_single_pod_or_revision_are_not_used() -> None:
    (policy,), _ = suggestions.suggest([process(A, 6, 80)])
    assert policy.spec.pods.pod_selector is not None
    assert policy.spec.pods.pod_selector.match_labels == {"app": "web"}
    assert policy.spec.pods.namespaces == ("demo",)


def test_a_container_is_named_by_its_pod_whose_cgroup_stays() -> None:
    slice_of_pod = (
        "/kubepods.slice/kubepods-burstable.slice/"
        "kubepods-burstable-pod0123abcd_0123_4567_89ab_0123456789ab.slice"
    )
    (policy,), _ = suggestions.suggest(
        [process(f"{slice_of_pod}/cri-containerd-{'ab' * 32}.scope", 6, 80)]
    )
    cgroup = policy.spec.from_[0].cgroup
    assert cgroup is not None
    assert (cgroup.path, cgroup.match) == (slice_of_pod, "subtree")


def test_source_without_a_cgroup_is_returned_and_not_guessed() -> None:
    gone = process("(gone)", 6, 80)
    assert suggestions.suggest([gone]) == ([], [gone])


@pytest.mark.parametrize("protocol", [6, 17, 132, 1, 58, 47, 50, 103, 136])
def test_every_protocol_that_drops_shows_is_taken(protocol: int, tmp_path: pathlib.Path) -> None:
    port = 7 if protocol in (6, 17, 132, 136) else 0
    suggested, _ = suggestions.suggest([process(A, protocol, port)])
    assert protocol in {rule[2] for rule in admitted(taken(suggested, tmp_path), WEB)}


def test_more_than_a_policy_holds_becomes_several(tmp_path: pathlib.Path) -> None:
    seen = [process(sender, 6, port) for sender in (A, B) for port in range(1, 100, 2)]
    suggested, _ = suggestions.suggest([*seen, process(A, 1), process(B, 1)])
    book = taken(suggested, tmp_path)
    assert all(len(policy.rules) <= abi.GATE_RULES for policy in book.policies)
    rules = {rule for policy in book.policies for rule in policy.rules}
    assert len(rules) == 2 * (50 + 2)

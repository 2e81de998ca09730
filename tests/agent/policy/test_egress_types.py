"""HostEgressPolicies: what each means, and mistakes, which the API server names, too."""

import ipaddress
from typing import Any

import pytest

from agent.linux.cgroups import CgroupId
from agent.pods.object_labels import LabelSnapshot
from agent.policy import egress_subjects, egress_types
from agent.policy.egress_types import EgressPolicy
from agent.policy.kinds import PolicyError
from bpf.host_egress_tables import EgressRule, EgressSubject
from tests.agent.policy import egress_answers
from tests.agent.policy.egress_answers import VALID, WRONG, document

PODS: dict[str, Any] = {"hostNetworkPods": {"podSelector": {}}}
UNIT = {"systemdUnit": {"name": "backup.service"}}


def policy(name: str = "a", **spec: Any) -> EgressPolicy:
    found = document(**spec)
    found["metadata"]["name"] = name
    return egress_types.read(found, "a.yaml")


def test_recording_is_of_this_schema() -> None:
    assert egress_answers.recorded()["schema"] == egress_answers.schema_digest(), (
        "record again: PODGATE_TEST_RECORD=1 make test-cluster BIN=DIR "
        "FILES=tests/cluster/test_policy_schema.py"
    )
    recorded = {name: one["spec"] for name, one in egress_answers.recorded()["answers"].items()}
    assert recorded == egress_answers.specs()


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_mistake_is_named_by_the_api_server_and_by_the_agent(number: int) -> None:
    spec, field = WRONG[number]
    answer = egress_answers.recorded()["answers"][f"wrong {number}"]
    assert answer["code"] in (400, 422)
    assert field in answer["message"]
    with pytest.raises(PolicyError) as error:
        policy(**spec)
    assert field in str(error.value)


@pytest.mark.parametrize("number", range(len(VALID)))
def test_what_is_stored_means_what_was_written(number: int) -> None:
    stored = egress_answers.recorded()["answers"][f"valid {number}"]["stored"]
    written = policy(**VALID[number])
    kept = egress_types.read({**document(), "spec": stored}, "a.yaml")
    assert (kept.subjects, kept.excepted) == (written.subjects, written.excepted)
    assert (kept.destinations, kept.is_enforced) == (written.destinations, written.is_enforced)


def test_presets_are_these_destinations() -> None:
    deny = [{"preset": name} for name in ("Metadata", "Kubelet", "Etcd", "Loopback")]
    assert [str(one) for one in policy(deny=deny).destinations] == [
        "127.0.0.0/8",
        "169.254.169.254/32",
        "::1/128",
        "fd00:ec2::254/128",
        "the node TCP 10250",
        "the node TCP 10255",
        "the node TCP 2379-2380",
    ]


def test_destination_in_words_has_its_protocol_and_ports() -> None:
    ports: list[dict[str, Any]] = [
        {"protocol": "UDP"},
        {"protocol": 47},
        {"port": 80},
        {"port": 1, "endPort": 65535},
    ]
    found = policy(deny=[{"cidr": "10.0.0.0/8", "ports": ports}]).destinations
    assert [str(one) for one in found] == [
        "10.0.0.0/8 47",
        "10.0.0.0/8 TCP 1-65535",
        "10.0.0.0/8 TCP 80",
        "10.0.0.0/8 UDP",
    ]


def test_audit_is_the_default() -> None:
    assert not policy().is_enforced
    assert policy(action="Enforce").is_enforced


def test_table_has_a_bit_for_each_policy_and_podgate_itself_is_no_subject() -> None:
    one = policy("one", subjects=[UNIT], deny=[{"cidr": "10.0.0.0/8"}], action="Enforce")
    two = policy("two", subjects=[PODS], **{"except": [UNIT]}, deny=[{"preset": "Etcd"}])
    unit, pod, own = CgroupId(7, 2), CgroupId(8, 3), CgroupId(9, 4)
    cgroups = {one.subjects[0].name: (unit,), two.subjects[0].name: (pod, CgroupId(1, 0))}
    made = egress_subjects.table([one, two], {"one": 3, "two": 5}, cgroups, own)
    assert made.subjects == {
        7: EgressSubject(2, denied=1 << 3, excepted=1 << 5),
        8: EgressSubject(3, denied=1 << 5),
        9: EgressSubject(4, excepted=(1 << 64) - 1),
    }
    assert made.enforced == 1 << 3
    assert made.rules == (
        EgressRule(3, ipaddress.ip_network("10.0.0.0/8")),
        EgressRule(5, None, is_nodes=True, protocol=6, first_port=2379, last_port=2380),
    )


def test_podgate_itself_is_in_the_table_only_beside_subjects() -> None:
    one, unit, own = policy("one", subjects=[UNIT]), CgroupId(7, 2), CgroupId(9, 4)
    of_nothing = egress_subjects.table([one], {"one": 0}, {}, own)
    assert (of_nothing.subjects, len(of_nothing.rules)) == ({}, 2)
    cgroups = {one.subjects[0].name: (unit,)}
    of_unit = egress_subjects.table([one], {"one": 0}, cgroups, None)
    assert of_unit.subjects == {7: EgressSubject(2, denied=1)}


@pytest.mark.parametrize("wrong", [None, [], "text", {}, {"kind": "HostAccessPolicy"}])
def test_other_documents_are_rejected(wrong: object) -> None:
    with pytest.raises(PolicyError, match="not a HostEgressPolicy"):
        egress_types.read(wrong, "a.yaml")


def test_name_is_one_that_the_api_would_take() -> None:
    with pytest.raises(PolicyError, match=r"metadata.name: 'A' is not a valid name"):
        policy("A")


def test_policy_of_other_nodes_is_left_out() -> None:
    here = policy("here", nodeSelector={"matchLabels": {"role": "worker"}})
    there = policy("there", nodeSelector={"matchLabels": {"role": "control"}})
    found = egress_subjects.of_node([here, there], LabelSnapshot({"role": "worker"}))
    assert [one.name for one in found] == ["here"]

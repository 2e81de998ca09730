"""Which network plugin is recognised, by facts, and what is reported about it."""

import json
import pathlib

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Severity
from agent.linux.rtnetlink import Link
from agent.operate.doctor import cni
from agent.operate.doctor.cni import Facts
from agent.operate.doctor.results import Passed


def facts(*names: str, kind: str | None = "veth", **others: tuple[str, ...]) -> Facts:
    links = [Link(index, name, kind=kind) for index, name in enumerate(names, 1)]
    return Facts(links, **others)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (facts("cilium_host"), "Cilium routes by BPF"),
        (facts(pinned=("cilium",)), "Cilium routes by BPF"),
        (facts("ovs-system", kind="openvswitch"), "An Open vSwitch datapath is on this node:"),
        (facts("antrea-gw0", kind="openvswitch"), "is on this node (Antrea):"),
        (facts("nk1", kind="netkit"), "netkit devices, which have no gate"),
        # Before the first pod.
        (
            facts("eth0", plugins=("calico",), device_types=("netkit",)),
            "connects new pods by netkit devices, which have no gate",
        ),
    ],
)
def test_plugin_that_may_bypass_gates_is_a_warning(found: Facts, expected: str) -> None:
    (finding,) = cni.findings(found)
    assert isinstance(finding, Finding)
    assert finding.severity == Severity.DEGRADED
    assert expected in finding.sentence


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (facts("cali0123", "eth0"), "Network plugin: Calico."),
        (
            facts("bpfin.cali", "cali0123"),
            "Network plugin: Calico with its eBPF data plane.",
        ),
        (
            facts("cali0123", pinned=("cali_v4_ct2",)),
            "Network plugin: Calico with its eBPF data plane.",
        ),
        (facts("eth0", plugins=("calico",), device_types=("veth",)), "Network plugin: calico."),
        (facts("flannel.1", "cni0"), "Network plugin: flannel."),
        (facts("eth0", plugins=("ptp", "portmap")), "Network plugin: ptp, portmap."),
        (facts("eth0"), "No network plugin is recognised."),
    ],
)
def test_other_plugin_is_named(found: Facts, expected: str) -> None:
    assert list(cni.findings(found)) == [Passed("cni", expected)]


def test_two_causes_are_two_findings() -> None:
    links = [Link(1, "cilium_host", kind="veth"), Link(2, "nk1", kind="netkit")]
    assert len(list(cni.findings(Facts(links)))) == 2


def test_first_configuration_that_can_be_read_counts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "00-broken.conflist").write_text("{", encoding="ascii")
    (tmp_path / "05-readme.txt").write_text('{"type": "none"}', encoding="ascii")
    listed = {"plugins": [{"type": "flannel"}, {"type": "portmap"}, 7]}
    (tmp_path / "10-flannel.conflist").write_text(json.dumps(listed), encoding="ascii")
    (tmp_path / "20-bridge.conf").write_text('{"type": "bridge"}', encoding="ascii")
    assert cni.configured(tmp_path) == ({"type": "flannel"}, {"type": "portmap"})
    (tmp_path / "10-flannel.conflist").unlink()
    assert cni.configured(tmp_path) == ({"type": "bridge"},)
    assert cni.configured(tmp_path / "missing") == ()


async def test_device_type_of_the_configuration_is_read(tmp_path: pathlib.Path) -> None:
    listed = {"plugins": [{"type": "calico", "device_type": "netkit"}, {"type": "portmap"}]}
    (tmp_path / "10-calico.conflist").write_text(json.dumps(listed), encoding="ascii")
    (found,) = await cni.check(tmp_path, tmp_path)
    assert isinstance(found, Finding)
    assert found.kind == kinds.NETKIT.name
    assert "veth" in found.remedy


def test_pins_of_others_are_found_in_their_usual_places(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tc" / "globals").mkdir(parents=True)
    (tmp_path / "tc" / "globals" / "cali_v4_ct2").touch()
    (tmp_path / "cilium").mkdir()
    assert cni.pinned_names(tmp_path) == {"tc", "cilium", "cali_v4_ct2"}
    assert cni.pinned_names(tmp_path / "missing") == set()

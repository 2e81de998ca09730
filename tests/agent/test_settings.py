"""Parsing of the kubelet setting and of the relay's ranges."""

import ipaddress

import pytest

from agent.settings import (
    DEFAULT_RELAY_RANGES,
    ByCgroup,
    ByProcess,
    KubeletSetting,
    parse_kubelet,
    parse_range4,
    parse_range6,
)

UNIT = "/system.slice/kubelet.service"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("process:kubelet", ByProcess("kubelet")),
        ("process:k3s-server:10250", ByProcess("k3s-server", 10250)),
        ("cgroup:/system.slice//kubelet.service/", ByCgroup(UNIT)),
        ("unit:kubelet.service", ByCgroup(UNIT)),
    ],
)
def test_settings_are_read(text: str, setting: KubeletSetting) -> None:
    assert parse_kubelet(text) == setting


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kubelet",
        "process:",
        "process:kubelet:0",
        "process:kubelet:65536",
        "process:kubelet:http",
        "cgroup:system.slice",
        "cgroup:/",
        "cgroup:/a/../b",
        "unit:",
        "unit:a/b",
    ],
)
def test_invalid_kubelet_setting_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="does not name a kubelet; write"):
        parse_kubelet(text)


@pytest.mark.parametrize(
    "text", ["198.18.0.0/22", "198.18.0.1/18", "0.0.0.0/0", "fd00::/64", "224.0.0.0/8", "x"]
)
def test_unusable_ipv4_range_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="use an IPv4 network of /8 to /21, such as 169"):
        parse_range4(text)


@pytest.mark.parametrize("text", ["fd00::/65", "198.18.0.0/18", "ff00::/16", "fd00::1/64"])
def test_unusable_ipv6_range_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="use an IPv6 network of /16 to /64, such as fd70:"):
        parse_range6(text)


def test_default_ranges_leave_out_what_rfc_3927_reserves() -> None:
    assert not DEFAULT_RELAY_RANGES.ipv4.overlaps(ipaddress.ip_network("169.254.0.0/24"))
    assert not DEFAULT_RELAY_RANGES.ipv4.overlaps(ipaddress.ip_network("169.254.255.0/24"))
    assert (
        ipaddress.ip_address("169.254.169.254") not in DEFAULT_RELAY_RANGES.ipv4
    )  # clouds' metadata

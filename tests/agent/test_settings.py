"""Parsing of the kubelet setting, of the relay's ranges and of feature gates."""

import ipaddress
import pathlib
import re
from collections.abc import Callable

import pytest

from agent.settings import (
    DEFAULT_RELAY_RANGES,
    ByCgroup,
    ByProcess,
    FeatureGates,
    KubeletSetting,
    Settings,
    admin_socket,
    localnet_socket,
    parse_feature_gates,
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
        ("process:kubelet:", ByProcess("kubelet")),
        ("process:kubelet:1", ByProcess("kubelet", 1)),
        ("process:kubelet:65535", ByProcess("kubelet", 65535)),
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
        "cgroup:/a/./b",
        "unit:",
        "unit:a/b",
    ],
)
def test_invalid_kubelet_setting_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="does not name a kubelet; write"):
        parse_kubelet(text)


@pytest.mark.parametrize(
    "text",
    [
        *("198.18.0.0/22", "198.18.0.1/18", "198.0.0.0/7", "0.0.0.0/0"),
        *("fd00::/64", "224.0.0.0/8", "127.0.0.0/8", "x"),
    ],
)
def test_unusable_ipv4_range_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="use an IPv4 network of /8 to /21, such as 169"):
        parse_range4(text)


@pytest.mark.parametrize("text", ["fd00::/65", "198.18.0.0/18", "ff00::/16", "fd00::1/64"])
def test_unusable_ipv6_range_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="use an IPv6 network of /16 to /64, such as fd70:"):
        parse_range6(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_range4, text) for text in ("10.0.0.0/8", "198.18.0.0/21")),
        *((parse_range6, text) for text in ("fd00::/16", "fd00::/64")),
    ],
)
def test_range_of_a_usable_length_is_read(parse: Callable[[str], object], text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "gates"),
    [
        ("", FeatureGates()),
        ("PodInfoAPI=false", FeatureGates(pod_info_api=False)),
        (" PodInfoAPI = FALSE , ", FeatureGates(pod_info_api=False)),
        ("PodInfoAPI=false,PodInfoAPI=true", FeatureGates()),
        (
            "PodInfoAPI=true,PodLifecycleHTTPS=false",
            FeatureGates(pod_info_api=True, pod_lifecycle_https=False),
        ),
    ],
)
def test_feature_gates_are_those_that_are_named(text: str, gates: FeatureGates) -> None:
    assert parse_feature_gates(text) == gates


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PodInfoAPI", "'PodInfoAPI' is not NAME=true or NAME=false"),
        ("PodInfoAPI=no", "'PodInfoAPI=no' is not NAME=true or NAME=false"),
        ("PodInfo=true", "unknown feature gate 'PodInfo'; known: PodInfoAPI, "),
        ("=true", "unknown feature gate ''"),
        # Part of the list of names.
        ("PodInfoAPI, PodLifecycleHTTPS=true", "'PodInfoAPI' is not"),
    ],
)
def test_feature_gate_that_is_none_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_feature_gates(text)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (ByProcess("kubelet"), "process named kubelet"),
        (ByProcess("k3s-server", 10250), "process named k3s-server that listens on port 10250"),
        (ByCgroup(UNIT), f"cgroup {UNIT}"),
    ],
)
def test_kubelet_is_shown_as_it_is_found(setting: KubeletSetting, text: str) -> None:
    assert str(setting) == text


def test_sockets_are_in_directories_of_their_own() -> None:
    directory = pathlib.Path("/run/podgate")
    settings = Settings(run_directory=directory)
    assert settings.admin_socket == admin_socket(directory) == directory / "admin/admin.sock"
    assert localnet_socket(directory) == directory / "localnet/localnet.sock"


def test_default_ranges_leave_out_what_rfc_3927_reserves() -> None:
    assert not DEFAULT_RELAY_RANGES.ipv4.overlaps(ipaddress.ip_network("169.254.0.0/24"))
    assert not DEFAULT_RELAY_RANGES.ipv4.overlaps(ipaddress.ip_network("169.254.255.0/24"))
    assert (
        ipaddress.ip_address("169.254.169.254") not in DEFAULT_RELAY_RANGES.ipv4
    )  # clouds' metadata

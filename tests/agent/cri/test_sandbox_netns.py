"""Network namespaces as runtimes report them."""

import asyncio
import ipaddress
import json
from collections.abc import Iterable
from typing import Any

import pytest

from agent.cri import sandbox_netns
from agent.cri.models import SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns, netns_paths

_PATH = "/var/run/netns/cni-0a"
_SPEC = {"linux": {"namespaces": [{"type": "pid"}, {"type": "network", "path": _PATH}]}}


def _details(info: dict[str, str], ips: Iterable[str] = ("198.18.1.1",)) -> SandboxDetails:
    return SandboxDetails(
        host_network=False, ips=tuple(ipaddress.ip_address(ip) for ip in ips), info=info
    )


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        pytest.param(
            {"pid": 42, "processStatus": "running", "runtimeSpec": _SPEC},
            ["/run/netns/cni-0a", "/proc/42/ns/net"],
            id="containerd 1.6",
        ),
        pytest.param(
            {
                "pid": 42,
                "runtimeSpec": _SPEC,
                "sandboxMetadata": {"ID": "s", "NetNSPath": _PATH, "IP": "198.18.1.1"},
            },
            ["/run/netns/cni-0a", "/proc/42/ns/net"],
            id="containerd 1.7",
        ),
        pytest.param(
            {"pid": 0, "runtimeSpec": None, "sandboxMetadata": {"NetNSPath": "/run/netns/other"}},
            ["/run/netns/other"],
            id="without a first process",
        ),
        pytest.param(
            {"image": "pause", "pid": 42, "runtimeSpec": _SPEC},
            ["/run/netns/cni-0a", "/proc/42/ns/net"],
            id="CRI-O",
        ),
        pytest.param({"runtimeSpec": {"linux": {"namespaces": None}}}, [], id="none"),
        pytest.param({"runtimeSpec": {"linux": "strange"}}, [], id="of another shape"),
        pytest.param(
            {"runtimeSpec": {"linux": {"namespaces": [{"type": "network", "path": "x/y"}]}}},
            [],
            id="not absolute",
        ),
    ],
)
def test_paths_are_read_from_the_runtimes_json(info: dict[str, Any], expected: list[str]) -> None:
    assert list(netns_paths(_details({"info": json.dumps(info)}))) == expected


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "null", '{"pid": "x"}', "{" * 5000])
def test_invalid_json_of_a_runtime_has_no_paths(text: str) -> None:
    assert list(netns_paths(_details({"info": text}))) == []


def test_process_is_used_only_with_addresses_to_verify() -> None:
    info = {"info": json.dumps({"pid": 42})}
    assert list(netns_paths(_details(info, ips=()))) == []


def test_runtime_without_a_namespace_is_one_sentence() -> None:
    located = asyncio.run(sandbox_netns.locate(_details({})))
    assert located == SandboxNetns(
        None, "The container runtime reports no network namespace.", is_unknown=False
    )

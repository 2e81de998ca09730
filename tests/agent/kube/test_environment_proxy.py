"""The environment's proxies by Go's rules, which recorded/proxies.go records."""

import json
import pathlib
from typing import Any

import pytest

from agent.kube import environment_proxy

_RECORDED = json.loads((pathlib.Path(__file__).parent / "recorded/proxies.json").read_bytes())
_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_proxies_are_those_of_go(monkeypatch: pytest.MonkeyPatch) -> None:
    differences: list[Any] = []
    addresses = [address for address in _RECORDED["addresses"] if "LOCALHOST" not in address]
    for record in _RECORDED["records"]:
        monkeypatch.setenv("HTTPS_PROXY", record["https_proxy"])
        monkeypatch.setenv("NO_PROXY", record["no_proxy"])
        for address in addresses:
            wanted = record["proxy"] if address in record["proxied"] else ""
            found = environment_proxy.find(address)
            if found != wanted:
                differences.append((record["no_proxy"], record["https_proxy"], address, found))
    assert differences == []


def test_localhost_is_reached_directly_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert environment_proxy.find("https://LOCALHOST:6443") == ""


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({"https_proxy": "http://lower:1"}, "http://lower:1"),
        ({"https_proxy": "http://lower:1", "HTTPS_PROXY": "http://upper:1"}, "http://upper:1"),
        ({"http_proxy": "http://other:1"}, ""),
        ({"https_proxy": "http://lower:1", "no_proxy": "10.0.0.0/8"}, ""),
        (
            {"https_proxy": "http://a:1", "no_proxy": "10.0.0.0/8", "NO_PROXY": "b"},
            "http://a:1",
        ),
    ],
)
def test_names_in_upper_case_come_first(
    variables: dict[str, str], proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment_proxy.find("https://10.96.0.1:443") == proxy


@pytest.mark.parametrize(
    ("network", "is_exempt"),
    [
        ("::ffff:0.0.0.0/96", True),
        ("::ffff:10.0.0.0/104", True),
        ("::ffff:11.0.0.0/104", False),
        ("::ffff:0.0.0.0/95", False),
        ("::/0", False),
    ],
)
def test_network_of_ipv4_may_be_written_as_one_of_ipv6(
    network: str, monkeypatch: pytest.MonkeyPatch, *, is_exempt: bool
) -> None:
    """net.IPNet.Contains of Go takes them for the same."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", network)
    assert environment_proxy.find("https://10.96.0.1:443") == (
        "" if is_exempt else "http://proxy:3128"
    )

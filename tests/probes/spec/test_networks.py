"""Interfaces of further networks are those that the multi-network plugin reports."""

import json

import pytest

from probes.spec import networks, specs

STATUS = [
    {"name": "cbr0", "interface": "eth0", "ips": ["198.18.0.1"], "default": True, "dns": {}},
    {"name": "shop/storage", "interface": "net1", "ips": ["198.18.9.1"], "mac": "02:00:00:00:0:1"},
    {"name": "shop/pending"},
]


def test_interfaces_are_found_by_network() -> None:
    assert networks.read(json.dumps(STATUS)) == {"cbr0": "eth0", "shop/storage": "net1"}


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "{}",
        "[",
        '[{"interface": "net1"}]',
        "[" * 10_000,
        json.dumps(STATUS) + " " * 70_000,
    ],
)
def test_what_is_not_valid_names_no_network(text: object) -> None:
    assert networks.read(text) == {}


def test_networks_are_part_of_the_pod() -> None:
    metadata = {"annotations": {networks.STATUS_ANNOTATION: json.dumps(STATUS)}}
    pod = specs.parse_pod({"metadata": metadata, "spec": {"containers": [{"name": "app"}]}})
    assert pod.networks["shop/storage"] == "net1"

"""Addresses and times in the kubelet's words, which are Go's."""

import pytest

from probes.protocols import exchanges


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.000001, "1µs"),
        (0.000999, "999µs"),
        (0.001, "1ms"),
        (0.0015, "1.5ms"),
        (0.001005, "1.005ms"),
        (0.05, "50ms"),
        (0.999999, "999.999ms"),
        (1, "1s"),
        (1.05, "1.05s"),
        (1.000001, "1.000001s"),
        (59.5, "59.5s"),
        (60, "1m0s"),
        (90.25, "1m30.25s"),
        (3599, "59m59s"),
        (3600, "1h0m0s"),
        (7325.5, "2h2m5.5s"),
    ],
)
def test_duration_is_printed_as_by_go(seconds: float, text: str) -> None:
    assert exchanges.go_duration(seconds) == text


@pytest.mark.parametrize(
    ("host", "text"),
    [("198.18.0.1", "198.18.0.1:80"), ("fd00:18::1", "[fd00:18::1]:80"), ("web", "web:80")],
)
def test_address_and_port_are_joined_as_by_go(host: str, text: str) -> None:
    assert exchanges.join_host_port(host, 80) == text

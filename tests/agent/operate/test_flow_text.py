"""Sources and targets of flows in words."""

from typing import Any

import pytest

from agent.operate import flow_text


@pytest.mark.parametrize(
    ("cgroup", "source_pod", "text"),
    [
        ("/system.slice/a.service", "", "unit a.service"),
        ("/system.slice/a.service/child.scope", "", "unit a.service"),
        ("/kubepods/pod1", "edge/ingress", "pod edge/ingress"),
        ("/", "", "root cgroup (/)"),
        ("/opt/stranger", "", "/opt/stranger"),
        ("(gone)", "", "(gone)"),
        ("", "", "unknown"),
    ],
)
def test_source_is_a_pod_a_unit_or_a_cgroup(cgroup: str, source_pod: str, text: str) -> None:
    assert flow_text.source_text(cgroup, source_pod) == text
    assert flow_text.in_text("curl", text) == f"curl in {text}"
    assert flow_text.in_text("", text) == text


@pytest.mark.parametrize(
    ("port", "scan", "text"),
    [
        (80, {}, "tcp 80"),
        (0, {}, "tcp"),
        (0, {"has_many_ports": True}, "tcp, many ports"),
        (0, {"has_many_ports": True, "port_count": 17}, "tcp, 17 ports"),
        (
            0,
            {"has_many_ports": True, "port_count": 17, "lowest_port": 1, "highest_port": 99},
            "tcp, 17 ports (1-99)",
        ),
    ],
)
def test_target_is_a_port_or_a_range_of_them(port: int, scan: dict[str, Any], text: str) -> None:
    assert flow_text.target_text("tcp", port, **scan) == text


def test_suppressed_events_are_counted() -> None:
    assert flow_text.suppressed_text(1).startswith("1 drop event was suppressed")
    assert flow_text.suppressed_text(2).startswith("2 drop events were suppressed")

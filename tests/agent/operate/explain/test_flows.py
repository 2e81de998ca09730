"""Questions about a flow, and those that have no answer as they are."""

from typing import Any

import pytest

from agent.operate.explain.flows import Question
from agent.operate.explain.sources import SourceName

KERNEL = SourceName("kernel", "")


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("tcp", {"port": 1}),
        ("udp", {"port": 53, "source_port": 7}),
        ("sctp", {"port": 65535}),
        ("icmp", {}),
        ("icmpv6", {}),
    ],
)
def test_protocol_with_what_it_has_is_a_question(protocol: str, fields: dict[str, Any]) -> None:
    made = Question(KERNEL, "shop/web", protocol, **fields)
    assert (made.protocol, made.port) == (protocol, fields.get("port", 0))


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_protocol_with_ports_needs_one(protocol: str) -> None:
    with pytest.raises(ValueError, match=f"^{protocol} has ports: name the pod's by --port$"):
        Question(KERNEL, "shop/web", protocol, source_port=7)


@pytest.mark.parametrize("protocol", ["icmp", "icmpv6"])
@pytest.mark.parametrize("fields", [{"port": 1}, {"source_port": 1}])
def test_protocol_without_ports_has_none(protocol: str, fields: dict[str, Any]) -> None:
    text = f"^{protocol} has no ports: leave out --port and --source-port$"
    with pytest.raises(ValueError, match=text):
        Question(KERNEL, "shop/web", protocol, **fields)

"""What the kubelet of Kubernetes 1.36.2 sends as probes, recorded by tests/cluster/recording.py."""

import json
import pathlib
from typing import Any

_FILE = pathlib.Path(__file__).parent / "recorded/probes-1.36.2.json"
_RECORDED: dict[str, Any] = json.loads(_FILE.read_text())

HOST = "198.18.0.1:37885"
HTTP: bytes = _RECORDED["http"][0].encode("latin-1")
"""httpGet of /a?b=c%20d, without httpHeaders."""
HTTP_HEADERS: bytes = _RECORDED["http"][1].encode("latin-1")
"""httpGet of /x, with httpHeaders; 5 KB."""
GRPC: dict[str, tuple[bytes, bytes]] = {
    each["service"]: (
        bytes.fromhex(each["before_settings"]),
        bytes.fromhex(each["after_settings"]),
    )
    for each in _RECORDED["grpc"]
}
"""By service: what is sent at once, and what is sent after the server's settings."""

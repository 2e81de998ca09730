"""Pods whose annotation requests answers, for tests of plans, verdicts and their sending."""

import json
from typing import Any

from probes.engine.checks import Check
from probes.engine.targets import ProbeKey
from probes.engine.workers import ProbeType
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import probespec
from probes.spec.specs import PodSpec, parse_pod

ADDRESS = "198.18.1.1"
LIVENESS, READINESS, STARTUP = ProbeType.LIVENESS, ProbeType.READINESS, ProbeType.STARTUP
HEALTHZ: dict[str, Any] = {"httpGet": {"port": 8080, "path": "/healthz"}}
OWN_CHECK: dict[str, Any] = {"tcp": {"port": 9000}, "answered": True}


def http(path: str, port: int = 8080, **fields: Any) -> dict[str, Any]:
    return {"httpGet": {"port": port, "path": path, **fields}}


def spec(
    container: dict[str, Any],
    checks: dict[str, Any],
    *,
    others: tuple[dict[str, Any], ...] = (),
    annotations: dict[str, str] | None = None,
) -> PodSpec:
    """container: of the pod's spec; checks: of the annotation, by type; others: more containers."""
    text = {"apiVersion": "podgate.io/v2", "containers": [{"name": "app", **checks}]}
    return parse_pod(
        {
            "metadata": {
                "annotations": {probespec.ANNOTATION: json.dumps(text), **(annotations or {})}
            },
            "spec": {
                "containers": [
                    {"name": "app", **container},
                    *({"name": f"app{n}", **one} for n, one in enumerate(others, 2)),
                ]
            },
        }
    )


def check(
    uid: str,
    *,
    type: ProbeType = LIVENESS,
    passes: bool = True,
    message: str = "",
    container_id: str = "c1",
    finished_ns: int = 0,
    valid_seconds: float = 11.0,
) -> Check:
    result = ProbeResult.SUCCESS if passes else ProbeResult.FAILURE
    outcome = ProbeOutcome(result, message)
    return Check(ProbeKey(uid, "app", type), container_id, outcome, finished_ns, valid_seconds)

"""Observed flows of a node, as tests make them."""

import datetime
from typing import Any

from agent.admin.observations import Observations, ObservedFlows, ObservedPod

SINCE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
WEB = ObservedPod(namespace="shop", name="web-1", labels={"app": "web", "pod-template-hash": "1"})
OTHER = ObservedPod(namespace="shop", name="other", labels={"app": "other"})
UID = "0123abcd-0123-4567-89ab-0123456789ab"
IN_POD = f"/kubepods/burstable/pod{UID}/{'ab' * 32}"


def flows(
    cgroup: str,
    protocol: int = 6,
    port: int = 80,
    *,
    pod: ObservedPod = WEB,
    first: float = 1,
    last: float = 20,
    **further: Any,
) -> ObservedFlows:
    """first, last: hours of the day."""
    return ObservedFlows(
        pod=pod,
        protocol=protocol,
        port=port,
        cgroup=cgroup,
        first=SINCE + datetime.timedelta(hours=first),
        last=SINCE + datetime.timedelta(hours=last),
        **{"packets": 2, **further},
    )


def node(*seen: ObservedFlows, name: str = "node-1", **further: Any) -> Observations:
    """One that observed a day."""
    return Observations(since=SINCE, until=SINCE + DAY, node=name, flows=list(seen), **further)

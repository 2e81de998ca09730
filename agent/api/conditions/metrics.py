"""Metrics of conditions that other owners report."""

from collections.abc import Iterator

from prometheus_client import core

from agent.api.conditions.owned_conditions import OwnedConditions
from agent.api.conditions.server import ConditionsServer
from agent.metrics import MetricFamily, labelled

PRESENT = MetricFamily(
    "podgate_condition_owner_present",
    "gauge",
    "1 while a stream of the owner of conditions is open, 0 while it is gone.",
    ("owner",),
)
CONDITIONS = MetricFamily(
    "podgate_condition_owner_conditions",
    "gauge",
    "Conditions of pods that an owner has reported, by whether it is gone for too long (stale).",
    ("owner", "state"),
)
CHANGES = MetricFamily(
    "podgate_condition_owner_changes_total",
    "counter",
    "Reports of an owner that changed a condition of a pod, removals included.",
    ("owner",),
)
REJECTED = MetricFamily(
    "podgate_condition_owner_rejected_total",
    "counter",
    "Reports of an owner that were rejected, by gRPC status.",
    ("owner", "status_code"),
)
STREAMS = MetricFamily(
    "podgate_conditions_streams_total",
    "counter",
    "Streams of the Conditions API that have ended, by gRPC status.",
    ("status_code",),
)


def collect(owned: OwnedConditions, server: ConditionsServer) -> Iterator[core.Metric]:
    """Series end with the registration."""
    domains = sorted(owned.owners or ())
    yield labelled(PRESENT, (((one,), int(owned.is_present(one))) for one in domains))
    numbers = {one: owned.numbers(one) for one in domains}
    by_state = [
        ((one, state), count)
        for one, (total, stale) in numbers.items()
        for state, count in (("current", total - stale), ("stale", stale))
    ]
    yield labelled(CONDITIONS, by_state)
    yield labelled(CHANGES, (((one,), owned.changes[one]) for one in domains))
    rejected = [one for one in sorted(server.rejected.items()) if one[0][0] in domains]
    yield labelled(REJECTED, rejected)
    yield labelled(STREAMS, (((status,), count) for status, count in sorted(server.ended.items())))

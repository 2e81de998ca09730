"""The goals of podgate's cost, which benches are compared with."""

import dataclasses

from tests.bench.figures import Figure


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """limit: of the ratio, if the figure has a baseline, else of its value; the most, or the least
    of figures of which more is better. text: what it means, in words."""

    bench: str
    figure: str
    limit: float
    text: str
    is_least: bool = False

    def is_met(self, found: Figure) -> bool:
        value = measured(found)
        return value >= self.limit if self.is_least else value <= self.limit


GOALS = (
    Goal("rest", "0_pods_enforce_no_probes_agent_wakeups_per_second", 5, "wake-ups without pods"),
    Goal(
        *("rest", "250_pods_enforce_no_probes_agent_wakeups_per_second", 5),
        "wake-ups with 250 pods in enforce",
    ),
    *(
        Goal(
            "rest", f"{mode}_no_probes_cpu_250_over_100_pods", 1.1, "CPU at rest, 250 pods over 100"
        )
        for mode in ("enforce", "strict")
    ),
    Goal(
        *("rest", "100_pods_strict_tcp_probes_agent_and_relay_pss_mb", 60),
        "memory of agent and relay with 100 pods",
    ),
    Goal("cluster", "agent_cpu_over_kubelet_at_rest", 0.25, "CPU at rest over the kubelet's"),
    Goal("cluster", "relay_cpu_over_kubelet_at_rest", 0.05, "CPU of the relay at rest, likewise"),
    Goal(
        "cluster", "burst_60_pods_seconds", 1.05, "60 pods at once over the same without an agent"
    ),
    Goal(
        "nri",
        "burst_60_pods_seconds",
        1.05,
        "60 pods at once over the same without NRI, containerd",
    ),
    Goal("burst", "burst_250_ready_ratio", 1.15, "250 pods at once, likewise"),
    Goal("burst", "burst_250_agent_cpu_ms_per_pod", 15, "CPU of the agent for a pod that starts"),
    Goal("burst", "burst_250_agent_unready_seconds", 0, "the agent is not ready meanwhile"),
    *(
        Goal(
            "probe", f"{kind}_cpu_over_kubelet_ratio_{in_flight}", limit, f"{kind} probes over Go's"
        )
        for kind, limit in (("http", 0.45), ("https", 0.6), ("grpc", 0.6))
        for in_flight in (1, 16, 50)
    ),
    *(
        goal
        for way, text in (("lookup", "by lookups alone"), ("default", "as the agent runs them"))
        for goal in (
            Goal(
                "probe", f"cpu_percent_1000_tcp_by_{way}", 0.5, f"1,000 tcp probes a second {text}"
            ),
            Goal("probe", f"tcp_by_{way}_over_kubelet_ratio", 0.05, f"the same over Go's, {text}"),
        )
    ),
    *(
        Goal("localapi", f"podinfo_{kind}_p99_ms", 5, f"PodInfo's {kind} by KEP-4188's objective")
        for kind in ("get", "list")
    ),
    *(
        Goal("back", f"{what}_ms", 100, f"a gate is back after its {what.replace('_', ' was ')}")
        for what in ("qdisc_deleted", "filter_deleted", "link_detached")
    ),
    Goal("back", "filter_preceded_ms", 100, "a filter is first again"),
)


def measured(found: Figure) -> float:
    """What a goal limits."""
    return found.value if found.ratio is None else found.ratio


def goal_of(found: Figure) -> Goal | None:
    for goal in GOALS:
        if (goal.bench, goal.figure) == (found.bench, found.figure):
            return goal
    return None

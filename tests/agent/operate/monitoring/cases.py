"""For each alert: series in which it fires, and series in which it does not.

Values are in Prometheus' notation for tests: `0x59` is 0 for an hour of samples a minute apart,
`1+2x10` eleven samples that grow by 2, `_` a sample that is missing. The last one counts.
"""

import dataclasses

HOUR = "x59"
AT = "59m"
_NODE = 'node="node1",instance="192.0.2.1:9652"'
_UP = f'up{{job="podgate/podgate",{_NODE}}}'
_CONTROLLER_UP = f'up{{job="podgate/podgate-controller",{_NODE}}}'


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """fires, quiet: values by series; labels: of the alert that fires; at: when it is evaluated;
    every: how often all rules are evaluated until then, which takes promtool's time."""

    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    at: str = AT
    every: str = "1m"


def one(series: str, fires: str, quiet: str, **labels: str) -> Case:
    """Of one series."""
    return Case({series: fires}, {series: quiet}, labels)


def _gauge(name: str, more: str = "") -> str:
    return f"{name}{{{_NODE}{',' if more else ''}{more}}}"


def _found(fires: str, quiet: str, severity: str = "degraded") -> Case:
    """Kinds of findings: one of the alert's, for an hour and for a minute, and another one."""
    series = {
        kind: _gauge("podgate_findings", f'severity="{severity}",kind="{kind}"')
        for kind in (fires, quiet)
    }
    return Case(
        {series[fires]: f"2{HOUR}"},
        {series[quiet]: f"2{HOUR}", series[fires]: "_x58 2"},
        {"kind": fires},
    )


def _gate(reason: str) -> str:
    more = f'namespace="shop",pod="web",interface="veth1",verdict="pass",reason="{reason}"'
    return _gauge("podgate_gate_packets_total", more)


def _late(name: str, slow: int) -> dict[str, str]:
    """100 observations a minute, of which `slow` take between 1 and 5 s and the others 5 ms."""
    fast = 100 - slow
    return {
        _gauge(f"{name}_bucket", 'le="0.005"'): f"0+{fast}x59",
        _gauge(f"{name}_bucket", 'le="1"'): f"0+{fast}x59",
        _gauge(f"{name}_bucket", 'le="5"'): "0+100x59",
        _gauge(f"{name}_bucket", 'le="+Inf"'): "0+100x59",
    }


def _pods(which: str, mode: str) -> str:
    return _gauge(f"podgate_pods_{which}", f'mode="{mode}"')


def _fill(entries: int, kind: str = "hash") -> dict[str, str]:
    return {
        _gauge("podgate_map_entries", 'map="gate_slots"'): f"{entries}{HOUR}",
        _gauge("podgate_map_max_entries", f'map="gate_slots",kind="{kind}"'): f"4096{HOUR}",
    }


def _verified(failed: int, succeeded: int) -> dict[str, str]:
    """Start times of the last Jobs that failed and that succeeded, and of one that runs."""
    starts = {"failed": failed, "succeeded": succeeded, "active": 900}
    series = {}
    for outcome, second in starts.items():
        job = f'{{namespace="podgate",job_name="podgate-verify-{outcome}"}}'
        series[f"kube_job_status_start_time{job}"] = f"{second}{HOUR}"
        series[f"kube_job_status_{outcome}{job}"] = f"1{HOUR}"
    return series


CASES = {
    "PodgateHoleOpen": Case(
        {_gate("stale"): "0x50 3x8"},
        {_gate("stale"): f"3{HOUR}", _gate("probe"): "0+5x59"},
        {"reason": "stale"},
    ),
    "PodgateGateBypassed": one(
        _gauge("podgate_path_test_addresses", 'namespace="shop",pod="web",result="bypassed"'),
        *(f"1{HOUR}", "0x54 1x4"),
        namespace="shop",
        pod="web",
    ),
    "PodgateCoverageLow": Case(
        {_pods("desired", "enforce"): f"3{HOUR}", _pods("in_force", "enforce"): "3x40 2x18"},
        {
            _pods("desired", "strict"): f"3{HOUR}",
            _pods("in_force", "strict"): f"1{HOUR}",
            _pods("in_force", "enforce"): f"2{HOUR}",
        },
    ),
    "PodgateStrictFallback": Case(
        {_pods("desired", "strict"): f"3{HOUR}", _pods("in_force", "strict"): f"0{HOUR}"},
        {_pods("desired", "strict"): f"3{HOUR}", _pods("in_force", "strict"): "3x52 0x6"},
        {"mode": "strict"},
    ),
    "PodgateGateLost": Case(
        {
            _gauge("podgate_gates_lost_total"): "0x50 1x8",
            _gauge("podgate_gate_updates_failed_total"): f"0{HOUR}",
        },
        {
            _gauge("podgate_gates_lost_total"): f"1{HOUR}",
            _gauge("podgate_gate_updates_failed_total"): "0x50 1x8",
        },
    ),
    "PodgateKubeletUnknown": _found("declared-ports-open", "kubelet-unknown"),
    "PodgateAgentStale": Case(
        {_UP: "1x50 0x8"},
        {_UP: f"1{HOUR}", _gauge("podgate_heartbeat_age_seconds"): f"1{HOUR}"},
        {"job": "podgate/podgate"},
    ),
    "PodgateAgentsAbsent": Case(
        {_CONTROLLER_UP: f"1{HOUR}"}, {_UP: f"0{HOUR}"}, {"node": "", "instance": ""}
    ),
    "PodgateDeadManNear": Case(
        {_UP: "0x1200"},
        {_UP: "1x600 0x600", _gauge("podgate_dead_man_remaining_seconds"): "86400x1200"},
        {"job": "podgate/podgate"},
        at="1199m",
        every="10m",
    ),
    "PodgateHookGone": one(
        _gauge("podgate_hook_attached", 'hook="hook_connect4"'),
        *(f"0{HOUR}", f"1{HOUR}"),
        hook="hook_connect4",
    ),
    "PodgateDefaultDenyGone": _found("default-deny-missing", "hook-missing"),
    "PodgateComponentDown": _found("relay-missing", "kubelet-api-missing"),
    "PodgateOpen": _found("label-ignored", "gate-bypassed", severity="open"),
    "PodgateNotReady": one(_gauge("podgate_ready"), f"0{HOUR}", "1x50 0x8"),
    "PodgateProbesLate": Case(
        _late("podgate_probe_start_delay_seconds", 5), _late("podgate_probe_start_delay_seconds", 0)
    ),
    "PodgateEventLoopSlow": Case(
        _late("podgate_event_loop_lag_seconds", 5), _late("podgate_event_loop_lag_seconds", 0)
    ),
    "PodgateEventsLost": Case(
        {
            _gauge("podgate_drop_events_suppressed_total"): "0+10x59",
            _gauge("podgate_listener_events_lost_total"): f"0{HOUR}",
        },
        {
            _gauge("podgate_drop_events_suppressed_total"): f"500{HOUR}",
            _gauge("podgate_listener_events_lost_total"): f"0{HOUR}",
        },
    ),
    "PodgateMapNearlyFull": Case(_fill(3900), _fill(2000), {"map": "gate_slots"}),
    "PodgateRuleLeftOut": one(
        _gauge("podgate_rules_skipped", 'policy="many"'),
        *(f"2{HOUR}", f"0{HOUR}"),
        policy="many",
    ),
    "PodgatePolicyNotApplied": _found("policy-without-effect", "policy-not-appliable"),
    "PodgateApiWritesStuck": one(
        _gauge("podgate_api_pending_seconds"), "0+60x59", "0x50 0+60x3 0x4"
    ),
    "PodgateTokenCannotWrite": Case(
        {_gauge("podgate_api_patches_total", 'code="403"'): "0x50 4x8"},
        {
            _gauge("podgate_api_patches_total", 'code="403"'): f"0{HOUR}",
            _gauge("podgate_api_patches_total", 'code="200"'): "0+3x59",
        },
        {"code": "403"},
    ),
    "PodgateWatchSilent": one(
        _gauge("podgate_watch_age_seconds", 'resource="pods"'),
        *("0+60x59", f"70{HOUR}"),
        resource="pods",
    ),
    "PodgateProbesNotAnswered": one(
        _gauge("podgate_probes_not_answered", 'reason="tls"'),
        *(f"1{HOUR}", "0x45 1x9 0x4"),
        reason="tls",
    ),
    "PodgateServicesOld": one(_gauge("podgate_services_source_up"), "1x40 0x18", "1x40 0x5 1x12"),
    "PodgateProxyNotInStep": one(
        _gauge("podgate_proxy_sync_failures_total"), "0x20 0+2x38", "0x50 2x8"
    ),
    "PodgateControllerDown": Case(
        {_CONTROLLER_UP: "1x40 0x18"},
        {_CONTROLLER_UP: f"1{HOUR}", _UP: f"0{HOUR}"},
        {"job": "podgate/podgate-controller"},
    ),
    "PodgateVerifyFailed": Case(
        _verified(failed=200, succeeded=100),
        _verified(failed=100, succeeded=200),
        {"namespace": "podgate", "node": "", "instance": ""},
    ),
    "PodgateWebhookCertificate": one(
        _gauge("podgate_controller_webhook_certificate_valid"), "1x40 0x18", "0x5 1x53"
    ),
}

# A full map that replaces old entries is as it should be.
LRU = _fill(4096, "lru")

"""The dashboard for rolling out: how far modes have come, and what enforce would drop.

Its sums are the recording rules'; panels of namespaces need `--metrics=namespace` or `pod`.
"""

from agent.labels import ISOLATION_READY
from agent.operate.monitoring.panels import OF_CLUSTER, Dashboard, Panel, Query, Stat, most
from agent.operate.monitoring.recordings import AGENTS

_AGENT = f"{OF_CLUSTER},{AGENTS}"
_ENFORCED = 'mode=~"enforce|strict"'
_WOULD_DROP = 'verdict="would-drop"'
_AGENTS_WOULD_DROP = f"{AGENTS},{_WOULD_DROP}"
_DROP = 'verdict="drop"'
_ISOLATION = f'condition="{ISOLATION_READY}"'
_NOT_TRUE = 'status!="True"'
_DESIRED = "cluster_mode:podgate_pods_desired:sum"
_IN_FORCE = "cluster_mode:podgate_pods_in_force:sum"
_NOT_IN_FORCE = "node:podgate_pods_not_in_force:sum"
_OF_NAMESPACES = "namespace_condition_status_reason:podgate_pod_condition:sum"
_CONDITIONS = "cluster_condition_status_reason:podgate_pod_condition:sum"
_NAMESPACE_PACKETS = "namespace_verdict:podgate_gate_packets:rate5m"
_NODE_PACKETS = "node_verdict_reason:podgate_gate_packets:rate5m"
_PACKETS = "cluster_verdict_reason:podgate_gate_packets:rate5m"


def _of(series: str, where: str = "") -> str:
    return f"{series}{{{OF_CLUSTER}{',' if where else ''}{where}}}"


ROLLING_OUT = Dashboard(
    "podgate-rolling-out",
    "podgate: rolling out",
    (
        Stat(
            "Nodes",
            "Nodes with an agent that Prometheus scrapes.",
            "short",
            f"count({_of('podgate_build_info', AGENTS)})",
        ),
        Stat(
            "Agents ready",
            "Share of agents that are ready.",
            "percentunit",
            f"avg({_of('podgate_ready', AGENTS)})",
            red_below=1,
        ),
        Stat(
            "Versions",
            "Versions of agents; 1 at the end of an upgrade.",
            "short",
            f"count(count by (version) ({_of('podgate_build_info', AGENTS)}))",
        ),
        Stat(
            "Enforced",
            "Share of pods whose mode in force is enforce or strict.",
            "percentunit",
            f"sum({_of(_IN_FORCE, _ENFORCED)}) / sum({_of(_IN_FORCE)})",
        ),
        Stat(
            "Not as desired",
            "Pods whose mode is not in force; 0, but for seconds after a pod starts.",
            "short",
            f"sum({_of(_NOT_IN_FORCE)})",
            red_above=0,
        ),
        Stat(
            "Would drop",
            "Packets per second to pods in audit that enforce would drop.",
            "pps",
            f"sum({_of(_PACKETS, _WOULD_DROP)})",
        ),
    ),
    (
        Panel(
            "Pods by mode",
            "Desired and in force are equal, but for seconds after a pod starts.",
            "short",
            (
                Query(f"sum by (mode) ({_of(_DESIRED)})", "desired {{mode}}"),
                Query(f"sum by (mode) ({_of(_IN_FORCE)})", "in force {{mode}}"),
            ),
        ),
        Panel(
            "Agents by version",
            "One version, but during an upgrade.",
            "short",
            (
                Query(
                    f"count by (version) ({_of('podgate_build_info', AGENTS)})",
                    "{{version}}",
                ),
            ),
        ),
        Panel(
            "Namespaces by mode",
            "Pods of the namespaces with the most, by the reason of isolation-ready, which is the "
            "mode in force or why there is none. Needs --metrics=namespace or pod.",
            "short",
            (
                Query(
                    most(f"sum by (namespace, reason) ({_of(_OF_NAMESPACES, _ISOLATION)})"),
                    "{{namespace}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Nodes by mode",
            "Pods in enforce and strict, of the nodes with the most.",
            "short",
            (
                Query(
                    most(f"sum by (node, mode) (podgate_pods_in_force{{{_AGENT},{_ENFORCED}}})"),
                    "{{node}} {{mode}}",
                ),
            ),
        ),
        Panel(
            "Would drop, by namespace",
            "Packets per second to pods in audit that enforce would drop. Write policies until it "
            "is 0; `kubectl podgate suggest` drafts them. Needs --metrics=namespace or pod.",
            "pps",
            (
                Query(
                    most(f"sum by (namespace) ({_of(_NAMESPACE_PACKETS, _WOULD_DROP)}) > 0"),
                    "{{namespace}}",
                ),
            ),
        ),
        Panel(
            "Would drop, by node",
            "The same packets. One node alone has a process that others lack.",
            "pps",
            (
                Query(
                    most(f"sum by (node) ({_of(_NODE_PACKETS, _AGENTS_WOULD_DROP)}) > 0"),
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            "Dropped, by namespace",
            "Packets per second to pods in enforce and strict. Needs --metrics=namespace or pod.",
            "pps",
            (
                Query(
                    most(f"sum by (namespace) ({_of(_NAMESPACE_PACKETS, _DROP)}) > 0"),
                    "{{namespace}}",
                ),
            ),
        ),
        Panel(
            "Policies: new flows that they admit",
            "Per second. A policy without any has no effect, or nothing uses it now.",
            "short",
            (
                Query(
                    most(f"sum by (policy) ({_of('cluster_policy:podgate_rule_hits:rate5m')})"),
                    "{{policy}}",
                ),
            ),
        ),
        Panel(
            "Policies that are not in force as written",
            "0. `podgate rules` lists problems; a gate without room skips rules.",
            "short",
            (
                Query(
                    f"sum by (node) (podgate_policy_problems{{{_AGENT}}}) > 0",
                    "problems {{node}}",
                ),
                Query(
                    f"sum by (policy) (podgate_rules_skipped{{{_AGENT}}}) > 0",
                    "skipped {{policy}}",
                ),
            ),
        ),
        Panel(
            "Policies that expire",
            "Time until spec.expires.",
            "s",
            (
                Query(
                    "min by (policy) "
                    f"(podgate_policy_expires_timestamp_seconds{{{_AGENT}}}) - time()",
                    "{{policy}}",
                ),
            ),
        ),
        Panel(
            "Readiness gates",
            "Pods by status of each condition.",
            "short",
            (
                Query(
                    f"sum by (condition, status) ({_of(_CONDITIONS)})",
                    "{{condition}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Readiness gates that are not True",
            "Pods by reason; `kubectl podgate why-not-ready` explains those of a pod.",
            "short",
            (
                Query(
                    most(f"sum by (condition, reason) ({_of(_CONDITIONS, _NOT_TRUE)}) > 0"),
                    "{{condition}} {{reason}}",
                ),
            ),
        ),
    ),
    is_by_node=False,
)

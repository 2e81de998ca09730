"""Check of pods whose processes may change the node's interfaces."""

from collections.abc import Iterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.admin.report import AgentReport
from agent.linux.procfs import Procfs
from agent.listing import listed
from agent.operate.doctor.results import Passed, Result
from probes.netns import Netns, NetnsError

_CAP_NET_ADMIN = 12  # linux/capability.h


def check(report: AgentReport, procfs: Procfs | None = None) -> list[Result]:
    """Pods with a network namespace of their own, and processes in it that have CAP_NET_ADMIN in
    the host's user namespace: IFLA_TARGET_NETNSID of rtnetlink takes it for the right to change
    interfaces of any network namespace (rtnl_get_net_ns_capable of net/core/rtnetlink.c).

    Processes of the agent's own cgroup, such as probes, do not count. Blocks for each process."""
    if found_pods := sorted(_pods_with_right(report, procfs or Procfs())):
        return [
            found(
                kinds.NET_ADMIN_PODS,
                "Pods with CAP_NET_ADMIN and without a user namespace may remove or change "
                f"interfaces of the node and of other pods: {listed(found_pods)}",
            )
        ]
    if not report.pods:
        return []
    text = "No pod has CAP_NET_ADMIN without a user namespace of its own."
    return [Passed("net-admin", text)]


def _pods_with_right(report: AgentReport, procfs: Procfs) -> set[str]:
    pods = {f"net:[{inode}]": name for name, inode in _namespaces(report)}
    own_cgroup = procfs.cgroup(report.pid)
    return {
        pods[namespace]
        for pid in (procfs.pids() if pods else ())
        if (namespace := procfs.namespace(pid, "net")) in pods
        and procfs.has_capability(pid, _CAP_NET_ADMIN)
        and procfs.cgroup(pid) != own_cgroup
    }


def _namespaces(report: AgentReport) -> Iterator[tuple[str, int]]:
    """Names of pods and inodes of their network namespaces."""
    for pod in report.pods:
        if pod.netns is not None:
            try:
                yield pod.full_name, Netns.open(pod.netns).inode
            except (NetnsError, OSError):
                continue

"""Names of source processes, as `podgate drops` shows them."""

from agent.admin.report import SourceProcessStatus
from agent.drops.merging import pod_uid
from agent.operate import flow_text


def source_text(cgroup: str, source_pod: str = "") -> str:
    """As `flow_text.source_text`, also of a pod that is known by its cgroup alone."""
    uid = "" if source_pod else pod_uid(cgroup)
    return f"pod with uid {uid}" if uid else flow_text.source_text(cgroup, source_pod)


def target_text(source: SourceProcessStatus) -> str:
    """The protocol and the port, or the ports of a scan."""
    return flow_text.target_text(
        source.protocol,
        source.port,
        has_many_ports=source.has_many_ports,
        port_count=source.port_count,
        lowest_port=source.lowest_port,
        highest_port=source.highest_port,
    )

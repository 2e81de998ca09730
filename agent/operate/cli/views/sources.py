"""Names of source processes, as `podgate drops` shows them."""

from agent.drops.merging import pod_uid

_UNITS = (".service", ".scope", ".socket", ".mount")


def source_text(cgroup: str, source_pod: str = "") -> str:
    """Where a process runs: its pod, its systemd unit, or its cgroup.

    cgroup: its path, or a text in parentheses without one.
    """
    if source_pod:
        return f"pod {source_pod}"
    if uid := pod_uid(cgroup):
        return f"pod with uid {uid}"
    if cgroup == "/":
        return "root cgroup (/)"
    unit = next((part for part in cgroup.split("/") if part.endswith(_UNITS)), "")
    return f"unit {unit}" if unit else cgroup or "unknown"


def in_text(process: str, source: str) -> str:
    """As "curl in unit curl.service"; without the name of a process only the latter."""
    return f"{process} in {source}" if process else source


def target_text(protocol: str, port: int, *, has_many_ports: bool = False) -> str:
    """As "tcp 80", "icmp" or "tcp, many ports"."""
    if has_many_ports:
        return f"{protocol}, many ports"
    return f"{protocol} {port}" if port else protocol

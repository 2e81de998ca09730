"""Names of source processes, as `podgate drops` shows them."""

_UNITS = (".service", ".scope", ".socket", ".mount")
_PODS = "kubepods"


def source_text(cgroup: str, source_pod: str = "") -> str:
    """Where a process runs: its pod, its systemd unit, or its cgroup.

    cgroup: its path, or a text in parentheses without one.
    """
    if source_pod:
        return f"pod {source_pod}"
    if cgroup == "/":
        return "root cgroup (/)"
    parts = cgroup.split("/")
    if not any(_PODS in part for part in parts):
        for part in parts:
            if part.endswith(_UNITS):
                return f"unit {part}"
    return cgroup or "unknown"


def target_text(protocol: str, port: int, *, has_many_ports: bool = False) -> str:
    """As "tcp 80", "icmp" or "tcp, many ports"."""
    if has_many_ports:
        return f"{protocol}, many ports"
    return f"{protocol} {port}" if port else protocol

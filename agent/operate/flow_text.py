"""Sources and targets of flows in words, for every view. The kubectl plugin packs it: standard
library only."""

_UNITS = (".service", ".scope", ".socket", ".mount")


def source_text(cgroup: str, source_pod: str = "") -> str:
    """Where a process runs: its pod, its systemd unit, or its cgroup.

    cgroup: its path, or a text in parentheses without one; source_pod: "namespace/name".
    """
    if source_pod:
        return f"pod {source_pod}"
    if cgroup == "/":
        return "root cgroup (/)"
    unit = next((part for part in cgroup.split("/") if part.endswith(_UNITS)), "")
    return f"unit {unit}" if unit else cgroup or "unknown"


def in_text(process: str, source: str) -> str:
    """As "curl in unit curl.service"; without the name of a process only the latter."""
    return f"{process} in {source}" if process else source


def target_text(
    protocol: str,
    port: int,
    *,
    has_many_ports: bool = False,
    port_count: int = 0,
    lowest_port: int = 0,
    highest_port: int = 0,
) -> str:
    """As "tcp 80", "icmp", or of a scan "tcp, 1024 ports (1-1024)".

    port_count: 0 if it is not known; highest_port: 0 if the range is not.
    """
    if has_many_ports:
        text = f"{protocol}, {port_count or 'many'} ports"
        return f"{text} ({lowest_port}-{highest_port})" if highest_port else text
    return f"{protocol} {port}" if port else protocol


def suppressed_text(events: int) -> str:
    """Of drop events that the kernel did not send."""
    what = "drop event was" if events == 1 else "drop events were"
    return f"{events} {what} suppressed by the kernel's limit; 'drops' without --follow counts all."

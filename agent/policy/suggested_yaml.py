"""Suggested policies as YAML that a person reviews: each with the flows that it would admit as
comments, and those with a doubt commented out."""

import datetime
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import yaml

from agent.admin.observations import Observations, ObservedFlows
from agent.listing import full_name
from agent.policy.suggestions import Suggestion

_PROTOCOLS = {1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 132: "SCTP"}
# One source that uses a thousand ports is understood after a few.
_MAX_LINES = 10
# A comment line that a terminal shows.
_MAX_TEXT = 200
_MAX_NODES = 3


def render(suggestions: Sequence[Suggestion]) -> str:
    """Documents for kubectl apply and --rules. Those with a doubt are commented out: removing the
    first two characters of each of their lines makes them valid."""
    return "".join(map(_document, suggestions))


def spans(nodes: Iterable[Observations]) -> Iterator[str]:
    """One sentence per node: the time that it observed, as lines of a comment."""
    for node in nodes:
        gap = ""
        if node.unobserved_seconds >= 60:
            gap = f", {duration(node.unobserved_seconds)} of it without an agent"
        span = (node.until - node.since).total_seconds()
        name = node.node or "this node"
        yield (
            f"{name}: {moment(node.since)} to {moment(node.until)} UTC, {duration(span)}{gap}"
            + (f"; {node.lost} packets not recorded, since tables were full" if node.lost else "")
        )


def source_text(flows: ObservedFlows) -> str:
    """The source in words."""
    process = f"{flows.process} in " if flows.process else ""
    pod = flows.source_pod
    if pod:
        kind = "hostNetwork pod" if pod.host_network else "pod"
        return safe(f"{process}{kind} {pod.namespace}/{pod.name}")
    return safe(f"{process}{flows.cgroup}")


def in_words(flows: ObservedFlows) -> str:
    """Source and target, as "curl in /user.slice to shop/web, TCP 8080"."""
    target = safe(f"{flows.pod.namespace}/{flows.pod.name}")
    return f"{source_text(flows)} to {target}, {port_text(flows)}"


def flows_text(flows: ObservedFlows) -> str:
    """Port, number and times."""
    packets = f"{flows.packets} packet{'s' if flows.packets != 1 else ''}"
    times = f"first {moment(flows.first)}, last {moment(flows.last)} UTC"
    if flows.first == flows.last:
        times = f"{moment(flows.first)} UTC"
    nodes = ", ".join(flows.nodes[:_MAX_NODES])
    if more := flows.nodes[_MAX_NODES:]:
        nodes += f" and {_more(len(more), 'node')}"
    return f"{port_text(flows)}: {packets}, {times}" + (f", on {safe(nodes)}" if nodes else "")


def _more(count: int, noun: str) -> str:
    return f"{count} more {noun}{'s' if count > 1 else ''}"


def port_text(flows: ObservedFlows) -> str:
    protocol = _PROTOCOLS.get(flows.protocol, f"protocol {flows.protocol}")
    if flows.has_many_ports:
        return f"{protocol} many ports"
    return f"{protocol} {flows.port}" if flows.port else protocol


def safe(text: str) -> str:
    """Names that processes choose, without line ends and control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)[:_MAX_TEXT]


def moment(at: datetime.datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"


def duration(seconds: float) -> str:
    """In the unit that makes it readable: "26 h", "40 min"."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


def _document(suggestion: Suggestion) -> str:
    first = suggestion.flows[0]
    pod = full_name(first.pod.namespace, first.pod.name)
    comments = [f"{source_text(first)} to {safe(pod)}"]
    comments += [f"  {flows_text(flows)}" for flows in suggestion.flows[:_MAX_LINES]]
    if more := suggestion.flows[_MAX_LINES:]:
        comments.append(f"  and {_more(len(more), 'port')}")
    if suggestion.doubt:
        comments.append(f"Not admitted: {suggestion.doubt}.")
    lines = [f"# {comment}" for comment in comments]
    if suggestion.policy:
        document = msgspec.to_builtins(suggestion.policy)
        lines += yaml.safe_dump(document, sort_keys=False, width=1000).splitlines()
    if suggestion.doubt:
        return "".join(f"# {line}\n" for line in ("---", *lines))
    return "".join(f"{line}\n" for line in ("---", *lines))

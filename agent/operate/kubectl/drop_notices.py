"""Drops of a namespace by the Events of its pods, for users that no agent answers."""

from agent.labels import TRAFFIC_DROPPED, TRAFFIC_WOULD_DROP
from agent.operate.kubectl import output, printing
from agent.operate.kubectl.cluster import Cluster, Object
from agent.operate.kubectl.exit_status import NO_AGENT
from agent.operate.kubectl.readiness import last_seen
from agent.operate.text import printable

_REASONS = (TRAFFIC_DROPPED, TRAFFIC_WOULD_DROP)


def run(cluster: Cluster, namespace: str, why: str, *, form: str) -> int:
    """Print those of the last hour. why: no agent answers. Raises `KubectlError`."""
    events = [
        one
        for one in cluster.items("events", f"--namespace={namespace}")
        if one.get("reason") in _REASONS
    ]
    events.sort(key=last_seen, reverse=True)
    missing = (
        f"The agents give you no answer: {why}. Events of namespace {namespace} have only some "
        "drops of the last hour; none of them does not mean that nothing was dropped."
    )
    printing.progress(missing)
    if form in (output.JSON, output.YAML):
        found = [
            {
                "pod": f"{namespace}/{_pod(one)}",
                "reason": one["reason"],
                "at": last_seen(one),
                "text": one.get("message", ""),
            }
            for one in events
        ]
        output.write({"events": found, "missing": missing}, form)
    for one in events if form in (output.TABLE, output.WIDE) else ():
        text = f"{last_seen(one)[:19]}Z  {namespace}/{_pod(one)}: {one.get('message', '')}"
        printing.line(printable(text))
    return NO_AGENT


def _pod(event: Object) -> str:
    return str((event.get("involvedObject") or {}).get("name") or "")

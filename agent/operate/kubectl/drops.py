"""`kubectl podgate drops`: host processes of all nodes whose traffic is dropped."""

import argparse
import datetime
import re
from collections.abc import Callable
from typing import Any

from agent.operate.kubectl import drop_stream, node_status, output, printing
from agent.operate.kubectl.cluster import Cluster, Object
from agent.operate.kubectl.exit_status import of_nodes
from agent.operate.kubectl.printing import Cell

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Of a pod's mode: in audit nothing is dropped.
_WOULD = "audit"

_KEYS: dict[str, Callable[[Object], Any]] = {
    "packets": lambda one: -one["packets"],
    "last": lambda one: -_time(one["last"]).timestamp(),
    "pod": lambda one: (one["namespace"], one["pod"]),
    "node": lambda one: one["node"],
    "source": lambda one: (one["cgroup"], one["process"]),
}


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "drops",
        help="List host processes of all nodes whose traffic is dropped.",
        description="List host processes of all nodes whose traffic to pods is dropped (in audit: "
        "would be dropped), the busiest first. With --follow print one line per drop event of "
        "all nodes until interrupted; the nodes' kernels limit events. Exit status 1 if a node "
        "does not answer, 3 if none does.",
    )
    output.add_option(parser)
    parser.add_argument("--node", action="append", metavar="NAME", help="This node only.")
    parser.add_argument(
        "--namespace", "-n", action="append", default=[], help="Pods of this namespace only."
    )
    parser.add_argument("--pod", metavar="NAME", help="This pod only, or namespace/name.")
    parser.add_argument(
        "--since", type=_age, metavar="TIME", help="Seen since: 90s, 15m, 24h or 7d ago."
    )
    parser.add_argument(
        "--sort", choices=tuple(_KEYS), default="packets", help="Order (default: packets)."
    )
    parser.add_argument("--follow", action="store_true", help="Stream drop events (sampled).")
    parser.set_defaults(run=run)


def run(
    arguments: argparse.Namespace,
    cluster: Cluster,
    *,
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
) -> int:
    """1 if a node's agent did not respond."""
    if arguments.follow:
        return drop_stream.run(
            cluster,
            arguments.node,
            lambda event: _is_selected(event, arguments),
            form=arguments.output,
        )
    answers = cluster.query_nodes("podgate", "drops", "--output=json", nodes=arguments.node)
    sources: list[Object] = []
    problems = {}
    lost = 0
    for answer in answers:
        report = None if answer.problem else node_status.decode(answer.output)
        problems[answer.node] = answer.problem or ("" if report else "its answer is not readable")
        if report:
            lost += int(report.get("lostPackets") or 0)
            sources += (_source(answer.node, one) for one in report.get("sources", ()))
    sources = [one for one in sources if _is_selected(one, arguments)]
    if arguments.since:
        oldest = now() - arguments.since
        sources = [one for one in sources if _time(one["last"]) >= oldest]
    sources.sort(key=_KEYS[arguments.sort])
    for node, problem in problems.items():
        if problem:
            printing.progress(f"{node}: {problem}")
    if arguments.output in (output.JSON, output.YAML):
        missing = {node: problem for node, problem in problems.items() if problem}
        document = {"sources": sources, "lostPackets": lost, "problems": missing}
        output.write(document, arguments.output)
    else:
        _show(sources, lost, now(), is_wide=arguments.output == output.WIDE)
    return of_nodes(list(problems.values()))


def _show(sources: list[Object], lost: int, now: datetime.datetime, *, is_wide: bool) -> None:
    if not sources:
        printing.line("No host process has opened a flow to these pods without a rule.")
    else:
        further = ("MODE", "FIRST (UTC)", "LAST (UTC)") if is_wide else ()
        head = ("NODE", "POD", "TO", "PACKETS", "LAST", *further, "SOURCE")
        printing.table([head, *(_row(one, now, is_wide=is_wide) for one in sources)])
    if lost:
        printing.line(f"{lost} packets of further sources are not listed: kernels had no memory.")


def _row(one: Object, now: datetime.datetime, *, is_wide: bool) -> tuple[str | Cell, ...]:
    first, last = _time(one["first"]), _time(one["last"])
    times = (one["mode"], f"{first:%Y-%m-%d %H:%M:%S}", f"{last:%Y-%m-%d %H:%M:%S}")
    verdict = "would drop" if one["mode"] == _WOULD else ""
    return (
        one["node"],
        f"{one['namespace']}/{one['pod']}",
        Cell(f"{_target(one)} {verdict}".strip(), printing.YELLOW if verdict else 0),
        str(one["packets"]),
        ago(now - last),
        *(times if is_wide else ()),
        f"{one['process']} in {one['cgroup']}" if one["process"] else one["cgroup"],
    )


def _target(one: Object) -> str:
    if one["hasManyPorts"]:
        return f"{one['protocol']} many ports"
    return f"{one['protocol']} {one['port']}" if one["port"] else str(one["protocol"])


def _source(node: str, found: Object) -> Object:
    """With each field that is read here: another version may lack some."""
    unknown = "1970-01-01T00:00:00Z"
    defaults = {
        **dict.fromkeys(("namespace", "pod", "mode", "protocol", "cgroup", "process"), ""),
        **{"port": 0, "packets": 0, "hasManyPorts": False, "first": unknown, "last": unknown},
    }
    return {"node": node, **defaults, **found}


def _is_selected(one: Object, arguments: argparse.Namespace) -> bool:
    namespace, pod = one.get("namespace"), one.get("pod")
    if arguments.namespace and namespace not in arguments.namespace:
        return False
    return not arguments.pod or arguments.pod in (pod, f"{namespace}/{pod}")


def ago(age: datetime.timedelta) -> str:
    """As "5m ago", in the largest unit of which there are two; a node's clock may be ahead."""
    seconds = max(0, int(age.total_seconds()))
    for unit in ("d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]}{unit} ago"
    return f"{seconds}s ago"


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _age(text: str) -> datetime.timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError("a time such as 90s, 15m, 24h or 7d")
    return datetime.timedelta(seconds=int(found[1]) * _SECONDS[found[2]])

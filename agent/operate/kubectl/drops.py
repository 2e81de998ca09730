"""`kubectl podgate drops`: host processes of all nodes whose traffic is dropped."""

import argparse
import datetime
from collections.abc import Callable
from typing import Any

from agent.operate import flow_text
from agent.operate.kubectl import drop_notices, drop_stream, node_status, output, printing
from agent.operate.kubectl.cluster import (
    Cluster,
    KubectlError,
    Object,
    ReadAnswer,
    is_forbidden,
)
from agent.operate.kubectl.exit_status import of_nodes
from agent.operate.kubectl.printing import Cell
from agent.operate.text import ago, read_duration

_WOULD = "would-drop"
_MARK = "mark"

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
        "would be dropped), the busiest first; VERDICT is that of the time. With --follow print "
        "one line per drop event of all nodes until interrupted; the nodes' kernels limit events, "
        "and a line shows how many they suppressed. Exit status 1 if a node does not answer, 3 if "
        "none does.",
    )
    output.add_option(parser)
    parser.add_argument("--node", action="append", metavar="NAME", help="This node only.")
    parser.add_argument(
        "--namespace", "-n", action="append", default=[], help="Pods of this namespace only."
    )
    parser.add_argument("--pod", metavar="NAME", help="This pod only, or namespace/name.")
    parser.add_argument(
        "--since",
        type=_age,
        metavar="TIME",
        help="Seen since: 90s, 15m, 24h or 7d ago; 'mark': what was counted since --mark.",
    )
    parser.add_argument(
        "--sort", choices=tuple(_KEYS), default="packets", help="Order (default: packets)."
    )
    parser.add_argument(
        "--top", type=_positive, metavar="N", help="Only the first N sources of all nodes."
    )
    parser.add_argument(
        "--mark",
        action="store_true",
        help="List nothing, and remember the counts on the nodes: '--since mark' shows only what "
        "follows.",
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
    if arguments.mark:
        return _mark(cluster, arguments.node)
    since = ("--since=mark",) if arguments.since == _MARK else ()
    command = ("podgate", "drops", "--output=json", *since)
    # The node has the marks.
    read = None if since else ReadAnswer("drops")
    try:
        answers = cluster.query_nodes(*command, nodes=arguments.node, read=read)
    except KubectlError as error:
        # Without the right to find the agents.
        if not is_forbidden(error) or len(arguments.namespace) != 1:
            raise
        (namespace,) = arguments.namespace
        return drop_notices.run(cluster, namespace, str(error), form=arguments.output)
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
    if arguments.since and arguments.since != _MARK:
        oldest = now() - arguments.since
        sources = [one for one in sources if _time(one["last"]) >= oldest]
    sources.sort(key=_KEYS[arguments.sort])
    omitted = len(sources[arguments.top :]) if arguments.top else 0
    sources = sources[: arguments.top]
    for node, problem in problems.items():
        if problem:
            printing.progress(f"{node}: {problem}")
    if arguments.output in (output.JSON, output.YAML):
        missing = {node: problem for node, problem in problems.items() if problem}
        document = {"sources": sources, "lostPackets": lost, "problems": missing}
        output.write(document, arguments.output)
    else:
        _show(sources, now(), is_wide=arguments.output == output.WIDE)
        if not sources and not all(problems.values()):
            of = " of the nodes that answered" if any(problems.values()) else ""
            printing.line(f"No host process{of} has opened a flow to these pods without a rule.")
        if omitted:
            printing.line(f"{omitted} further sources are left out (--top).")
        if lost:
            printing.line(
                f"{lost} packets of further sources are not listed: kernels had no memory."
            )
    return of_nodes(list(problems.values()))


def _mark(cluster: Cluster, nodes: list[str] | None) -> int:
    answers = cluster.query_nodes("podgate", "drops", "--mark", nodes=nodes)
    for answer in answers:
        if answer.problem:
            printing.progress(f"{answer.node}: {answer.problem}")
    marked = sum(not answer.problem for answer in answers)
    printing.line(
        f"Marked on {marked} of {len(answers)} nodes; 'kubectl podgate drops --since mark' shows "
        "what follows."
    )
    return of_nodes([answer.problem for answer in answers])


def _show(sources: list[Object], now: datetime.datetime, *, is_wide: bool) -> None:
    if not sources:
        return
    further = ("MODE", "FIRST (UTC)", "LAST (UTC)") if is_wide else ()
    admitted = ("NOW",) if any(one["isAdmitted"] for one in sources) else ()
    head = ("NODE", "POD", "TO", "VERDICT", "PACKETS", "LAST", *admitted, *further, "SOURCE")
    rows = (_row(one, now, has_now=bool(admitted), is_wide=is_wide) for one in sources)
    printing.table([head, *rows])


def _row(
    one: Object, now: datetime.datetime, *, has_now: bool, is_wide: bool
) -> tuple[str | Cell, ...]:
    first, last = _time(one["first"]), _time(one["last"])
    times = (one["mode"], f"{first:%Y-%m-%d %H:%M:%S}", f"{last:%Y-%m-%d %H:%M:%S}")
    admitted = Cell("admitted", printing.GREEN) if one["isAdmitted"] else Cell("")
    return (
        one["node"],
        f"{one['namespace']}/{one['pod']}",
        flow_text.target_text(
            str(one["protocol"]),
            one["port"],
            has_many_ports=one["hasManyPorts"],
            port_count=one["portCount"],
            lowest_port=one["lowestPort"],
            highest_port=one["highestPort"],
        ),
        Cell(one["verdict"], printing.YELLOW if one["verdict"] == _WOULD else 0),
        str(one["packets"]),
        ago(now - last),
        *((admitted,) if has_now else ()),
        *(times if is_wide else ()),
        flow_text.in_text(one["process"], flow_text.source_text(one["cgroup"], one["sourcePod"])),
    )


def _source(node: str, found: Object) -> Object:
    """With each field that is read here: another version may lack some."""
    unknown = "1970-01-01T00:00:00Z"
    defaults = {
        **dict.fromkeys(("namespace", "pod", "mode", "verdict", "protocol", "cgroup"), ""),
        **dict.fromkeys(("process", "sourcePod"), ""),
        **dict.fromkeys(("port", "packets", "portCount", "lowestPort", "highestPort"), 0),
        **{"hasManyPorts": False, "isAdmitted": False, "first": unknown, "last": unknown},
    }
    return {"node": node, **defaults, **found}


def _is_selected(one: Object, arguments: argparse.Namespace) -> bool:
    namespace, pod = one.get("namespace"), one.get("pod")
    if arguments.namespace and namespace not in arguments.namespace:
        return False
    return not arguments.pod or arguments.pod in (pod, f"{namespace}/{pod}")


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("a number from 1 on")
    return int(text)


def _age(text: str) -> datetime.timedelta | str:
    if text == _MARK:
        return text
    found = read_duration(text)
    if found is None:
        raise argparse.ArgumentTypeError("a time such as 90s, 15m, 24h or 7d, or 'mark'")
    return found

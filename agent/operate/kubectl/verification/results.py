"""What a run found: by node, pod and family, whether host processes and the kubelet get in."""

import dataclasses
from collections.abc import Iterable, Sequence

from agent.listing import listed
from agent.operate.kubectl.verification.targets import Port, Target
from agent.operate.kubectl.verification.tries import CLOSED, OPEN, UNCLEAR

HOLE = "HOLE"
"""Of a pod that is to be closed and is not."""
KUBELET_BLOCKED = "kubelet blocked"


@dataclasses.dataclass(frozen=True, slots=True)
class Try:
    """outcome: open, closed or unclear; detail: how it shows."""

    port: Port
    outcome: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """Tries from one node to one address of a pod there. kubelet: as the pod's; None also for the
    second family, which the kubelet does not probe."""

    node: str
    target: Target
    address: str
    tries: tuple[Try, ...]
    kubelet: bool | None

    @property
    def family(self) -> str:
        return "IPv6" if ":" in self.address else "IPv4"

    @property
    def verdict(self) -> str:
        """`HOLE`, `KUBELET_BLOCKED`, open, closed or unclear; the worst one."""
        outcomes = {one.outcome for one in self.tries}
        if OPEN in outcomes:
            return HOLE if self.target.is_to_be_closed else OPEN
        if self.kubelet is False:
            return KUBELET_BLOCKED
        return CLOSED if CLOSED in outcomes else UNCLEAR


@dataclasses.dataclass(frozen=True, slots=True)
class NodeResult:
    """origin: where tries came from: "pod", on the node's network, or "agent", its container.
    problems: sentences without their full stop; what they name was not tried."""

    node: str
    paths: tuple[Path, ...] = ()
    origin: str = "pod"
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """started, ended: RFC 3339."""

    nodes: tuple[NodeResult, ...]
    started: str
    ended: str

    @property
    def paths(self) -> list[Path]:
        return [path for node in self.nodes for path in node.paths]

    def with_verdict(self, *verdicts: str) -> list[Path]:
        return [path for path in self.paths if path.verdict in verdicts]

    @property
    def has_hole(self) -> bool:
        return bool(self.with_verdict(HOLE))

    @property
    def is_well(self) -> bool:
        """Whether nothing is open that is to be closed, the kubelet gets in, and all nodes were
        tried."""
        has_problem = any(node.problems for node in self.nodes)
        return bool(self.paths) and not has_problem and not self.with_verdict(HOLE, KUBELET_BLOCKED)

    def sentences(self) -> list[str]:
        """The summary, the worst first."""
        found = []
        if holes := self.with_verdict(HOLE):
            found.append(
                f"Hole open: host processes reach {_pods(holes)} that should be closed, on "
                f"{_nodes(holes)}: {_names(holes)}."
            )
        if blocked := self.with_verdict(KUBELET_BLOCKED):
            found.append(f"The kubelet does not reach {_pods(blocked)}: {_names(blocked)}.")
        found += [f"{node.node}: {problem}." for node in self.nodes for problem in node.problems]
        if closed := [path for path in self.with_verdict(CLOSED) if path.target.is_to_be_closed]:
            found.append(
                f"Closed: host processes of {_nodes(closed)} reach no address of {_pods(closed)}."
            )
        if opened := self.with_verdict(OPEN):
            found.append(f"Open, as modes off and audit are: {_pods(opened)} on {_nodes(opened)}.")
        if unclear := self.with_verdict(UNCLEAR):
            found.append(f"Unclear, since nothing answers there: {_names(unclear)}.")
        return found or ["Nothing was tried."]


def of_target(node: str, target: Target, answers: Iterable[dict[str, object]]) -> list[Path]:
    """Paths from what the tries printed; an address without answers is unclear."""
    by_key = {(one["address"], one["protocol"], one["port"]): one for one in answers}
    return [
        Path(
            node,
            target,
            address,
            tuple(
                _try(target, port, by_key.get((address, port.protocol, port.number)))
                for port in target.ports
            ),
            target.kubelet if number == 0 else None,
        )
        for number, address in enumerate(target.addresses)
    ]


def _try(target: Target, port: Port, answer: dict[str, object] | None) -> Try:
    if answer is None:
        return Try(port, UNCLEAR, "not tried")
    outcome, detail = str(answer["outcome"]), str(answer["detail"])
    if target.is_canary and port.protocol == "UDP" and detail == "no answer":
        outcome = CLOSED  # it answers all that it gets
    return Try(port, outcome, detail)


def _pods(paths: Sequence[Path]) -> str:
    count = len({path.target.uid for path in paths})
    return f"{count} pod" if count == 1 else f"{count} pods"


def _names(paths: Sequence[Path]) -> str:
    return listed(list(dict.fromkeys(path.target.full_name for path in paths)))


def _nodes(paths: Sequence[Path]) -> str:
    return listed(list(dict.fromkeys(path.node for path in paths)))

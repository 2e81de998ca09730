"""How fast a gate is back, or first again, after another program's work: bench `back`."""

import pathlib
import signal
import tempfile
import time
from collections.abc import Callable

from agent.lab import agent_process
from agent.lab import lab as labs
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from bpf import syscalls
from tests.bench import figures
from tests.kernel import foreign, removals

_TIMES = 20
# A gate is moved first so often at once.
_MOVES = 2
_PAUSE_SECONDS = 0.001
_LIMIT_SECONDS = 60.0


def main() -> None:
    """From the end of the other program's call until the kernel has the gate again, with one pod in
    enforce."""
    labs.isolate()
    for attachment in ("clsact", "tcx"):
        with Lab() as network, tempfile.TemporaryDirectory() as directory:
            agent = agent_process.AgentProcess(pathlib.Path(directory))
            pod = network.add_pod("web", 1)
            agent.write_manifest(pod, mode="enforce", container={})
            try:
                agent.start("--mode", "enforce", "--attach", attachment)
                agent.event(Event.PATH_TESTED, pod="demo/web", result="confirmed")
                # Now both of its programs are attached.
                agent.event(Event.REPLY_TABLE_READY, pod="demo/web")
                (_of_filters if attachment == "clsact" else _of_links)(agent.bpffs, pod)
            finally:
                agent.stop(signal.SIGKILL)
                agent.cleanup()


def _of_filters(bpffs: pathlib.Path, pod: LabPod) -> None:
    def order() -> list[bool]:
        return removals.filter_order(bpffs, pod)

    def precede() -> None:
        foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, priority=1)

    _measure("filter_preceded_ms", precede, lambda: order()[0], _MOVES)
    _measure("qdisc_deleted_ms", lambda: removals.delete_qdisc(pod), lambda: any(order()), _TIMES)
    _measure(
        "filter_deleted_ms", lambda: removals.delete_filters(pod), lambda: any(order()), _TIMES
    )


def _of_links(bpffs: pathlib.Path, pod: LabPod) -> None:
    def programs() -> list[int]:
        return syscalls.query_programs(pod.ifindex, removals.EGRESS)

    _until("the link", lambda: bool(removals.links(bpffs, pod)))
    (ours,) = programs()
    _measure(
        "link_detached_ms",
        lambda: removals.detach_link(bpffs, pod),
        # Its new pin comes after it.
        lambda: ours in programs() and bool(removals.links(bpffs, pod)),
        _TIMES,
    )


def _measure(
    figure: str, remove: Callable[[], object], is_back: Callable[[], bool], times: int
) -> None:
    took = []
    for _ in range(times):
        remove()
        took.append(_until(figure, is_back) * 1000)
    figures.emit("back", figure, took, "ms")


def _until(what: str, holds: Callable[[], bool]) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > _LIMIT_SECONDS:
            raise TimeoutError(f"{what}: not within {_LIMIT_SECONDS:g} s")
        time.sleep(_PAUSE_SECONDS)
    return time.monotonic() - began


if __name__ == "__main__":
    main()

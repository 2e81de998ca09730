"""Cost of NRI at the start of pods, in a real cluster: bench `nri`.

BIN as for `make test-cluster`, with a runtime that has NRI."""

import os
import pathlib
import sys
import tempfile

from agent.lab import lab as labs
from tests.bench import cluster, figures
from tests.cluster import control_plane, one_node
from tests.cluster.deployment import Deployment
from tests.cluster.workloads import ISOLATION_READY, PROBES_PASSING
from tests.image import building

# With and without, in an order in which a machine that becomes slower counts for both.
_ORDER = (True, False, False, True)
_BURSTS = 4
_IMAGE = "PODGATE_TEST_IMAGE"


def main() -> None:
    given = os.environ.get("PODGATE_TEST_BIN", "")
    binaries = pathlib.Path(given).absolute()
    problem = control_plane.missing(binaries) if given else "BIN is not set; name a directory."
    if problem:
        sys.exit(f"bench nri: {problem}")
    with tempfile.TemporaryDirectory() as directory:
        image = pathlib.Path(os.environ.get(_IMAGE) or pathlib.Path(directory, "podgate.tar"))
        if not image.exists():
            building.build(image, one_node.IMAGE)
        labs.isolate()
        with one_node.running(binaries, image) as node:
            podgate = Deployment(node.api)
            podgate.apply()
            podgate.wait_until_ready()
            bursts: dict[bool, list[float]] = {True: [], False: []}
            for has_nri in _ORDER:
                podgate.set_arguments([] if has_nri else ["--no-nri"])
                podgate.until(
                    "the desired way",
                    lambda report, wanted=has_nri: (  # type: ignore[misc]
                        report.components.get("nri") is (True if wanted else None)
                    ),
                )
                for _ in range(_BURSTS):
                    gates = (ISOLATION_READY, PROBES_PASSING)
                    bursts[has_nri].append(cluster.burst_seconds(node, "enforce", gates))
            figures.emit("nri", "burst_60_pods_seconds", bursts[True], "s", baseline=bursts[False])


if __name__ == "__main__":
    main()

"""Both address families in the cluster."""

import contextlib
import json
from collections.abc import Iterator

from agent.lab.lab import NODE_IPV4, NODE_IPV6
from tests import polling
from tests.cluster import workloads
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import Workloads
from tests.runtime import containerd


@contextlib.contextmanager
def dual_stack(node: OneNode) -> Iterator[None]:
    """New pods get both addresses, and the kubelet prefers those of IPv6."""
    runtime, kubelet = node.runtime, node.kubelet
    (file,) = runtime.cni_directory.glob("*.conflist")
    single = file.read_text()
    content = json.loads(single)
    data = content["plugins"][0]["ipam"]["dataDir"]
    content["plugins"][0] = containerd.ptp(dual_stack=True)
    content["plugins"][0]["ipam"]["dataDir"] = data
    file.write_text(json.dumps(content))
    kubelet.restart_at(str(NODE_IPV6), str(NODE_IPV4))
    kubelet.wait_until_ready()
    with workloads.namespace(node.api, "waits-for-dual-stack") as users:
        # The runtime reads the file a little later.
        polling.wait_until("pods have two addresses", lambda: _has_two(users))
    yield
    file.write_text(single)
    kubelet.restart_at(str(NODE_IPV4))
    kubelet.wait_until_ready()


def _has_two(users: Workloads) -> bool:
    users.run("web")
    (pod,) = users.until_ready("web")
    users.delete("web")
    users.until_gone("web")
    return len(pod["status"]["podIPs"]) == 2

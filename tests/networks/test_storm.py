"""Strict while everything of the node ends and starts again."""

from collections.abc import Callable

import pytest

from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.networks import workload
from tests.networks.network import Network
from tests.networks.storms import storm

pytestmark = pytest.mark.kernel


def test_storm_in_strict_harms_nothing(
    network: Network,
    node: OneNode,
    podgate: Deployment,
    namespaces: Namespaces,
    record_property: Callable[[str, object], None],
) -> None:
    """test_uninstall.py has the same storm without podgate."""
    users = namespaces("strict")
    pods = workload.run(users)
    outcome = storm(network, node, users, pods, podgate)
    record_property("figures", outcome.summary)
    assert outcome.wrong == {"node": [], "pod": [], "outside": []}
    assert outcome.restarts == {}
    users.until_isolated("web", "tcp", "client")

import pathlib

import pytest

from agent.kubectl.cluster import Cluster
from tests.agent.kubectl.standin import KubectlStandin


@pytest.fixture
def kubectl(tmp_path: pathlib.Path) -> KubectlStandin:
    return KubectlStandin(tmp_path)


@pytest.fixture
def cluster(kubectl: KubectlStandin) -> Cluster:
    return Cluster([kubectl.command])

"""The conformance suite of tests/cnp in a real cluster, as its command runs it in any."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests import polling
from tests.chart import rendering
from tests.cluster import deployment
from tests.cluster.api import Json
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cnp import cases
from tests.cnp.cases import DROPPED
from tests.cnp.objects import RUN_LABEL
from tests.cnp.running import POLICIES
from tests.runtime import images

pytestmark = pytest.mark.kernel
# The definition of sigs.k8s.io/network-policy-api; one that accepts any spec otherwise.
_CRD = "PODGATE_TEST_CNP_CRD"
_DEFINITIONS = deployment.PATHS["CustomResourceDefinition"]
_NAMESPACES = "/api/v1/namespaces"
_OPTION = "--cluster-network-policies=close"
_SECONDS = 400


@pytest.fixture
def definition(tmp_path: pathlib.Path) -> pathlib.Path:
    if given := os.environ.get(_CRD):
        return pathlib.Path(given)
    names, _, group = POLICIES.partition(".")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    made: Json = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": POLICIES,
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {"plural": names, "kind": "ClusterNetworkPolicy"},
            "versions": [
                {
                    "name": "v1alpha2",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": anything},
                }
            ],
        },
    }
    path = tmp_path / "definition.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def closing(bare_cluster: OneNode, podgate: Deployment) -> Iterator[Deployment]:
    """podgate with the chart's rights and the option, and then again without."""
    values: Json = {"clusterNetworkPolicies": {"mode": "close"}}
    name = "podgate-cluster-network-policies"
    things = [
        (deployment.PATHS[thing["kind"]], thing)
        for thing in rendering.objects(values, service="kubectl")
        if thing["metadata"]["name"] == name
    ]
    assert [thing["kind"] for _, thing in things] == ["ClusterRole", "ClusterRoleBinding"]
    for path, thing in things:
        bare_cluster.api.apply(f"{path}/{name}", thing)
    podgate.set_arguments([_OPTION])
    yield podgate
    podgate.set_arguments([])
    for path, _ in things:
        bare_cluster.api.delete(f"{path}/{name}")


def command(node: OneNode, definition: pathlib.Path, *arguments: str) -> list[str]:
    kubeconfig = node.control_plane.kubeconfig("admin")
    return [
        *(sys.executable, "-m", "tests.cnp", f"--kubeconfig={kubeconfig}"),
        *(f"--image={images.POD}", f"--crd={definition}", *arguments),
    ]


def run(node: OneNode, definition: pathlib.Path, *arguments: str) -> tuple[int, str, str]:
    made = command(node, definition, *arguments)
    home = {**os.environ, "HOME": str(definition.parent)}
    done = subprocess.run(
        made, capture_output=True, text=True, timeout=_SECONDS, check=False, env=home
    )
    return done.returncode, done.stdout, done.stderr


def leavings(node: OneNode) -> list[str]:
    of_runs = node.api.items(_NAMESPACES, labelSelector=RUN_LABEL)
    found = [one["metadata"]["name"] for one in of_runs]
    return found + [POLICIES] * bool(node.api.find(f"{_DEFINITIONS}/{POLICIES}"))


def test_without_the_option_each_denied_case_differs(
    node: OneNode, definition: pathlib.Path
) -> None:
    status, text, log = run(node, definition, "--output=json", "--least=3", "--most=3")
    assert status == 1, log
    report = json.loads(text)
    differing = {one["name"] for one in report["results"] if one["expected"] != one["found"]}
    assert differing == {case.name for case in cases.read() if case.host_process == DROPPED}
    assert not report["podsAreDropped"]
    assert leavings(node) == []


def test_each_case_is_as_expected(
    node: OneNode, closing: Deployment, definition: pathlib.Path
) -> None:
    status, text, log = run(node, definition)
    assert status == 0, f"{text}\n{log}"
    suite = cases.read()
    for case in suite:
        (line,) = (one for one in text.splitlines() if one.split()[:1] == [case.name])
        assert line.split()[1:] == list(case.expected.values())
    assert f"{len(suite)} of {len(suite)} as expected on node1" in text
    assert leavings(node) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(
    node: OneNode, podgate: Deployment, definition: pathlib.Path, number: signal.Signals
) -> None:
    made = command(node, definition, "--least=600", "--most=600")
    home = {**os.environ, "HOME": str(definition.parent)}
    with subprocess.Popen(made, stderr=subprocess.PIPE, text=True, env=home) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "as expected after" in line:
                break
        assert POLICIES in leavings(node)
        process.send_signal(number)
        assert process.wait(_SECONDS) == 2
    polling.wait_until("the definition is gone", lambda: leavings(node) == [])

"""The commands of README and the guides for a cluster, typed as they are, with the real kubectl.

README installs podgate, by Helm if HELM names it (`make test-cluster`), else by kubectl; the guides
follow in the same cluster. They find what a reader has: a kubeconfig, and a namespace `shop` with a
pod `web` that has probes.
"""

import os
import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster import workloads
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import MODE, PROBED, Workloads
from tests.docs import blocks, shell
from tests.docs.blocks import ROOT, WALKS
from tests.docs.shell import Shell
from tests.runtime import images

pytestmark = pytest.mark.kernel

_README = ROOT / "README.md"
_GUIDES = [page for page in WALKS if page != _README and blocks.of(page, "cluster")]


# It serves at the ports of the pages' pods.
_CONTAINER = f"""image: {images.POD}
      command:
        - /bin/sh
        - -c
        - >-
          echo ok > /www/status;
          /bin/httpd -p 127.0.0.1:9090 -h /www;
          exec /bin/httpd -f -p 8080 -h /www"""


def _runnable(manifest: str) -> str:
    """The manifest of a page with an image that the cluster has."""
    return re.sub(r"image: registry\.example/.*", _CONTAINER, manifest)


@pytest.fixture(scope="module")
def shop(bare_cluster: OneNode) -> Iterator[Workloads]:
    with workloads.namespace(bare_cluster.api, "shop", {}) as made:
        made.run("web", PROBED)
        made.until_ready("web")
        yield made


@pytest.fixture(scope="module")
def typed(
    bare_cluster: OneNode, shop: Workloads, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    """A shell on the cluster's node, in which README's commands have installed podgate."""
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is not installed; put it into PATH", pytrace=False)
    home = tmp_path_factory.mktemp("home")
    helm = os.environ.get("PODGATE_TEST_HELM")
    programs = tmp_path_factory.mktemp("programs")
    if helm:
        (programs / "helm").symlink_to(pathlib.Path(helm).absolute())
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),  # kubectl caches the API's resources below it
        "KUBECONFIG": str(bare_cluster.control_plane.kubeconfig("admin")),
        "NO_COLOR": "1",
    }
    checkout = tmp_path_factory.mktemp("checkout")
    # What the commands write is not in the tests' own checkout.
    for entry in ROOT.iterdir():
        if entry.name != "dist":
            (checkout / entry.name).symlink_to(entry)
    with shell.started(["bash", "--norc"], checkout, environment) as made:
        way = "cluster by helm" if helm else "cluster by kubectl"
        for block in blocks.of(_README, "cluster", way):
            made.follow(block)
        yield made


def test_readme_installs_podgate_and_closes_a_namespace(typed: Shell, shop: Workloads) -> None:
    shop.mode = "enforce"
    namespace = shop.api.get(f"/api/v1/namespaces/{shop.namespace}")
    assert namespace["metadata"]["labels"][MODE] == shop.mode
    pod = shop.until_ready("web")[0]
    polling.wait_until("the pod is closed", lambda: not workloads.is_reachable(pod))
    assert shop.restarts() == {}


@pytest.mark.parametrize("page", _GUIDES, ids=lambda page: page.stem)
def test_commands_of_a_guide_work_in_their_order(
    page: pathlib.Path, typed: Shell, shop: Workloads
) -> None:
    for name, content in blocks.files(page).items():
        assert typed.run(f"cat > {name} <<'END'\n{_runnable(content)}END")[0] == 0
    for block in blocks.of(page, "cluster"):
        typed.follow(block)
    shop.until_ready("web")
    assert shop.restarts() == {}

"""The image is pushed to a real registry; one sentence names what is in the way."""

import json
import os
import pathlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from agent import VERSION
from tests.image import building
from tests.polling import PATIENCE, wait_until

PUSH = building.ROOT / "deploy" / "push.sh"
REGISTRY = pathlib.Path(sys.prefix) / "bin" / "docker-registry"
_INDEX = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"

pytestmark = pytest.mark.timeout(900 * PATIENCE)  # the image is built first


@pytest.fixture
def registry(tmp_path: pathlib.Path) -> Iterator[str]:
    """Its address, on this machine."""
    log, settings = tmp_path / "log", tmp_path / "registry.yaml"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "images")}}
    http = {"addr": "127.0.0.1:0", "secret": "of this test"}
    settings.write_text(json.dumps({"version": "0.1", "storage": storage, "http": http}))
    with log.open("wb") as file:
        process = subprocess.Popen([REGISTRY, "serve", settings], stderr=file, stdout=file)
    try:
        yield wait_until("a port", lambda: _address(log))
    finally:
        process.terminate()
        process.wait(30)


def _address(log: pathlib.Path) -> str:
    """As the registry logs it; empty until it listens."""
    found = [line for line in log.read_text().splitlines() if "listening on" in line]
    return found[0].partition("listening on ")[2].split('"')[0] if found else ""


def push(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PUSH, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_image_is_pushed_with_its_version_and_digest(image: pathlib.Path, registry: str) -> None:
    done = push(image, registry)
    assert done.returncode == 0, done.stderr
    name, _, digest = done.stdout.strip().partition("@")
    assert name == f"{registry}/podgate:{VERSION}"
    request = urllib.request.Request(
        f"http://{registry}/v2/podgate/manifests/{VERSION}", headers={"Accept": _INDEX}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Docker-Content-Digest"] == digest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "name a registry: make push REGISTRY="),
        (["127.0.0.1:1"], f"127.0.0.1:1/podgate:{VERSION} was not pushed"),
    ],
)
def test_problem_is_named(image: pathlib.Path, arguments: list[str], words: str) -> None:
    done = push(image, *arguments)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]

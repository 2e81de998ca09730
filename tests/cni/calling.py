"""podgate-cni built for a test, and called as a container runtime calls plugins."""

import json
import pathlib
import subprocess
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.polling import PATIENCE

SOURCES = pathlib.Path(__file__).parents[2] / "deploy" / "cni"
_LIMIT_SECONDS = 30 * PATIENCE

POD = {
    "CNI_CONTAINERID": "c0",
    "CNI_IFNAME": "eth0",
    "CNI_NETNS": "/nowhere",
    "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=demo;K8S_POD_NAME=web;K8S_POD_UID=1",
}


def build(output: pathlib.Path, *flags: str) -> pathlib.Path:
    """The plugin, with the compiler's `flags` instead of the usual ones."""
    subprocess.run([str(SOURCES / "build.sh"), str(output), *flags], check=True)
    return output


class Answer(msgspec.Struct, frozen=True):
    """How a call ended."""

    status: int
    output: bytes
    stderr: str

    @property
    def result(self) -> Any:
        """The answer as JSON."""
        return json.loads(self.output)

    @property
    def error(self) -> Any:
        """The answer as CNI's error object, which it must be."""
        error = self.result
        assert self.status == 1
        assert isinstance(error["code"], int)
        assert isinstance(error["msg"], str)
        assert "\n" not in error["msg"]
        assert error["cniVersion"]
        return error


def call(
    plugin: pathlib.Path,
    command: str,
    configuration: bytes | Mapping[str, object],
    variables: Mapping[str, str] | None = None,
) -> Answer:
    """Run a plugin to its end."""
    if not isinstance(configuration, bytes):
        configuration = json.dumps(configuration).encode()
    done = subprocess.run(
        [str(plugin)],
        input=configuration,
        capture_output=True,
        env={"CNI_COMMAND": command, "CNI_PATH": "/", **(variables or {})},
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

"""A pod's read-only mount of PodInfo's directory, as docs/podinfo.md describes it."""

import asyncio
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from tests.agent.api.podinfo.serving import Node

PAGE = pathlib.Path(__file__).parents[4] / "docs" / "podinfo.md"
_IN_A_CONTAINER = """
import os, socket, subprocess, sys
directory, mounted = sys.argv[1:]
for options in (["--bind", directory], ["-o", "remount,bind,ro"]):
    subprocess.run(["mount", *options, mounted], check=True)
found = [name for name in os.listdir(mounted) if name.endswith(".sock")]
path = os.path.join(mounted, *found)
socket.socket(socket.AF_UNIX).connect(path)
try:
    os.unlink(path)
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.kernel
async def test_root_behind_a_read_only_mount_connects_and_replaces_no_socket(
    node: Node, tmp_path: pathlib.Path
) -> None:
    async with node.serving():
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "--propagation", "private"),
            *(sys.executable, "-c", _IN_A_CONTAINER, str(node.path.parent), str(tmp_path)),
            stdout=subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert (process.returncode, printed) == (0, b"Read-only file system\n")


def test_page_mounts_the_directory_read_only() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (mount,) = yaml.safe_load(text)["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/run/podgate/podinfo", True)

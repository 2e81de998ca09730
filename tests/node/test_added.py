"""Conditions of pods that podgate-cni has gated, while the runtime creates their sandboxes."""

import asyncio
import json
import pathlib
import sys

import pytest

from agent import labels
from tests.node.node import Node
from tests.runtime.containerd import Containerd

pytestmark = pytest.mark.kernel

# Runs after podgate-cni, so that the pod has its gate and the runtime waits.
_HOLD = """\
#!{python}
import json, os, sys, time
conf = json.load(sys.stdin)
if os.environ["CNI_COMMAND"] == "VERSION":
    print('{{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}}')
elif os.environ["CNI_COMMAND"] == "ADD":
    while not os.path.exists({release!r}):
        time.sleep(0.02)
    if open({release!r}).read() == "fail":
        sys.exit(1)
    print(json.dumps(conf["prevResult"]))
"""


def install_hold(runtime: Containerd, release: pathlib.Path) -> None:
    """Add a last plugin that returns when `release` exists; it fails if that contains "fail", which
    has to be there as soon as the file is."""
    script = runtime.plugins / "hold"
    script.write_text(_HOLD.format(python=sys.executable, release=str(release)))
    script.chmod(0o755)
    [path] = runtime.cni_directory.iterdir()
    conflist = json.loads(path.read_text())
    conflist["plugins"].append({"type": "hold"})
    path.write_text(json.dumps(conflist))
    runtime.stop()
    runtime.start()


async def start_held(node: Node, plugin: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """An agent, and a pod "web" whose sandbox is complete when the returned file exists."""
    release = tmp_path / "release"
    await node.start_agent()
    await node.report("the agent", lambda report: report.is_synced)
    await node.install_plugin(plugin)
    install_hold(node.runtime, release)
    node.create("web")
    return release


async def test_isolation_ready_is_patched_before_the_sandbox_is_complete(
    node: Node, plugin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    release = await start_held(node, plugin, tmp_path)
    creating = asyncio.create_task(node.run_pod("web"))
    try:
        await node.until("the condition", lambda: isolation(node) == ("True", "Enforced"))
        assert not creating.done()
        stamp = str(node.condition("web", labels.ISOLATION_READY)["message"])
    finally:
        release.write_text("")
    sandbox = await creating
    assert f"(sandbox {sandbox[:12]}, " in stamp
    await node.ready("web")
    # What the runtime lists is the same: no patch takes the condition back.
    for patch in node.patches("web"):
        for condition in patch.body["status"]["conditions"]:
            if condition["type"] == labels.ISOLATION_READY:
                assert (condition["status"], condition["message"]) == ("True", stamp)


async def test_sandbox_that_fails_after_its_gate_is_attached_is_forgotten(
    node: Node, plugin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    release = await start_held(node, plugin, tmp_path)
    creating = asyncio.create_task(node.driver.run_sandbox("web"))
    try:
        await node.until("the condition", lambda: isolation(node) == ("True", "Enforced"))
    finally:
        unnamed = release.with_suffix(".new")
        unnamed.write_text("fail")
        unnamed.rename(release)
    (ended,) = await asyncio.gather(creating, return_exceptions=True)
    assert isinstance(ended, Exception)
    await node.until("its end", lambda: isolation(node)[0] == "False")
    release.write_text("")
    await node.run_pod("web", attempt=1)
    await node.ready("web")


def isolation(node: Node) -> tuple[str, str]:
    condition = node.condition("web", labels.ISOLATION_READY)
    return condition.get("status", ""), condition.get("reason", "")

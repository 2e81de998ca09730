"""Connections of real runtimes, recorded by `tests/nri` with PODGATE_TEST_RECORD=1, replayed."""

import pathlib

import pytest

from agent.nri.plugin import Connected, NewPod, PluginProtocol, Synchronizing
from agent.nri.ttrpc import Call, Response
from tests.agent.nri import runtime
from tests.nri import recording

RECORDS = sorted(recording.RECORDED.glob("*.jsonl"))
RUNTIMES = {"containerd": "containerd 2.4", "crio": "cri-o 1.3"}


def test_records_exist() -> None:
    assert RECORDS


def answered(received: list[bytes]) -> tuple[list[object], list[Call | Response]]:
    """What follows from pieces of the runtime, and what the plugin sends."""
    plugin = PluginProtocol()
    plugin.register()
    happened: list[object] = []
    for content in received:
        for one in plugin.receive(content):
            happened.append(one)
            if isinstance(one, NewPod | Synchronizing):
                plugin.accept(one)
    return happened, runtime.Reader().feed(plugin.data_to_send())


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [0, 1, 7, 4096], ids=lambda size: f"pieces-{size}")
def test_plugin_answers_what_the_runtime_accepted(path: pathlib.Path, size: int) -> None:
    pieces = recording.read(path)
    received = [content for side, content in pieces if side == "runtime"]
    if size:
        whole = b"".join(received)
        received = [whole[start : start + size] for start in range(0, len(whole), size)]
    happened, sent = answered(received)
    accepted = b"".join(content for side, content in pieces if side == "plugin")
    assert sent == runtime.Reader().feed(accepted)
    connected = happened[0]
    assert isinstance(connected, Connected)
    assert connected.runtime.startswith(RUNTIMES[path.stem])
    assert connected.timeout_seconds == 2.0


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_new_pod_is_read_with_all_that_the_runtime_reports(path: pathlib.Path) -> None:
    received = [content for side, content in recording.read(path) if side == "runtime"]
    web, agent = [one for one in answered(received)[0] if isinstance(one, NewPod)]
    # CRI-O reports the host's namespace by a path, which only the node can recognise.
    assert (agent.sandbox is None) == (path.stem != "crio")
    assert agent.sandbox is None or not agent.sandbox.sandbox.ips
    assert web.sandbox is not None
    sandbox = web.sandbox.sandbox
    assert (sandbox.full_name, sandbox.pod_uid) == ("tests/web", "uid-web")
    assert len(sandbox.id) == 64
    assert web.sandbox.netns_path.rpartition("/")[0] in ("/run/netns", "/var/run/netns")
    assert all(str(address).startswith("198.18.") for address in sandbox.ips)

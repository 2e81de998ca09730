"""Each mesh in each mode: what the kubelet, podgate's probes, host processes and pods get."""

import pytest

from tests.kernel import nodeclient
from tests.meshes import record
from tests.meshes.conftest import RecordRun
from tests.meshes.record import RIGHT, UNCHANGED
from tests.meshes.scene import Scene

pytestmark = pytest.mark.kernel

OWN, HOST, PODS = "podgate's own", "host process", "pod to pod"


def test_mesh_is_unchanged_but_for_probes_in_strict_and_host_processes(
    pods: Scene, record_run: RecordRun
) -> None:
    """Strict alone makes probes right that the mesh would reject, or accept for the application."""
    before = pods.kubelet_results()
    pods_before = pods.pod_results()
    found = {"none": {**before, HOST: _reached(pods.host_results())}}
    differences = []
    for mode in record.MODES[1:]:
        if mode == "audit":
            for pod in pods.node.pods.values():
                pod.mode = mode
                pods.node.declare(pod)
            pods.node.start()
        else:
            pods.node.set_mode(mode)
        kubelet = pods.kubelet_results()
        own = pods.own_results()
        host = _reached(pods.host_results())
        others = pods.pod_results()
        found[mode] = {
            **kubelet,
            OWN: _summary(own),
            HOST: host,
            PODS: UNCHANGED if others == pods_before else "changed",
        }
        expected = dict.fromkeys(pods.kinds, RIGHT) if mode == "strict" else before
        differences += [
            f"{mode}: {kind}: {result}, not {expected[kind]}"
            for kind, result in kubelet.items()
            if not _are_equal(result, expected[kind])
        ]
        if _summary(own) != RIGHT:
            differences.append(f"{mode}: podgate's own: {own}")
        if others != pods_before:
            differences.append(f"{mode}: {PODS}: {others}, not {pods_before}")
        is_closed = mode != "audit"
        if is_closed and host != nodeclient.FORBIDDEN:
            differences.append(f"{mode}: host process: {host}")
    record_run(record.PROBES, results=found)
    assert differences == []


def _reached(results: dict[str, str]) -> str:
    """Of a host process: the result, or by result the ports."""
    if len(set(results.values())) == 1:
        return next(iter(results.values()))
    by_result: dict[str, dict[str, None]] = {}
    for target, result in results.items():
        by_result.setdefault(result, {})[target.rpartition(",")[2]] = None
    parts = [f"{result}: {' '.join(ports)}" for result, ports in by_result.items()]
    return "; ".join(parts)


def _summary(own: dict[str, str]) -> str:
    wrong = {kind: result for kind, result in own.items() if result != RIGHT}
    return ", ".join(f"{kind} {result}" for kind, result in wrong.items()) or RIGHT


def _are_equal(result: str, expected: str) -> bool:
    """A proxy that rejects a connection resets or ends it."""
    same = {nodeclient.RESET: nodeclient.ENDED}

    def plain(text: str) -> str:
        for word, other in same.items():
            text = text.replace(word, other)
        return text

    return plain(result) == plain(expected)

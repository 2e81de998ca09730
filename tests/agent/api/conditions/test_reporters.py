"""Which processes a ConditionOwner names, by what the kernel reports of them."""

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from agent.api.conditions import owner, reporters
from agent.api.conditions.owner import PodsField
from agent.api.conditions.reporters import Reporter
from agent.linux.procfs import Procfs
from agent.serving.peer_process import PeerProcess
from tests import unprivileged
from tests.agent.api.conditions.node import owner as document

UID = "0f3b9c1e-7a52-4c1b-9a55-0123456789ab"
UNIT = {"systemdUnit": "gpu.service"}
POD = {"pods": {"namespace": "gpu", "serviceAccount": "agent"}}
IN_POD = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-1.scope"


def account_of(uid: str) -> PodsField | None:
    return PodsField(namespace="gpu", service_account="agent") if uid == UID else None


@pytest.mark.parametrize(
    ("field", "reporter", "is_named"),
    [
        ({"user": 7}, Reporter(7, None), True),
        ({"user": 7}, Reporter(8, None), False),
        ({"user": 0}, Reporter(-1, "/system.slice/gpu.service"), False),
        (UNIT, Reporter(7, "/system.slice/gpu.service"), True),
        (UNIT, Reporter(7, "/system.slice/gpu.service/worker"), True),
        (UNIT, Reporter(7, "/system.slice/system-gpu.slice/gpu.service"), True),
        (UNIT, Reporter(7, None), False),
        # A user's own systemd, and a container, may make cgroups of any name.
        (
            UNIT,
            Reporter(7, "/user.slice/user-7.slice/user@7.service/app.slice/gpu.service"),
            False,
        ),
        (UNIT, Reporter(7, f"{IN_POD}/gpu.service"), False),
        (UNIT, Reporter(7, f"/kubepods/pod{UID}/c1/gpu.service"), False),
        ({"cgroup": "/system.slice"}, Reporter(7, "/system.slice/gpu.service"), True),
        ({"cgroup": "/system.slice"}, Reporter(7, "/system.slice"), True),
        ({"cgroup": "/system"}, Reporter(7, "/system.slice"), False),
        (POD, Reporter(0, IN_POD), True),
        (POD, Reporter(0, f"/kubepods/burstable/pod{UID}/c1"), True),
        (POD, Reporter(0, IN_POD.replace("0f3b", "1f3b")), False),
        # A name that looks like a pod's, where the kubelet makes none.
        (POD, Reporter(0, f"/system.slice/gpu.service/a/b/kubepods/pod{UID}/c1"), False),
        (POD, Reporter(0, None), False),
        ({**POD, "user": 7}, Reporter(7, IN_POD), True),
        ({**POD, "user": 7}, Reporter(0, IN_POD), False),
    ],
)
def test_fields_that_are_set_must_all_match(
    field: dict[str, Any], reporter: Reporter, is_named: bool
) -> None:
    made = owner.read(document("gpu.example.com", field))
    assert reporters.is_named(reporter, made, account_of) is is_named


def test_any_of_the_reporters_may_report() -> None:
    made = owner.read(document("gpu.example.com", {"user": 1}, {"user": 2}))
    assert reporters.is_named(Reporter(2, None), made, account_of)


def test_process_of_a_connection_has_its_cgroup_until_it_ends() -> None:
    with unprivileged.visible_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
        listener.listen()
        client = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); "
        client += "s.connect(sys.argv[1]); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", client, directory / "socket"]) as process:
            accepted, _ = listener.accept()
            with accepted:
                peer = PeerProcess.of(accepted)
                assert peer is not None
                assert peer.cgroup() == Procfs().cgroup(process.pid)
                process.send_signal(signal.SIGKILL)
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                assert peer.cgroup() is None
                peer.close()
                peer.close()
                assert peer.cgroup() is None

"""The order of the checks, with and without a cluster."""

import pathlib
from typing import Any

import pytest

from agent.kube.client import ApiClient, NoClusterConfigError
from agent.operate.doctor import checks
from agent.operate.doctor.results import DoctorReport, Passed
from agent.settings import DEFAULT_RELAY_RANGES

OF_NODE = ["kernel", "programs", "packet_sockets", "tools", "host_network", "cni"]


class Api:
    def __init__(self) -> None:
        self.is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("has_cluster", [False, True])
async def test_checks_of_the_cluster_need_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, *, has_cluster: bool
) -> None:
    api = Api()
    arguments: dict[str, Any] = {}

    def checked(name: str, *given: object, **named: object) -> Passed:
        arguments[name] = (*given, *named.values())
        return Passed(name, "So.")

    def replace(name: str, *, is_async: bool, is_one: bool) -> None:
        async def check(*given: object, **named: object) -> Any:
            return check_now(*given, **named)

        def check_now(*given: object, **named: object) -> Any:
            made = checked(name, *given, **named)
            return made if is_one else [made]

        monkeypatch.setattr(getattr(checks, name), "check", check if is_async else check_now)

    async def opened(kubeconfig: str | None) -> Api:
        assert kubeconfig == "config"
        if has_cluster:
            return api
        raise NoClusterConfigError("none")

    for name in OF_NODE:
        is_async = name in ("host_network", "cni")
        replace(name, is_async=is_async, is_one=name in ("packet_sockets", "tools"))
    for name in ("runtime", "cluster", "agent"):
        replace(name, is_async=True, is_one=name == "runtime")
    monkeypatch.setattr("agent.app.preflight.check", lambda: None)
    monkeypatch.setattr(ApiClient, "open", opened)
    run_directory, socket = tmp_path / "run", tmp_path / "cri.sock"
    found = await checks.run(tmp_path, run_directory, kubeconfig="config", cri_socket=socket)
    privileges = Passed("privileges", "bpf(2) is allowed and cgroup v2 is mounted.")
    names = [*OF_NODE, *(("runtime", "cluster") if has_cluster else ()), "agent"]
    assert found == DoctorReport([], [privileges, *(Passed(name, "So.") for name in names)])
    assert arguments["agent"] == (tmp_path, run_directory, has_cluster)
    assert arguments["host_network"] == (tmp_path, DEFAULT_RELAY_RANGES)
    if has_cluster:
        assert (arguments["runtime"], arguments["cluster"]) == ((socket,), (api,))
    assert api.is_closed is has_cluster

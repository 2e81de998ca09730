"""Results of the agent's own probes reach the node's service proxy directly."""

import asyncio
import pathlib

import pytest

from agent.lab.lab import Lab
from bpf import pins
from tests.kernel import cgroups, offers
from tests.proxy import dying, scene

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("backend", ["ebpf", "nft"])
def test_new_connections_avoid_a_pod_whose_listener_died_without_an_api_server(
    lab: Lab,
    fresh_pins: pins.Pins,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    backend: str,
) -> None:
    offers.need_netns_cookie()
    pods = [lab.add_pod(f"web-{number}", number + 1) for number in range(4)]

    async def end_all_but_one() -> list[float]:
        async with dying.chain(tmp_path, fresh_pins, pods, cgroup, backend=backend) as chain:
            return [await chain.end(pod) for pod in pods[:-1]]

    with scene.routed(), cgroups.cgroup() as cgroup:
        milliseconds = asyncio.run(end_all_but_one())
    with capsys.disabled():
        shown = ", ".join(f"{one:.1f}" for one in milliseconds)
        print(f"\n{backend}: avoided after {shown} ms")  # noqa: T201

"""Many pods at once on one runtime: eight, or a hundred by `make test-pods`."""

import asyncio
import os
import time

import pytest

from tests.runtime import containerd
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver
from tests.runtime.watching import following

pytestmark = pytest.mark.kernel

_PODS = int(os.environ.get("PODGATE_TEST_PODS") or 8)
# The kubelet starts pods as they come; runtimes bring up some at once.
_AT_ONCE = 10


@pytest.mark.parametrize(
    "runtime", [containerd.ptp(dual_stack=True)], indirect=True, ids=["dual-stack"]
)
async def test_many_pods_are_found_with_their_namespaces_and_leave_nothing(
    runtime: Containerd, driver: Driver
) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def start(number: int) -> str:
        async with turns:
            sandbox_id = await driver.run_sandbox(f"pod-{number}")
            await driver.start_container(sandbox_id)
            return sandbox_id

    async def end(sandbox_id: str) -> None:
        async with turns:
            await driver.stop_sandbox(sandbox_id)
            await driver.remove_sandbox(sandbox_id)

    async with following(runtime.socket) as watched:
        current = watched.sandboxes
        begun = time.monotonic()
        ids = await asyncio.gather(*(start(number) for number in range(_PODS)))
        started = time.monotonic()
        await watched.until(
            "all run",
            lambda: sum(len(one) for one in current.containers.values()) == _PODS,
        )
        print(f"{_PODS} pods in {started - begun:.1f} s")  # noqa: T201
        print(f"all known {time.monotonic() - started:.2f} s later")  # noqa: T201
        assert {one.id for one in current.current.values()} == set(ids)
        assert len({one.netns for one in current.current.values()}) == _PODS
        assert not [one.problem for one in current.current.values() if one.problem]

        begun = time.monotonic()
        await asyncio.gather(*(end(sandbox_id) for sandbox_id in ids))
        ended = time.monotonic()
        await watched.until("all are gone", lambda: not current.current)
        print(f"ended in {ended - begun:.1f} s")  # noqa: T201
        print(f"all gone {time.monotonic() - ended:.2f} s later")  # noqa: T201
        assert current.containers == {}

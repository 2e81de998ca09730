"""All checks, in the order of their dependencies."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import as_sentence, found
from agent.app import preflight
from agent.errors import PreflightError
from agent.kube.client import ApiClient, NoClusterConfigError
from agent.operate.doctor import (
    agent,
    cluster,
    cni,
    host_network,
    kernel,
    packet_sockets,
    programs,
    runtime,
    tools,
)
from agent.operate.doctor.results import DoctorReport, Passed, Result, report_of
from agent.settings import DEFAULT_RELAY_RANGES, RelayRanges

# Of all that waits for others; each of them has a shorter limit of its own.
_TIMEOUT_SECONDS = 60


async def run(
    bpffs: pathlib.Path,
    run_directory: pathlib.Path,
    relay_ranges: RelayRanges = DEFAULT_RELAY_RANGES,
    *,
    kubeconfig: str | None = None,
    cri_socket: pathlib.Path | None = None,
) -> DoctorReport:
    """Run all checks; without privileges, only the first. Raises `TimeoutError`."""
    try:
        preflight.check()
    except PreflightError as error:
        text, _, remedy = str(error).partition("; ")
        missing = found(kinds.PRIVILEGES_MISSING, text, remedy=as_sentence(remedy))
        return report_of([missing])
    results: list[Result] = [Passed("privileges", "bpf(2) is allowed and cgroup v2 is mounted.")]
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        # pyroute2's calls start an event loop of their own.
        results += await asyncio.to_thread(_of_kernel, bpffs)
        results += await host_network.check(bpffs, relay_ranges)
        results += await cni.check(bpffs)
        async with _api_client(kubeconfig) as api:
            if api is not None:
                results += [await runtime.check(cri_socket), *await cluster.check(api)]
            results += await agent.check(bpffs, run_directory, is_in_cluster=api is not None)
    return report_of(results)


def _of_kernel(bpffs: pathlib.Path) -> list[Result]:
    return [
        *kernel.check(bpffs),
        *programs.check(bpffs),
        packet_sockets.check(bpffs),
        tools.check(),
    ]


@contextlib.asynccontextmanager
async def _api_client(kubeconfig: str | None) -> AsyncIterator[ApiClient | None]:
    """None without a cluster."""
    try:
        api = await ApiClient.open(kubeconfig)
    except NoClusterConfigError:
        yield None
        return
    try:
        yield api
    finally:
        await api.aclose()

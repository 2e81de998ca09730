"""`podgate probe`: one probe by hand, from inside a pod, with everything that happens."""

import asyncio
import pathlib
import time
from collections.abc import Callable

import msgspec

from agent.admin import client as admin_client
from agent.admin.report import Report
from agent.errors import PodgateError
from agent.linux.pod_network import NetworkReader
from agent.settings import admin_socket
from probes.engine import hooks, prober, tracing
from probes.netns import Netns, NetnsError
from probes.results import Outcome
from probes.spec.definitions import HttpGet, Probe


class ProbeCommandError(PodgateError):
    """The probe cannot be run; one sentence that says what to do."""


class Where(msgspec.Struct, frozen=True):
    """A pod: its namespace, and the addresses to dial, the preferred one first."""

    netns: Netns
    addresses: tuple[str, ...]


async def find_netns(path: str) -> Where:
    """The pod in this network namespace. Raises ProbeCommandError."""
    try:
        netns = Netns.open(path)
        reader = NetworkReader()
        try:
            network = await reader.read(netns)
        finally:
            reader.close()
    except NetnsError as error:
        raise ProbeCommandError(str(error)) from error
    except TimeoutError as error:
        raise ProbeCommandError(f"the addresses in {path} could not be read in time.") from error
    return Where(netns, network.probe_addresses)


async def find_pod(name: str, run_directory: pathlib.Path) -> Where:
    """The pod that the running agent knows as `name` or `namespace/name`.

    Raises ProbeCommandError, and `adminclient.Unreachable` without an agent.
    """
    content = await admin_client.fetch(admin_socket(run_directory), "/status")
    report = msgspec.json.decode(content, type=Report)
    found = [pod for pod in report.pods if name in (pod.name, f"{pod.namespace}/{pod.name}")]
    if not found:
        raise ProbeCommandError(
            f"the agent knows no pod {name}; 'podgate status' lists those that it knows."
        )
    if len(found) > 1:
        names = ", ".join(f"{pod.namespace}/{pod.name}" for pod in found)
        raise ProbeCommandError(f"{name} is several pods: write one of {names}.")
    (pod,) = found
    if pod.netns is None:
        raise ProbeCommandError(f"pod {name} has no network namespace of its own to probe in.")
    try:
        return Where(Netns.open(pod.netns), tuple(pod.addresses or pod.unconfirmed))
    except NetnsError as error:
        raise ProbeCommandError(str(error)) from error


async def run(
    where: Where, probe: Probe, *, is_hook: bool, tell: Callable[[float, str, str], None]
) -> Outcome:
    """Run one probe or hook; `tell` hears milliseconds, address and text of each step."""
    if is_hook:
        assert isinstance(probe.handler, HttpGet)
        plan = hooks.plan(probe.handler, where.addresses, probe.timeout_seconds)
    else:
        plan = prober.plan(probe, where.addresses)
    started = time.monotonic()

    def step(address: str, text: str) -> None:
        tell((time.monotonic() - started) * 1000, address, text)

    running = prober.Prober(asyncio.get_running_loop())
    return await prober.run_once(running, tracing.traced(plan, step), where.netns)


def describe(outcome: Outcome) -> str:
    """The last line: what it came to, who answered and how long it took."""
    families = f" over {' and '.join(outcome.families)}" if outcome.families else ""
    text = tracing.printable(outcome.message)
    return f"{outcome.result.value}{families}{': ' if text else ''}{text}"
